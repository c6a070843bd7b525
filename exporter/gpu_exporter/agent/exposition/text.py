"""Renders series as Prometheus text 0.0.4 or OpenMetrics 1.0.

Formats: prometheus.io/docs/instrumenting/exposition_formats and the OpenMetrics specification. The part of a line
before its value is rendered once for each (family, labels) and kept, because labels rarely change between two scrapes.
"""

from __future__ import annotations

from collections import defaultdict
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
    text = repr(float(value))
    if text[-2:] != ".0":
        return text
    return text[:-2] if value else "0"  # not "-0"


class TextRenderer:
    """Renders series, and keeps the beginnings of lines for the next call. Used by one thread at a time."""

    def __init__(self) -> None:
        self._prefixes: defaultdict[str, dict[tuple[str, ...], str]] = defaultdict(dict)  # by family and labels
        self._headers: dict[tuple[str, bool], str] = {}

    def render(
        self, series: Sequence[Series], *, openmetrics: bool = False, names: frozenset[str] = frozenset()
    ) -> str:
        """Returns the text of `series`. `names`: only these metric families, all if empty."""
        out: list[str] = []
        lines = 0  # of all families, so that a request for a few families does not trigger _forget
        for family, label_names, rows in series:
            lines += len(rows)
            name = family.name
            if names and name not in names:
                continue
            out.append(self._header(name, family.type, family.help, openmetrics))
            prefixes = self._prefixes[name]
            for labels, value in rows:
                prefix = prefixes.get(labels)
                if prefix is None:
                    prefix = prefixes[labels] = _render_prefix(name, label_names, labels)
                out.append(prefix + format_value(value))
        if sum(map(len, self._prefixes.values())) > 2 * lines + SPARE_PREFIXES:
            self._forget(series)
        out += ["# EOF", ""] if openmetrics else [""]
        return "\n".join(out)

    def _forget(self, series: Sequence[Series]) -> None:
        """Forgets the beginnings of lines of holders that are gone."""
        present = {family.name: {labels for labels, _ in rows} for family, _, rows in series}
        kept = self._prefixes
        self._prefixes = defaultdict(dict)
        for name, labels in present.items():
            self._prefixes[name] = {key: prefix for key, prefix in kept[name].items() if key in labels}

    def _header(self, name: str, kind: str, text: str, openmetrics: bool) -> str:
        header = self._headers.get((name, openmetrics))
        if header is None:
            shown = name.removesuffix("_total") if openmetrics and kind == "counter" else name
            escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
            header = f"# HELP {shown} {escaped}\n# TYPE {shown} {kind}"
            self._headers[name, openmetrics] = header
        return header


def _render_prefix(name: str, label_names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    """Returns `name{a="b"} `, the beginning of a line. Omits empty labels, which are the same as absent labels."""
    pairs = ",".join(f'{key}="{escape_label(value)}"' for key, value in zip(label_names, labels, strict=True) if value)
    return f"{name}{{{pairs}}} " if pairs else f"{name} "
