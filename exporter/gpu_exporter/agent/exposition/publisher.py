"""Renders the newest view at the first request for each format, and keeps the result until the next view."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import JSON_TYPE, render_json
from gpu_exporter.agent.exposition.page import HTML_TYPE, render_page
from gpu_exporter.agent.exposition.series import Series, list_series
from gpu_exporter.agent.exposition.table import render_table
from gpu_exporter.agent.exposition.text import OPENMETRICS_TYPE, TEXT_TYPE, TextRenderer
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import Buckets, History, View

TABLE_TYPE = "text/plain; charset=utf-8"
CONTENT_TYPES = {
    "prometheus": TEXT_TYPE,
    "openmetrics": OPENMETRICS_TYPE,
    "json": JSON_TYPE,
    "table": TABLE_TYPE,
    "holders": TABLE_TYPE,
    "page": HTML_TYPE,
}


@dataclass(slots=True)
class _Edition:
    key: object
    view: View
    series: list[Series]
    bodies: dict[tuple[str, bool], bytes] = field(default_factory=dict)


def no_history(_: UnitId) -> Buckets:
    """Returns an empty history, for callers that serve no page."""
    return Buckets((), 1.0)


class Publisher:
    """Returns the newest view in the requested format. Thread-safe."""

    def __init__(
        self,
        build_view: Callable[[], View],
        version: Callable[[], object],
        more_series: Callable[[], list[Series]] = list,
        history: History = no_history,
    ) -> None:
        """`version()`: returns another value when `build_view()` would return a new view.

        `more_series`: returns further series, which are added to the series of the view.
        """
        self._build_view = build_view
        self._version = version
        self._more_series = more_series
        self._history = history
        self._renderer = TextRenderer()
        self._edition: _Edition | None = None
        self._lock = threading.Lock()

    def body(self, form: str, *, zipped: bool = False, names: frozenset[str] = frozenset()) -> bytes:
        """Returns the newest view in one of the formats of CONTENT_TYPES. `names`: only these metric families, all if
        empty.
        """
        with self._lock:
            edition = self._current()
            if names:
                raw = self._render(edition, form, names)
                return gzip.compress(raw, 1) if zipped else raw
            raw = edition.bodies.get((form, False), b"")
            if not raw:
                raw = edition.bodies[form, False] = self._render(edition, form, names)
            if not zipped:
                return raw
            if (form, True) not in edition.bodies:
                edition.bodies[form, True] = gzip.compress(raw, 1)
            return edition.bodies[form, True]

    def rendered(self, form: str, *, zipped: bool = False) -> bytes | None:
        """Returns the text if it is already rendered, otherwise None. Needs no lock and does not wait."""
        edition = self._edition
        if edition is None or edition.key != self._version():
            return None
        return edition.bodies.get((form, zipped))

    def _current(self) -> _Edition:
        key = self._version()
        if self._edition is None or self._edition.key != key:
            view = self._build_view()
            self._edition = _Edition(key, view, [*list_series(view), *self._more_series()])
        return self._edition

    def _render(self, edition: _Edition, form: str, names: frozenset[str]) -> bytes:
        if form in ("prometheus", "openmetrics"):
            return self._renderer.encode(edition.series, openmetrics=form == "openmetrics", names=names)
        if form == "page":
            text = render_page(edition.view, self._history)
        else:
            text = {"json": render_json, "table": render_table, "holders": render_holders}[form](edition.view)
        return text.encode("utf-8", "replace")
