"""Errors whose text may repeat what others say. Apart from fetch.py, since that loads an HTTP client."""

from __future__ import annotations

from gpu_exporter.common.plain import one_line


class ForeignError(Exception):
    """An error whose text may contain words of another program or file: of a server, a command, a driver, a user.

    The text is one line of limited length, so it may be printed, logged and published.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class AnswerError(ForeignError):
    """A server did not answer, or its answer is not usable. The text names the server and the reason."""
