"""Writing a body where a textfile collector reads it: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, body: bytes) -> None:
    """Write beside `path` and rename over it, mode 0644, so that a reader sees the old or the new file, never half.

    Raises OSError; the old file then stays.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        os.chmod(name, 0o644)  # noqa: PTH101 - node_exporter runs as another user
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
