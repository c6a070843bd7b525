"""Evidence on many holders at once, from a server that limits the length of a query: VictoriaMetrics accepts 16 KiB."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import HostLimits
from tests.testbed.history_servers import VictoriaMetrics
from tests.testbed.processes import Processes

pytestmark = pytest.mark.servers
PODS = 400  # whose names have 20 KB together
STEP_S, STEPS = 120, 26 * 30
VALUES = {"info": 1, "share_ratio": 1, "idle_run_seconds": 9000, "host_cpus": 16, "host_activity_ratio": 0.125}
RISES = {
    "held_seconds_total": STEP_S,
    "observed_seconds_total": STEP_S,
    "busy_seconds_total": 0.05 * STEP_S,
}  # in each step


def series(end: float) -> Iterator[dict[str, Any]]:
    """Each pod has idled for hours, uses 2 of its 16 CPU cores, and used 5 % of its GPU in each hour of the last day."""
    of_node = {"job": "gpu-exporter", "node": "n1", "instance": "n1"}

    def line(name: str, labels: dict[str, str], *run: float) -> dict[str, Any]:
        first = end - STEP_S * (STEPS - 1)
        return {"labels": {"__name__": name, **of_node, **labels}, "start": first, "step": STEP_S, "runs": [list(run)]}

    yield line("gpu_exporter_build_info", {}, 1, STEPS)
    yield line("gpu_exporter_last_sample_timestamp_seconds", {}, end, STEPS)
    for i in range(PODS):
        pod = {
            "scheduler": "kubernetes",
            "namespace": "ml",
            "pod": f"train-of-the-language-model-{i:06d}-7d9c5b8f4d-x2x9p",
            "uuid": f"GPU-{i}",
        }
        for name, value in VALUES.items():
            yield line(f"gpu_allocation_{name}", pod, value, STEPS)
        for name, rise in RISES.items():
            yield line(f"gpu_allocation_{name}", pod, 0, STEPS, rise)


def test_the_evidence_on_many_holders_fits_into_the_queries_of_every_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Processes(tmp_path) as processes:
        server = VictoriaMetrics(processes, tmp_path, series(time.time()))
        peaks = Peaks(0.2, 86_400.0, SYSTEM_CLOCK)
        options = PromQLOptions(
            parse_address(server.url), 3600.0, 7200.0, 'job="gpu-exporter"', host=HostLimits(0.25, 20e6, 14_400.0)
        )
        source = PromQLSource(options, SYSTEM_CLOCK, peaks=peaks)
        evidence = source.read_evidence()
    units = [unit for holder in evidence.holders for unit in holder.units]
    assert len(units) == PODS
    assert {(unit.host_cores, unit.host_cpus, unit.host_cpu_ratio) for unit in units} == {(2.0, 16.0, None)}
    assert all(unit.cores_age_s is not None and unit.cores_age_s < 600.0 for unit in units)
    assert not caplog.records
    assert len(peaks.known) == PODS
