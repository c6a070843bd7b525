"""The jobs of `squeue --json` or `scontrol show job --json`, for agent, collector and reconciler. Pure.

22.05 prints plain numbers and words. 23.02 and later print {"set", "infinite", "number"} and lists. A job's owner
cannot forge an answer: a name or comment in JSON cannot imitate another field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpu_exporter.common.outside import load_json

T = TypeVar("T")
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


class _AnsweredJob:
    """A job of the answer. `is_malformed`: the job could not be read."""

    def __init__(self, value: Any, *, is_malformed: bool = False) -> None:
        self.value = value
        self.is_malformed = is_malformed


def read_jobs(text: str, read: Callable[[dict[str, Any]], T | None]) -> tuple[list[T], int]:
    """Returns the value of `read` for each job, and the number of malformed jobs. Malformed jobs are omitted.

    `read` returns None for a job to omit, and raises one of MALFORMED for a job that it cannot parse. Each job is
    reduced as soon as it is parsed: the whole parsed answer would take ten times the memory of its text. Raises
    ValueError if the text is not an answer of these commands, or if Slurm reports errors.
    """

    def reduce(fields: dict[str, Any]) -> Any:
        plain = unpack_number(fields)
        if plain is not fields or "job_id" not in fields:
            return plain
        try:
            return _AnsweredJob(read(fields))
        except MALFORMED:
            return _AnsweredJob(None, is_malformed=True)

    try:
        answer: Any = load_json(text, reduce)
        rows, errors = answer["jobs"], answer.get("errors") or ()
        if not isinstance(rows, list) or (rows and not any(isinstance(row, _AnsweredJob | dict) for row in rows)):
            raise TypeError("jobs is not a list of objects")
    except MALFORMED as exc:
        raise ValueError(f"cannot parse Slurm's JSON: {type(exc).__name__}") from exc
    if errors:  # 22.05 ends with status 0 and no jobs if the controller does not answer
        raise ValueError(f"Slurm answered with errors: {str(errors)[:200]}")
    jobs = [row for row in rows if isinstance(row, _AnsweredJob) and not row.is_malformed]
    return [job.value for job in jobs if job.value is not None], len(rows) - len(jobs)


def unpack_number(fields: dict[str, Any]) -> Any:
    """Replaces a number object of Slurm by its number, None if unset or infinite. Returns other objects unchanged."""
    if "number" in fields and fields.keys() <= {"set", "infinite", "number"}:
        return fields["number"] if fields.get("set", True) and not fields.get("infinite") else None
    return fields
