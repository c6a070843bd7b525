"""Standard output of a command that prints a text and ends."""

from __future__ import annotations

import os
import sys

from gpu_exporter.common.exits import Exit


def show(text: str) -> int:
    """Print the text; the exit code. A reader that has seen enough, e.g. `| head`, is no error."""
    if sys.stdout is None:  # closed by the caller
        return Exit.DONE
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if sys.stderr is not None:
            sys.stderr.write(f"gpu-exporter: standard output cannot be written: {exc.strerror}\n")
        return Exit.UNFORESEEN
    return Exit.DONE
