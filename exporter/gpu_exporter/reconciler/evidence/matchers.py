"""Builds the matchers with which queries select the series of holders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gpu_exporter.common.promql.vector import VectorRow, literal
from gpu_exporter.reconciler.evidence.records import RENAMED_LABELS, HolderName

MATCHER_MAX = 12_000  # characters; VictoriaMetrics accepts queries of up to 16 KiB
HOLDER_LABELS = ("cluster", "scheduler", "namespace", "pod", "job_id", *RENAMED_LABELS)


class Asked(Protocol):
    """A PromQL API that is queried during a cycle. A Protocol, because PromQLSource imports the callers."""

    def select(self, metric: str, *wanted: str) -> str:
        """Returns a selector for the series of this metric, with these matchers and the matchers of the site."""

    def query(self, query: str, *, at: float | None = None) -> Sequence[VectorRow]:
        """Returns the rows now, or at another time (Unix seconds). Raises AnswerError."""


def restrict(names: Iterable[HolderName], most: int = MATCHER_MAX) -> Iterator[str]:
    """Returns matchers for the series of these holders, in batches of at most `most` characters.

    The matchers select pods by name in all namespaces, so the caller must compare the rows with the holders.
    """
    for scheduler, label in (("kubernetes", 'scheduler!="slurm",pod'), ("slurm", 'scheduler="slurm",job_id')):
        for batch in alternatives((name.name for name in names if name.scheduler == scheduler), most):
            yield f'{label}=~"{batch}"'


def match_any(label: str, values: Iterable[str]) -> Iterator[str]:
    """Returns matchers for series whose label has any of these values, in batches."""
    return (f'{label}=~"{batch}"' for batch in alternatives(values, MATCHER_MAX))


def alternatives(values: Iterable[str], most: int) -> Iterator[str]:
    """Returns regular expressions that match exactly these values, in batches of at most `most` characters."""
    batch: list[str] = []
    length = 0
    for value in sorted(set(map(literal, values))):
        if batch and length + len(value) > most:
            yield "|".join(batch)
            batch, length = [], 0
        batch.append(value)
        length += len(value) + 1
    if batch:
        yield "|".join(batch)
