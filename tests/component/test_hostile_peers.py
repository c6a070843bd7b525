"""A source of evidence that never answers: the reconciler goes on, says so, and ends when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for


@pytest.fixture
def mute() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that takes connections and answers a byte now and then; its address, and who came."""
    came: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                came.append(connection)
                threading.Thread(target=dribble, args=(connection,), daemon=True).start()

    def dribble(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.5)

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", came
    listener.close()
    for connection in came:
        connection.close()


@pytest.mark.parametrize("source", ["--source.prometheus", "--source.exporter"])
def test_a_signal_is_honoured_while_the_source_keeps_us_waiting(
    processes: Processes, mute: tuple[str, list[socket.socket]], source: str
) -> None:
    address, came = mute
    port = free_port()
    running = processes.start(
        [*GPU_EXPORTER, "reconcile", f"{source}={address}", f"--web.listen-address=127.0.0.1:{port}"]
    )
    wait_for(lambda: came or None, "the reconciler to ask")
    assert "the last cycle ended" in (fetch(f"http://127.0.0.1:{port}/-/healthy") or "")
    assert "gpu_reconciler_apply 0.0" in (fetch(f"http://127.0.0.1:{port}/metrics") or "")
    began = time.monotonic()
    running.process.terminate()
    assert running.process.wait(20) == 0
    print(f"ended {time.monotonic() - began:.2f} s after the signal")
    assert time.monotonic() - began < 5.0  # 0.6 s here; it was ten minutes
