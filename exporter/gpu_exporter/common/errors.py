"""What goes wrong with the answers of others. Apart from fetch.py, since that loads an HTTP client."""

from __future__ import annotations


class AnswerError(Exception):
    """A server did not answer, or its answer is not usable. The text names the server and the reason."""
