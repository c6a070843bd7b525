"""Texts that survive a restart: in the Lease, or without a Lease in the files of one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpu_exporter.common.files import PRIVATE, lock_kept, make_directory, read_kept, write_atomically
from gpu_exporter.reconciler.marks import MarkError

FILE_MAX = 1024 * 1024


class TextPlace(Protocol):
    """Stores texts that survive a restart. Every call may raise MarkError."""

    def read_text(self, key: str) -> str:
        """Returns the text under this key, "" if there is no text."""

    def write_text(self, key: str, text: str) -> None:
        """Replaces the text under this key."""


class TextFiles:
    """The files reconciler-NAME.json in a directory. No other process may use the directory at the same time."""

    def __init__(self, directory: Path) -> None:
        """Creates and locks the directory. Raises OSError; BlockingIOError if another process uses the directory."""
        make_directory(directory)
        self._directory = directory
        try:
            self._lock = lock_kept(directory / "reconciler.lock")
        except BlockingIOError as exc:
            raise BlockingIOError(f"{directory}: another reconciler keeps its state there") from exc

    def read_text(self, key: str) -> str:
        path = self._directory / f"reconciler-{key}.json"
        try:
            text = read_kept(path, FILE_MAX).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        except OSError as exc:
            raise MarkError("error", f"{path}: {exc.strerror}") from exc
        if not text:  # after a power failure, a new file may be empty
            raise MarkError("error", f"{path}: the file is empty: its content is lost; remove the file to start again")
        return text

    def write_text(self, key: str, text: str) -> None:
        path = self._directory / f"reconciler-{key}.json"
        try:
            write_atomically(path, text.encode(), PRIVATE, is_durable=True)  # an action may follow
        except OSError as exc:
            raise MarkError("error", f"{path}: {exc}") from exc
