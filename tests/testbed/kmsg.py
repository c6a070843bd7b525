"""The kernel's log as a pipe of our own."""

from __future__ import annotations

import os
from pathlib import Path


class Kmsg:
    """A pipe that gives records as /dev/kmsg does, but for the ring in which those are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._handle = os.open(path, os.O_RDWR)  # so that it stays open between two readers

    def write(self, text: str, priority: int = 4) -> None:
        os.write(self._handle, f"{priority},1,1,-;{text}\n SUBSYSTEM=pci\n".encode())

    def close(self) -> None:
        os.close(self._handle)
