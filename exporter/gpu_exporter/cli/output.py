"""Standard streams that a command can always write to, even if their reader has ended."""

from __future__ import annotations

import errno
import io
import os
import sys
from select import select
from typing import Any

READER_LEFT = (errno.EPIPE, errno.EBADF)  # the reader (`| head`) has ended, or the stream is closed (`>&-`): no errors


class Output(io.FileIO):
    """A stream that drops data that it cannot write, so the command completes its work. `lost`: the first error."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another process has made the pipe non-blocking
                select((), (self,), ())
        except OSError as exc:
            self.lost = self.lost or exc
            return len(memoryview(data))
        return written


def prepare_streams() -> Output:
    """Replaces the standard streams, and returns the stream for output. A closed standard stream is opened on
    /dev/null, so that no file or socket of the program gets its descriptor number.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free number; a write to it fails
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    out, err = Output(1, "w", closefd=False), Output(2, "w", closefd=False)
    # "replace": a name that the terminal cannot show must not end the command
    sys.stdout, sys.stderr = _text(out, sys.stdout, "replace"), _text(err, sys.stderr, "backslashreplace")
    return out


def _text(raw: Output, former: object, errors: str) -> io.TextIOWrapper:
    """Wraps a stream as text. `former`: the stream that Python had opened, None if it was closed."""
    encoding, by_line = "utf-8", True
    if isinstance(former, io.TextIOWrapper):
        encoding, by_line = former.encoding, former.line_buffering or former.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)


def is_read() -> bool:
    """Returns whether standard output still has a reader. This stays true until a write fails."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not (isinstance(raw, Output) and raw.lost is not None)
