"""Parts of the workloads: CPU work, loaders, the training loop."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing as mp
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from queue import Full
from typing import Any

from gpu_exporter_torch import observe
from tests.workloads.device import SimulatedDevice
from tests.workloads.stream import install

PR_SET_NAME = 15
BLOCK = 1 << 20
NEVER = object()  # no sample is this
FORK = mp.get_context("fork")


def set_name(name: str) -> None:
    """Name this process as the kernel shows it, as torch names its loaders."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def burn(seconds: float) -> None:
    """Use this much CPU time, however long it takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def burn_in_threads(number: int) -> None:
    """Keep threads busy outside of the interpreter's lock, as OpenMP does."""

    def work() -> None:
        data = os.urandom(1 << 18)
        while True:
            zlib.compress(data, 6)

    for _ in range(number):
        threading.Thread(target=work, daemon=True).start()


def _load(queue: Any, make: Callable[[], None], name: str) -> None:
    if name:
        set_name(name)
    while True:
        make()
        with contextlib.suppress(Full):
            queue.put(b"x" * 1000, timeout=5.0)


def start_loaders(number: int, make: Callable[[], None], name: str = "pt_data_worker") -> Any:
    """Processes that make samples; the queue has room for two of each, as PyTorch's prefetch_factor."""
    queue = FORK.Queue(maxsize=2 * number)
    for _ in range(number):
        FORK.Process(target=_load, args=(queue, make, name), daemon=True).start()
    return queue


def train(
    device: SimulatedDevice, step_s: float, get: Callable[[], Any], after: Callable[[int], None] | None = None
) -> None:
    """Steps of this length on the device, for ever: get a sample, launch, wait. `after`: called with each step's number.

    The hook observes the loop where the lab has made a folder for its report.
    """
    device.open_context()
    install(device)
    for step, _ in enumerate(observe(iter(get, NEVER), summary=False), 1):
        device.launch(step_s)
        device.synchronize()
        if after is not None:
            after(step)


def write_direct(path: Path, size: int) -> None:
    """Write past the page cache: version 1 of cgroups counts only such writes."""
    data = mmap.mmap(-1, BLOCK)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        for position in range(size // BLOCK):
            os.pwrite(descriptor, data, position * BLOCK)
    finally:
        os.close(descriptor)


def read_direct(path: Path, size: int) -> None:
    """Read the beginning of a file past the page cache."""
    data = mmap.mmap(-1, size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(descriptor, [data], 0)
    finally:
        os.close(descriptor)
