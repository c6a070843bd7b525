"""Parses the job or pod that a user names, and builds the PromQL matchers for it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.common.promql.vector import literal, quote

JOB = re.compile(r"(?:job[ /])?([0-9]{1,10})(?:([_+])([0-9]{1,10}))?")
PLACE = re.compile(r"([^/\s]{1,253})/([^/\s]{1,253})")
RAWS_MAX = 2_000  # tasks of one array that are looked for by their own ids
FORMS = "write a job as ID, ARRAY_TASK or LEADER+OFFSET, and a pod or the owner of pods as NAMESPACE/NAME"


class AskedJob(NamedTuple):
    """A Slurm job, or pods.

    - `number`: id of a job, of an array, or of the leader of a heterogeneous job.
    - `mark`, `part`: `_` and an array task, or `+` and the offset of a component. Both are "" for the whole job.
    - `namespace`, `name`: of a pod, or of an owner of pods (a Job, a PodGang, a Deployment).
    - `raws`: job ids of its tasks or components in Slurm's record. The series show a task's array only after some
      minutes, so short tasks are found only by these ids.
    """

    number: str = ""
    mark: str = ""
    part: str = ""
    namespace: str = ""
    name: str = ""
    raws: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        return f"job {self.number}{self.mark}{self.part}" if self.number else f"{self.namespace}/{self.name}"

    def labels(self) -> list[list[tuple[str, str]]]:
        """Returns label values of each kind of holder that may belong to the job."""
        if not self.number:
            return [[("namespace", self.namespace), ("pod", self.name)]]
        if self.mark == "_":
            return [[("array_job_id", self.number), ("array_task_id", self.part)]]
        if self.mark == "+":
            return [[("het_job_id", self.number), ("het_job_offset", self.part)]]
        return [[(label, self.number)] for label in ("job_id", "array_job_id", "het_job_id")]

    def matchers(self) -> list[str]:
        """Returns `labels` as PromQL matchers, and a matcher for `raws`."""
        each = [",".join(f'{label}="{quote(value)}"' for label, value in labels) for labels in self.labels()]
        return [*each, any_of("job_id", sorted(self.raws)[:RAWS_MAX])] if self.raws else each

    def has(self, labels: Mapping[str, object]) -> bool:
        """Returns whether a holder with these labels belongs to the job."""
        if labels["scheduler"] != ("slurm" if self.number else "kubernetes"):
            return False
        return labels.get("job_id") in self.raws or any(
            all(labels.get(label) == value for label, value in wanted) for wanted in self.labels()
        )


def parse_name(text: str) -> AskedJob | None:
    """Parses a name in one of FORMS. None for any other text."""
    if job := JOB.fullmatch(text.strip()):
        return AskedJob(job[1], job[2] or "", job[3] or "")
    if pod := PLACE.fullmatch(text.strip()):
        return AskedJob(namespace=pod[1], name=pod[2])
    return None


def any_of(label: str, values: Collection[str]) -> str:
    """Returns a matcher for series whose label has one of these values."""
    return f'{label}=~"{"|".join(map(literal, sorted(values)))}"'
