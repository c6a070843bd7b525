"""`gpu-exporter digest`: reads, prints, ends."""

from __future__ import annotations

import sys

from gpu_exporter.clock import SYSTEM_CLOCK
from gpu_exporter.digest.read import Fetch, Reader
from gpu_exporter.digest.render import render_html, render_json, render_text
from gpu_exporter.exits import Exit
from gpu_exporter.reconciler.evidence.records import EvidenceError

RENDER = {"text": render_text, "html": render_html, "json": render_json}


def print_digest(url: str, matcher: str, interval_s: float, fetch: Fetch, since_s: float, form: str) -> int:
    """The digest up to now on standard output; the exit code, NO_DATA when there is nothing to say."""
    try:
        digest = Reader(url, matcher, interval_s, fetch).read(since_s, SYSTEM_CLOCK.wall())
    except EvidenceError as exc:
        print(f"gpu-exporter digest: {exc}", file=sys.stderr)  # noqa: T201
        return Exit.NO_DATA
    print(RENDER[form](digest), end="")  # noqa: T201
    return Exit.DONE
