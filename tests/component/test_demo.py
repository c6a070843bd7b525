"""The newcomer's first minute: the demo, faster, without a terminal."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.testbed.processes import GPU_EXPORTER

pytestmark = pytest.mark.slow


def test_the_demo_shows_holders_reasons_and_labels_and_ends_by_itself() -> None:
    done = subprocess.run(
        [*GPU_EXPORTER, "demo", "--speed=200", "--duration=46s"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, _, rest = done.stdout.partition("Marks that the reconciler would write")
    events, _, end = rest.partition("The node at the end:")
    assert "Status page http://127.0.0.1:" in first
    assert "Simulated GPUs" in first
    assert "job 48113" in first
    written = "job 48113: would write AdminComment=gpu-exporter.io/utilization={}: its one GPU idle for {} min"
    # at speed 200, a second is 3 minutes, and a cycle can be late on a busy machine
    assert re.search(written.format("candidate", "(6[0-9]|[7-9][0-9])"), events), events
    assert re.search(written.format("underused", "1[2-5][0-9]"), events), events
    for state in ("healthy", "held_no_process", "held_idle", "bursty", "throttled", "low", "mig", "free"):
        assert state in end, state
    labelled = [line for line in end.splitlines() if line.endswith("utilization=underused")]
    assert {line.split("  ")[0] for line in labelled} == {"job 48113", "nlp/notebook-ada", "serving/embedder-1"}
