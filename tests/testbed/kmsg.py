"""A pipe in place of the kernel's log."""

from __future__ import annotations

import os
from pathlib import Path


class Kmsg:
    """A pipe that returns records as /dev/kmsg does, but keeps no old records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._handle = os.open(path, os.O_RDWR)  # so that the pipe remains open between two readers

    def write(self, text: str, priority: int = 4) -> None:
        os.write(self._handle, f"{priority},1,1,-;{text}\n SUBSYSTEM=pci\n".encode())

    def close(self) -> None:
        os.close(self._handle)
