"""Errors whose text may quote other programs. Separate from fetch.py, which loads an HTTP client."""

from __future__ import annotations

from gpu_exporter.common.plain import one_line


class ForeignError(Exception):
    """An error whose text may quote another program, a file or a user, such as a server, a command or a driver.

    The text is one line of limited length, so it may be printed, logged and published.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class AnswerError(ForeignError):
    """A server did not answer, or its answer is not usable. The text names the server and the reason."""
