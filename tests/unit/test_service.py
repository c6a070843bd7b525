"""Signals reach a program whatever its main thread does."""

from __future__ import annotations

import subprocess
import sys

# No signal ends the wait for a mutex, and the main thread runs no Python code meanwhile. A zero is an unlocked mutex. The
# other thread runs only when the main thread, at that wait, releases the interpreter.
PROGRAM = """
import ctypes, os, signal, sys, threading
from gpu_exporter.common.service import stop_on_signal

sys.setswitchinterval(1000.0)
stop, gate = stop_on_signal(), threading.Lock()

def watch():
    gate.acquire()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0 if stop.wait(10) else 1)

lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
gate.acquire()
threading.Thread(target=watch).start()
gate.release()
lock(mutex)
"""


def test_a_signal_is_followed_while_the_main_thread_waits_in_c() -> None:
    """As it does for a moment before each wait for a lock: a burst of signals in that moment hung the program."""
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=60).returncode == 0
