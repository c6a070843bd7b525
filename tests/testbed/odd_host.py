"""A host that allows no further threads, or whose wall clock is stepped, for a program that a test starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("odd_host.c")


class OddHost:
    """Start the program with `environment`; the methods then change its host."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        library = directory / "odd_host.so"
        subprocess.run(
            ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)],
            check=True,
        )
        self._directory = directory
        self.environment = {"ODD_HOST": str(directory), "LD_PRELOAD": str(library)}

    def has_threads(self, enough: bool) -> None:
        """Whether further threads can be started."""
        sign = self._directory / "no-threads"
        if enough:
            sign.unlink(missing_ok=True)
        else:
            sign.touch()

    def step(self, seconds: int) -> None:
        """Put the wall clock this much ahead of the true time."""
        (self._directory / "step").write_text(str(seconds))
