"""Answers of a source of evidence over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from gpu_exporter import fetch
from gpu_exporter.fetch import ANSWER_S, MOST_BYTES
from gpu_exporter.reconciler.evidence import EvidenceError


def fetch_text(
    url: str,
    form: Mapping[str, str] | None = None,
    most_bytes: int = MOST_BYTES,
    within_s: float = ANSWER_S,
    context: ssl.SSLContext | None = None,
) -> str:
    """As `fetch.fetch_text`. Raises EvidenceError."""
    try:
        return fetch.fetch_text(url, form, most_bytes, within_s, context)
    except fetch.FetchError as exc:
        raise EvidenceError(str(exc)) from exc


class Client:
    """`fetch_text` with certificates of the site's own, read again when their files change."""

    def __init__(self, ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> None:
        """`ca`: certificate authorities of the source; `cert`, `key`: our client certificate.

        Raises ValueError, OSError.
        """
        if (cert is None) != (key is None):
            raise ValueError("--source.tls.cert and --source.tls.key go together")
        self._ca, self._cert, self._key = ca, cert, key
        self._stamp, self._context = self._read_stamp(), self._build()

    def _read_stamp(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in (self._ca, self._cert, self._key) if path is not None)

    def _build(self) -> ssl.SSLContext | None:
        if self._ca is None and self._cert is None:
            return None
        context = ssl.create_default_context(cafile=self._ca)
        if self._cert is not None:
            context.load_cert_chain(self._cert, self._key)
        return context

    def __call__(
        self,
        url: str,
        form: Mapping[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
        within_s: float = ANSWER_S,
    ) -> str:
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._stamp, self._context = stamp, self._build()
        except OSError as exc:  # ssl.SSLError is one
            raise EvidenceError(f"--source.tls: {exc}") from exc
        return fetch_text(url, form, most_bytes, within_s, self._context)
