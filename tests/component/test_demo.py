"""The newcomer's first minute: the demo, faster, without a terminal."""

from __future__ import annotations

import subprocess

from tests.testbed.processes import GPU_EXPORTER


def test_the_demo_shows_holders_reasons_and_labels_and_ends_by_itself() -> None:
    done = subprocess.run(
        [*GPU_EXPORTER, "demo", "--speed=400", "--duration=24s"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, _, rest = done.stdout.partition("What the reconciler would write")
    events, _, end = rest.partition("The node at the end:")
    assert "Status page http://127.0.0.1:" in first
    assert "Simulated GPUs" in first
    assert "job 48113" in first
    assert "job 48113: would write Extra=gpu-exporter.io/utilization=candidate: its one GPU idle for 6" in events
    assert "job 48113: would write Extra=gpu-exporter.io/utilization=underused: its one GPU idle for 12" in events
    for state in ("healthy", "held_no_process", "held_idle", "bursty", "throttled", "low", "mig", "free"):
        assert state in end, state
    labelled = [line for line in end.splitlines() if line.endswith("utilization=underused")]
    assert {line.split("  ")[0] for line in labelled} == {"job 48113", "nlp/notebook-ada"}
