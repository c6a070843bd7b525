"""Parses answers of a PromQL API, and builds the matchers of queries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from gpu_exporter.common.fetch import clean
from gpu_exporter.common.outside import need_sample
from gpu_exporter.reconciler.evidence.records import RENAMED_LABELS, EvidenceError, HolderName

MATCHER_MAX = 12_000  # characters; VictoriaMetrics accepts queries of up to 16 KiB
HOLDER_LABELS = ("cluster", "scheduler", "namespace", "pod", "job_id", *RENAMED_LABELS)
STRINGS = frozenset({str})
CLUSTER = re.compile(r'(?<![A-Za-z0-9_])cluster(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"')  # in matchers of PromQL


class VectorRow(NamedTuple):
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


class Asked(Protocol):
    """A PromQL API that is queried during a cycle. A Protocol, since PromQLSource imports those who ask."""

    def select(self, metric: str, *wanted: str) -> str:
        """A selector for the series of this metric, with these matchers and with the matchers of the site."""

    def query(self, query: str, *, at: float | None = None) -> Sequence[VectorRow]:
        """The rows now, or at another time (Unix seconds). Raises EvidenceError."""


def parse_vector(text: str, query: str) -> list[VectorRow]:
    """The rows of an answer of /api/v1/query. Raises EvidenceError with a text that names the query."""
    try:
        answer: Any = json.loads(text)
        if answer.get("status") != "success":
            raise EvidenceError(f"query failed: {clean(str(answer.get('error', 'no reason given')))}: {query}")
        data = answer["data"]
        if data["resultType"] != "vector":
            kind = clean(str(data["resultType"]))
            raise EvidenceError(f"the source returned a {kind} instead of a vector for the query: {query}")
        rows = [VectorRow(_labels(row["metric"]), need_sample(row["value"][1])) for row in data["result"]]
        rows = [row for row in rows if math.isfinite(row.value)]  # NaN and infinity are not evidence
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise EvidenceError(f"not an answer of a PromQL API ({type(exc).__name__}): {query}") from exc
    if answer.get("warnings") or answer.get("isPartial"):
        raise EvidenceError(f"the answer is partial, so nothing is decided on it: {query}")
    return rows


def _labels(metric: Any) -> dict[str, str]:
    labels = dict(metric)
    if not STRINGS.issuperset(map(type, labels.values())):  # JSON keys are strings; fast, since there are 300,000 rows
        raise TypeError
    return labels


def cluster_matchers(matcher: str) -> list[str]:
    """Those of the site's matchers that are on `cluster`: recorded series keep this label, and not `job`."""
    return [each[0] for each in CLUSTER.finditer(matcher)]


def restrict(names: Iterable[HolderName], most: int = MATCHER_MAX) -> Iterator[str]:
    """Matchers for the series of these holders, in batches of at most `most` characters.

    They match pods by name only, so the caller must compare the rows with the holders.
    """
    for scheduler, label in (("kubernetes", 'scheduler!="slurm",pod'), ("slurm", 'scheduler="slurm",job_id')):
        batch: list[str] = []
        length = 0
        for value in sorted({literal(name.name) for name in names if name.scheduler == scheduler}):
            if batch and length + len(value) > most:
                yield f'{label}=~"{"|".join(batch)}"'
                batch, length = [], 0
            batch.append(value)
            length += len(value) + 1
        if batch:
            yield f'{label}=~"{"|".join(batch)}"'


def literal(value: str) -> str:
    """An RE2 expression that matches exactly this value, escaped for a PromQL string."""
    return quote(re.sub(r"([^A-Za-z0-9_-])", r"\\\1", value))


def quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
