"""The newcomer's first minute: the demo, faster, without a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading

import pytest

from tests.testbed.processes import GPU_EXPORTER

pytestmark = pytest.mark.slow


def test_the_demo_shows_holders_reasons_and_labels_and_ends_by_itself() -> None:
    """Also where it does not run for two seconds now and then, as on a busy machine: at this speed that is 4 minutes."""
    command = [*GPU_EXPORTER, "demo", "--speed=120", "--duration=77s"]
    is_over = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:

        def disturb() -> None:
            while not is_over.wait(9.0):
                demo.send_signal(signal.SIGSTOP)
                is_over.wait(2.0)
                demo.send_signal(signal.SIGCONT)

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            shown, _ = demo.communicate(timeout=240)
        finally:
            is_over.set()
            disturbing.join()
            demo.kill()
    assert demo.returncode == 0
    first, _, rest = shown.partition("Marks that the reconciler would write")
    events, _, end = rest.partition("The node at the end:")
    assert "Status page http://127.0.0.1:" in first
    assert "Simulated GPUs" in first
    assert "Ctrl-C" not in first  # it ends by itself
    assert "The demo follows the advice" in first and "Seventeen minutes later" in first
    assert events.startswith(", as they happen (dry run):\n  ")
    assert "job 48113" in first
    written = "job 48113: would write AdminComment=gpu-exporter.io/utilization={}: its one GPU idle for {} min"
    # at speed 120, a second is 2 minutes, and a cycle can be late on a busy machine
    assert re.search(written.format("candidate", "(6[0-9]|[7-9][0-9])"), events), events
    assert re.search(written.format("underused", "1[2-5][0-9]"), events), events
    for state in ("healthy", "held_no_process", "held_idle", "bursty", "throttled", "low", "mig", "free"):
        assert state in end, state
    labelled = [line for line in end.splitlines() if line.endswith("utilization=underused")]
    assert {line.split("  ")[0] for line in labelled} == {"job 48113"}
    (server,) = [line for line in end.splitlines() if line.startswith("serving/embedder-1 ")]
    assert (
        " serving " in server and "it serves requests (Service embedder-1)" in server and server.rstrip().endswith("-")
    )
    assert any(line.startswith("nlp/notebook-ada") and "candidate" in line for line in end.splitlines())


def test_the_demo_at_a_terminal_shows_first_how_it_ends() -> None:
    terminal, its = os.openpty()
    with subprocess.Popen([*GPU_EXPORTER, "demo"], stdout=its, stderr=subprocess.STDOUT) as demo:
        os.close(its)
        shown = b""
        while b"first minutes" not in shown:
            shown += os.read(terminal, 4096)
        demo.send_signal(signal.SIGINT)
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # the demo has closed the terminal
            os.close(terminal)
    assert demo.returncode == 0, shown
    assert b"Ctrl-C ends the demo." in shown.partition(b"first minutes")[0]
