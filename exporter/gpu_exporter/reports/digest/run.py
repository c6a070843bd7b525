"""`gpu-exporter digest`: reads the usage of a period from Prometheus, prints it and exits."""

from __future__ import annotations

import sys

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.reports.digest.read import DigestReader
from gpu_exporter.reports.digest.render import render_html, render_json, render_text

RENDER = {"text": render_text, "html": render_html, "json": render_json}


def print_digest(address: Address, matcher: str, alerts: Alerts, fetch: Fetch, since_s: float, form: str) -> int:
    """Prints the digest up to now on standard output. Returns the exit code, NO_DATA if there is no data."""
    try:
        digest = DigestReader(address, matcher, alerts, fetch).read(since_s, SYSTEM_CLOCK.wall())
    except AnswerError as exc:
        print(f"gpu-exporter digest: {exc}", file=sys.stderr)  # noqa: T201
        return Exit.NO_DATA
    print(RENDER[form](digest), end="")  # noqa: T201
    return Exit.DONE
