"""Runs `record`: reads the GPUs for a while, as the exporter does, and saves every answer of the driver."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.library import LiveLibrary
from gpu_exporter.agent.devices.nvml.recording import CallSummary, Recorder, summarize
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.tap import EVENT_WAIT_S, Tap, listen
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.files import write_atomically
from gpu_exporter.common.plain import layout
from gpu_exporter.common.service import stop_on_signal
from gpu_exporter.common.threads import start
from gpu_exporter.common.version import VERSION

log = logging.getLogger(__name__)
HEADER = ("CALL", "TIMES", "P50 US", "P99 US", "REFUSED")


def _render_table(calls: Sequence[CallSummary]) -> str:
    rows = [
        (each.call, str(each.times), f"{each.p50_us:.0f}", f"{each.p99_us:.0f}", " ".join(each.refused))
        for each in calls
    ]
    return "\n".join(layout(HEADER, rows, frozenset(HEADER[1:4]))) + "\n"


def _render_json(calls: Sequence[CallSummary]) -> str:
    return json.dumps({"calls": [each._asdict() for each in calls]}, indent=1) + "\n"


RENDER = {"table": _render_table, "json": _render_json}


class RecordingRequest(NamedTuple):
    """A request to record.

    - `path`: the file to write.
    - `interval_s`: seconds between two cycles.
    - `hashed`: replace UUIDs by hashes.
    - `form`: format of the printed summary, table or json.
    """

    path: Path
    duration_s: float
    interval_s: float
    hashed: bool
    form: str


def record(wish: RecordingRequest, settings: Settings) -> int:
    """Records until the duration is over or a signal comes, writes the file, prints a summary. Returns the exit code.

    Raises OSError.
    """
    path, interval_s = wish.path, wish.interval_s
    recorder = Recorder(LiveLibrary(), hashed=wish.hashed)
    backend = NvmlBackend(recorder)
    try:
        backend.open()
        count = backend.count()
    except DriverUnavailable as exc:
        print(f"gpu-exporter: no GPU data: {exc}", file=sys.stderr)  # noqa: T201 - the user's one line
        return Exit.NO_DATA
    if not path.parent.is_dir():  # checked before the recording, not after it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    log.info("recording %d GPUs for %g s into %s; Ctrl-C ends early", count, wish.duration_s, path)
    stop = stop_on_signal()
    taps = [Tap(backend, position, activity_rules(settings), interval_s, stop) for position in range(count)]
    threads = [threading.Thread(target=tap.run, daemon=True) for tap in taps]
    threads.append(threading.Thread(target=listen, args=(backend, taps, stop), daemon=True))
    for thread in threads:
        start(thread)
    stop.wait(wish.duration_s)
    stop.set()
    deadline = time.monotonic() + interval_s + 4 * EVENT_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))  # a call that hangs is recorded up to this moment
    about = {
        "exporter": VERSION,
        "binding": metadata.version("nvidia-ml-py"),
        "python": sys.version.split()[0],
    }
    write_atomically(path, recorder.render(**about))
    sys.stdout.write(RENDER[wish.form](summarize(recorder.answers)))
    log.info("wrote %s (%d bytes)", path, path.stat().st_size)
    return 0
