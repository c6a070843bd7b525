"""Keeps the state of a source across restarts of the exporter: one JSON file for each source in the state directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from gpu_exporter.common.files import read_kept, write_atomically
from gpu_exporter.common.outside import load_json

log = logging.getLogger(__name__)
READ_MAX = 4 * 1024 * 1024
VERSION = 1


class Remembered:
    """One state file of one node. Not thread-safe."""

    def __init__(self, directory: Path | None, name: str, node: str, loss: str, *, writes: bool) -> None:
        """- `directory`: None to remember nothing.
        - `writes`: whether to write the file.
        - `loss`: the data that a restart loses without the file, for messages.
        """
        self._path = directory / name if directory is not None else None
        self._node, self._loss = node, loss
        self.is_kept = self._path is not None and writes
        self._problem = ""

    def read(self) -> Any:
        """Returns the content of the file. None if the file is missing, invalid, or from another node or version."""
        if self._path is None:
            return None
        try:
            data = load_json(read_kept(self._path, READ_MAX).decode("utf-8"))
            return data["body"] if (data["version"], data["node"]) == (VERSION, self._node) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
            self.refuse(exc)
            return None

    def refuse(self, reason: Exception) -> None:
        """Logs that the content of the file cannot be parsed."""
        log.warning("%s is ignored: %s %s", self._path, type(reason).__name__, reason)

    def write(self, body: Any, mode: int) -> None:
        """Writes `body`. Logs a failure once."""
        if self._path is None or not self.is_kept:
            return
        text = json.dumps({"version": VERSION, "node": self._node, "body": body})
        try:
            write_atomically(self._path, text.encode(), mode)
            self._problem = ""
        except OSError as exc:
            if self._problem != str(exc):
                log.warning("cannot write %s (%s): a restart of the exporter loses %s", self._path, exc, self._loss)
            self._problem = str(exc)
