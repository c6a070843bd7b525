"""Renders series as Prometheus text 0.0.4 or OpenMetrics 1.0.

Formats: prometheus.io/docs/instrumenting/exposition_formats and the OpenMetrics specification. The lines of a family
are kept: all of them until a row changes, and their parts before the value until the labels change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.agent.exposition.series import Series
from gpu_exporter.common.plain import encodable, shorten

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MAX_LABEL_VALUE = 256  # characters; names of pods and jobs are shorter, longer (hostile) names are cut


def escape_label(value: str) -> str:
    """Escapes a label value for both formats. Cuts it if it is too long, because users choose names."""
    return shorten(encodable(value), MAX_LABEL_VALUE).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    """Returns the shortest text that parses to the same number. Whole numbers have no fraction."""
    text = repr(float(value))
    if text[-2:] != ".0":
        return text
    return text[:-2] if value else "0"  # not "-0"


class _Lines(NamedTuple):
    """The lines of one family as last rendered: their rows, the part of each line before its value, and the text."""

    rows: list[tuple[tuple[str, ...], float]]
    labels: list[tuple[str, ...]]
    prefixes: list[str]
    text: bytes


class TextRenderer:
    """Renders series, and keeps the lines of each family for the next call. Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, _Lines] = {}  # by family, of the last call; it has no lines of holders that are gone
        self._headers: dict[tuple[str, bool], bytes] = {}

    def render(
        self, series: Sequence[Series], *, openmetrics: bool = False, names: frozenset[str] = frozenset()
    ) -> str:
        """Returns the text of `series`. `names`: only these metric families, all if empty."""
        return self.encode(series, openmetrics=openmetrics, names=names).decode()

    def encode(
        self, series: Sequence[Series], *, openmetrics: bool = False, names: frozenset[str] = frozenset()
    ) -> bytes:
        """Returns the same as `render`, in UTF-8."""
        out: list[bytes] = []
        kept: dict[str, _Lines] = {}
        for each in series:
            family = each.family
            name = family.name
            if names and name not in names:
                continue
            lines = self._kept.get(name)
            if lines is None or lines.rows != each.rows:
                lines = _render_lines(each, lines)
            kept[name] = lines
            out.append(self._header(name, family.type, family.help, openmetrics))
            if lines.rows:
                out.append(lines.text)
        self._kept = {**self._kept, **kept} if names else kept
        out += [b"# EOF", b""] if openmetrics else [b""]
        return b"\n".join(out)

    def _header(self, name: str, kind: str, text: str, openmetrics: bool) -> bytes:
        header = self._headers.get((name, openmetrics))
        if header is None:
            shown = name.removesuffix("_total") if openmetrics and kind == "counter" else name
            escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
            header = f"# HELP {shown} {escaped}\n# TYPE {shown} {kind}".encode()
            self._headers[name, openmetrics] = header
        return header


def _render_lines(series: Series, before: _Lines | None) -> _Lines:
    """Renders the rows of a family. Takes the beginnings of lines from `before`, because labels rarely change."""
    labels = [labels for labels, _ in series.rows]
    if before is not None and before.labels == labels:
        prefixes = before.prefixes
    else:
        known = {} if before is None else dict(zip(before.labels, before.prefixes, strict=True))
        name, names = series.family.name, series.label_names
        prefixes = [known.get(each) or _render_prefix(name, names, each) for each in labels]
    lines = [prefix + format_value(value) for prefix, (_, value) in zip(prefixes, series.rows, strict=True)]
    return _Lines(series.rows, labels, prefixes, "\n".join(lines).encode())


def _render_prefix(name: str, label_names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    """Returns `name{a="b"} `, the beginning of a line. Omits empty labels, which are the same as absent labels."""
    pairs = ",".join(f'{key}="{escape_label(value)}"' for key, value in zip(label_names, labels, strict=True) if value)
    return f"{name}{{{pairs}}} " if pairs else f"{name} "
