"""What a source remembers over a restart of the exporter: one JSON file of the state directory each."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from gpu_exporter.files import read_plain, write_atomically
from gpu_exporter.outside import load_json

log = logging.getLogger(__name__)
READ_MAX = 4 * 1024 * 1024
VERSION = 1


class Remembered:
    """One file, of one node. One thread at a time."""

    def __init__(self, directory: Path | None, name: str, node: str, loss: str, *, writes: bool) -> None:
        """`directory`: None to remember nothing; `loss`: what a restart forgets where it cannot be written; `writes`:
        whether to keep anything.
        """
        self._path = directory / name if directory is not None else None
        self._node, self._loss = node, loss
        self.is_kept = self._path is not None and writes
        self._problem = ""

    def read(self) -> Any:
        """What was kept, None where that is nothing, of another node or version, or no JSON."""
        if self._path is None:
            return None
        try:
            data = load_json(read_plain(self._path, READ_MAX).decode("utf-8"))
            return data["body"] if (data["version"], data["node"]) == (VERSION, self._node) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
            self.refuse(exc)
            return None

    def refuse(self, reason: Exception) -> None:
        """Say that what was kept is not understood."""
        log.warning("%s is ignored: %s", self._path, reason)

    def write(self, body: Any, mode: int) -> None:
        """Keep `body`; that it cannot be kept is said once."""
        if self._path is None or not self.is_kept:
            return
        text = json.dumps({"version": VERSION, "node": self._node, "body": body})
        try:
            write_atomically(self._path, text.encode(), mode)
            self._problem = ""
        except OSError as exc:
            if self._problem != str(exc):
                log.warning("%s cannot be written, so a restart forgets %s: %s", self._path, self._loss, exc)
            self._problem = str(exc)
