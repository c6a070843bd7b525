"""A state directory that cannot be written."""

from __future__ import annotations

import json
import resource

from tests.testbed.faults import FaultTable, Rig, Seen
from tests.testbed.processes import fetch


def test_failed_state_writes_are_reported_and_counted_until_they_succeed(rig: Rig, matrix: FaultTable) -> None:
    settings = "sampling: {interval: 200ms}\nattribution: {interval: 200ms}\nstate: {write_interval: 200ms}\n"
    running, url = rig.start(f"--state.directory={rig.directory / 'state'}", settings=settings)
    observed = "gpu_observed_seconds_total"
    errors, written = "gpu_exporter_state_write_errors_total", "gpu_exporter_state_last_write_timestamp_seconds"
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    first = seen.one(written) or 0.0
    seen = rig.wait_until(url, "two writes with counters", lambda seen: (seen.one(written) or 0) > first + 0.2)
    assert seen.one(errors) == 0
    # From now on every write of more than one byte fails, as on a full disk. Writes to the log may fail too.
    limit = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    # The exporter retries every 200 ms: after ten tries no counter may grow.
    stopped = rig.wait_until(url, "the errors", lambda seen: (seen.one(errors) or 0) >= 10)
    last = stopped.one(written)
    assert last is not None
    (warning,) = json.loads(fetch(f"{url}/api/v1/status") or "")["warnings"]
    path = rig.directory / "state" / "state"
    assert warning.startswith(f"{path}: the state file cannot be written (File too large). Counters stand still")
    assert warning in (fetch(f"{url}/") or "")

    def stays_stopped(seen: Seen) -> None:
        assert seen[observed] == stopped[observed]
        assert seen.one(written) == last

    rig.hold(url, 1.0, stays_stopped)
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, limit)
    rig.wait_until(url, "the next write", lambda seen: (seen.one(written) or 0) > last)
    rig.wait_until(url, "counters to go on", lambda seen: seen[observed]["0"] > stopped[observed]["0"])
    assert json.loads(fetch(f"{url}/api/v1/status") or "")["warnings"] == []
    assert running.stop() == 0
    matrix.add(
        "state directory full or read-only",
        "counters do not grow; gauges are fresh",
        "`gpu_exporter_state_write_errors_total`, `gpu_exporter_state_last_write_timestamp_seconds`; log and page name the reason",
        "the next successful write",
    )
