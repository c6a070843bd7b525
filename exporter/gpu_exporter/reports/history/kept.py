"""Keeps the answers of a PromQL API in a folder, so that an interrupted report can continue."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
from pathlib import Path

from gpu_exporter.common.files import read_gzip, write_atomically
from gpu_exporter.reports.history.asking import ANSWER_BYTES


class Folder:
    """Stores each answer in a file. The files contain label values of the site, so only their owner may read them."""

    def __init__(self, path: Path, tenant: str = "") -> None:
        """Creates the folder. `tenant`: as Client.tenant; answers for another tenant are not used. Raises OSError, also
        if another user owns the folder or can open it. Never changes the mode of an existing folder, because it may
        have another purpose.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user: name a folder of your own", str(path))
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            reason = f"other users can open it (mode {mode:04o}): chmod go=, or name a new folder"
            raise PermissionError(errno.EPERM, reason, str(path))
        self._path, self._tenant = path, tenant

    def get(self, key: str) -> str | None:
        """Returns the kept answer, None if it is missing or damaged."""
        try:
            return read_gzip(self._file(key), ANSWER_BYTES).decode("utf-8")
        except (OSError, EOFError, ValueError):
            return None

    def put(self, key: str, answer: str) -> None:
        """Keeps an answer. Raises OSError."""
        write_atomically(self._file(key), gzip.compress(answer.encode("utf-8"), 1, mtime=0), 0o600)

    def _file(self, key: str) -> Path:
        text = f"{self._tenant}\n{key}"
        return self._path / f"{hashlib.blake2b(text.encode('utf-8'), digest_size=16).hexdigest()}.json.gz"
