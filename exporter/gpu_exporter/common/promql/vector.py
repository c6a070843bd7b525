"""Parses answers of a PromQL API, and builds the matchers of queries."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.outside import need_sample
from gpu_exporter.common.plain import REASON_MAX, one_line

PARTS_MAX = 24  # opening brackets and commas of a row with nineteen labels; a row of our queries has at most nine
STRINGS = frozenset({str})
CLUSTER = re.compile(r'(?<![A-Za-z0-9_])cluster(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"')  # in matchers of PromQL


class TooManyRows(AnswerError):
    """The answer has more rows than allowed."""


class VectorRow(NamedTuple):
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


def parse_vector(text: str, query: str, rows_max: int | None = None) -> list[VectorRow]:
    """Parses the rows of an answer of /api/v1/query. Raises AnswerError with a text that names the query.

    `rows_max`: the most rows. A text with more objects than these rows need is not parsed.
    """
    if rows_max is not None and sum(map(text.count, "[{,")) > PARTS_MAX * (rows_max + 1):
        raise TooManyRows(f"the answer has more than {rows_max} rows: {query}")
    try:
        answer: Any = json.loads(text)
        if answer.get("status") != "success":
            reason = one_line(str(answer.get("error", "no reason given")), REASON_MAX)
            raise AnswerError(f"query failed: {reason}: {query}")
        data = answer["data"]
        if data["resultType"] != "vector":
            kind = one_line(str(data["resultType"]), REASON_MAX)
            raise AnswerError(f"the source returned a {kind} instead of a vector for the query: {query}")
        if rows_max is not None and len(data["result"]) > rows_max:
            raise TooManyRows(f"the answer has more than {rows_max} rows: {query}")
        rows = [VectorRow(_labels(row["metric"]), need_sample(row["value"][1])) for row in data["result"]]
        rows = [row for row in rows if math.isfinite(row.value)]  # NaN and infinity are not evidence
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise AnswerError(f"not an answer of a PromQL API ({type(exc).__name__}): {query}") from exc
    if answer.get("warnings") or answer.get("isPartial"):
        raise AnswerError(f"the answer is partial, so it is not used: {query}")
    return rows


def _labels(metric: Any) -> dict[str, str]:
    # JSON keys are strings. Fast and without a copy, since there are 300,000 rows.
    if not isinstance(metric, dict) or not STRINGS.issuperset(map(type, metric.values())):
        raise TypeError
    return metric


def cluster_matchers(matcher: str) -> list[str]:
    """Returns the site's matchers for the label `cluster`. Recorded series keep this label, but lose `job`."""
    return [each[0] for each in CLUSTER.finditer(matcher)]


def literal(value: str) -> str:
    """Returns an RE2 expression that matches exactly this value, escaped for a PromQL string."""
    return quote(re.sub(r"([^A-Za-z0-9_-])", r"\\\1", value))


def quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
