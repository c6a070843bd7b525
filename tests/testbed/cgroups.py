"""Processes in cgroups with the names that Slurm and the kubelet use: real cgroups, or a /proc made of files.

Real cgroups need root and a writable hierarchy (freezer of v1, or v2). Files need neither: the exporter gets a folder
as --path.procfs, with the real stat of each process and the cgroup that it would have.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path("/sys/fs/cgroup")
PREFIX = "gpu-exporter-cgroups-"
REMOVE_S = 5.0  # after its last process was killed, a cgroup is busy for a moment


class Places(Protocol):
    """A place for processes. `procfs` shows them."""

    procfs: Path

    def put(self, pid: int, path: str) -> None:
        """Put a process into the cgroup `path`, e.g. `slurm/uid_0/job_42/step_0`."""

    def close(self) -> None:
        """Remove everything; the processes must have ended."""


class RealCgroups:
    """Cgroups of this machine, below a folder of the tests."""

    procfs = Path("/proc")

    def __init__(self, controller: str = "freezer") -> None:
        """`controller`: the version 1 controller in whose tree the cgroups are created."""
        hierarchy = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / controller
        if os.geteuid() != 0 or not os.access(hierarchy, os.W_OK):
            assert not os.environ.get("CI"), "CI runs the cgroup tests as root"
            pytest.skip("cgroups need root and a writable hierarchy")
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=hierarchy))

    def put(self, pid: int, path: str) -> None:
        folder = self._folder / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        deadline = time.monotonic() + REMOVE_S
        while self._folder.exists():
            for folder in sorted(self._folder.rglob("*/"), key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            assert time.monotonic() < deadline, f"{self._folder} could not be removed"


class ProcFiles:
    """A /proc of files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.procfs = folder / "proc"
        self._copy_stat(2)  # kthreadd: it shows that this is the host

    def _copy_stat(self, pid: int) -> Path:
        target = self.procfs / str(pid)
        target.mkdir(parents=True, exist_ok=True)
        real = Path(f"/proc/{pid}/stat")
        if real.exists():
            (target / "stat").write_bytes(real.read_bytes())
        else:  # no process of this machine has this pid: it counts as old as the machine
            (target / "stat").write_text(f"{pid} (made up) S 1 {'0 ' * 40}\n", encoding="utf-8")
        return target

    def put(self, pid: int, path: str) -> None:
        target = self._copy_stat(pid)
        # By rename, since the exporter may read at the same time.
        (target / "new").write_text(f"0::/{path}\n", encoding="utf-8")
        (target / "new").rename(target / "cgroup")

    def close(self) -> None:
        shutil.rmtree(self.procfs)


class MemoryLimit:
    """A cgroup with a memory limit, as a container has."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        is_v2 = (ROOT / "cgroup.controllers").exists()
        hierarchy = ROOT if is_v2 else ROOT / "memory"
        if os.geteuid() != 0 or not os.access(hierarchy, os.W_OK):
            assert not os.environ.get("CI"), "CI runs the cgroup tests as root"
            pytest.skip("cgroups need root and a writable hierarchy")
        self.limit = limit
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=hierarchy))
        self._peak = self._folder / ("memory.peak" if is_v2 else "memory.max_usage_in_bytes")
        (self._folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit))

    def wrap(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs `command` inside the cgroup."""
        return ["sh", "-c", f'echo $$ >{self._folder}/cgroup.procs && exec "$@"', "sh", *map(str, command)]

    def peak_mib(self) -> float:
        """The peak memory in MiB, including page cache."""
        return int(self._peak.read_text("ascii")) / 2**20

    def close(self) -> None:
        """End all processes inside, and remove the cgroup."""
        deadline = time.monotonic() + REMOVE_S
        while self._folder.exists():
            for pid in (self._folder / "cgroup.procs").read_text("ascii").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            assert time.monotonic() < deadline, f"{self._folder} could not be removed"
