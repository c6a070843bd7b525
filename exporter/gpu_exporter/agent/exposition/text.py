"""Renders series as Prometheus text 0.0.4 or OpenMetrics 1.0.

Formats: prometheus.io/docs/instrumenting/exposition_formats and the OpenMetrics specification. The part of a line
before its value is rendered once for each (family, labels) and kept, because labels rarely change between two scrapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu_exporter.agent.exposition.series import Series
from gpu_exporter.common.plain import encodable, shorten

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MAX_LABEL_VALUE = 256  # characters; names of pods and jobs are shorter, longer (hostile) names are cut
SPARE_PREFIXES = 512  # kept beyond twice the current lines, so that short-lived holders do not trigger _forget


def escape_label(value: str) -> str:
    """Escapes a label value for both formats. Cuts it if it is too long, because users choose names."""
    return shorten(encodable(value), MAX_LABEL_VALUE).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    """Returns the shortest text that parses to the same number. Whole numbers have no fraction."""
    if value == math.floor(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


class TextRenderer:
    """Renders series, and keeps the beginnings of lines for the next call. Used by one thread at a time."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[str, tuple[str, ...]], str] = {}
        self._headers: dict[tuple[str, bool], str] = {}

    def render(
        self, series: Sequence[Series], *, openmetrics: bool = False, names: frozenset[str] = frozenset()
    ) -> str:
        """Returns the text of `series`. `names`: only these metric families, all if empty."""
        out: list[str] = []
        prefixes = self._prefixes
        lines = 0  # of all families, so that a request for a few families does not trigger _forget
        for family, label_names, rows in series:
            lines += len(rows)
            if names and family.name not in names:
                continue
            out.append(self._header(family.name, family.type, family.help, openmetrics))
            name = family.name
            for labels, value in rows:
                prefix = prefixes.get((name, labels))
                if prefix is None:
                    prefix = prefixes[name, labels] = _render_prefix(name, label_names, labels)
                out.append(f"{prefix}{format_value(value)}\n")
        if len(prefixes) > 2 * lines + SPARE_PREFIXES:
            self._forget(series)
        if openmetrics:
            out.append("# EOF\n")
        return "".join(out)

    def _forget(self, series: Sequence[Series]) -> None:
        """Forgets the beginnings of lines of holders that are gone."""
        present = {(family.name, labels) for family, _, rows in series for labels, _ in rows}
        self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key in present}

    def _header(self, name: str, kind: str, text: str, openmetrics: bool) -> str:
        header = self._headers.get((name, openmetrics))
        if header is None:
            shown = name.removesuffix("_total") if openmetrics and kind == "counter" else name
            escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
            header = f"# HELP {shown} {escaped}\n# TYPE {shown} {kind}\n"
            self._headers[name, openmetrics] = header
        return header


def _render_prefix(name: str, label_names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    """Returns `name{a="b"} `, the beginning of a line. Omits empty labels, which are the same as absent labels."""
    pairs = ",".join(f'{key}="{escape_label(value)}"' for key, value in zip(label_names, labels, strict=True) if value)
    return f"{name}{{{pairs}}} " if pairs else f"{name} "
