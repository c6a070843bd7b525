"""Parses the jobs in the output of `squeue --json`, and the marks on them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_exporter.common.outside import need_real, need_whole, parse_timestamp
from gpu_exporter.common.slurm.answers import read_jobs
from gpu_exporter.common.slurm.gres import Gres, add_devices, parse_gres
from gpu_exporter.common.slurm.users import name_user
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Mark

# A mark at the beginning of a field. Other text may follow the mark.
MARK = re.compile(re.escape(LABEL) + r"=([a-z-]+)((?:;[a-z-]+=[^;,\s]*)*)(?=[;,]|$)")
ALLOCATED = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")  # GPUs and MIG devices of a job, all types together
ASKED = re.compile(r"(?:^|[,:/])gpu(?:[:=,]|$)")  # a GPU in the request of a job: gres/gpu:2, gres:gpu:h100:1
PART = re.compile(r"(?:^|[,:/])(?:shard|mps)(?:[:=,]|$)")  # a part of a GPU, requested or allocated: gres/shard=1
DEPENDS_ON = re.compile(r"[:](\d+)")  # the jobs in afterok:12(unfulfilled) or afterany:13_*:14_3
# Fields of a job that may carry a mark, with their names in JSON. The first can be written only by an Administrator, so
# neither the job's owner nor a copied submit line can set or remove the mark.
FIELDS = {"AdminComment": "admin_comment", "Extra": "extra", "Comment": "comment"}
# A job in one of these states can no longer be changed.
FINISHED = frozenset(
    ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
)


class LiveJob(NamedTuple):
    """The fields of one job that the reconciler uses.

    `target`: its name for scontrol, which takes the plain id of an array task or a component for the whole array or
    job.
    `start`: Unix seconds, 0 while unknown.
    `text`: the text of its mark, otherwise the content of `field`.
    `field`: the field for a mark; "" if all usable fields contain other texts.
    `marked`: the fields that contain marks, each with the text that others have added after the mark.
    `leader`: the first component of a heterogeneous job, "" for other jobs.
    `is_batch`: whether it has a batch script; None if this is not known.
    `gpus`: how many GPUs Slurm gave it; None if it has no GPUs, or if Slurm does not show them.
    `has_part`: whether it has only a part of a GPU (shard, mps).
    `asks`: whether it asks for GPUs, or may have some.
    `title`, `comment`: the job's name and its Comment, which its owner wrote. `title`: None if Slurm does not show it.
    `reservations`: the reservations of which the job may use one, () for none; None if Slurm does not show them.
    `may_requeue`: whether its owner or the site lets Slurm start it again; None if this is not known.
    `waits_for`: ids of the jobs on whose end it depends; for an array without the task.
    """

    job_id: str
    target: str
    state: str
    start: float
    restarts: int
    text: str
    field: str = "AdminComment"
    marked: Mapping[str, str] = MappingProxyType({})
    leader: str = ""
    is_batch: bool | None = None
    gpus: int | None = None
    has_part: bool = False
    asks: bool = False
    title: str | None = None
    reservations: tuple[str, ...] | None = None
    comment: str = ""
    may_requeue: bool | None = None
    user: str = ""
    account: str = ""
    waits_for: frozenset[str] = frozenset()

    @property
    def incarnation(self) -> str:
        return f"{self.job_id}/{self.restarts}/{math.floor(self.start)}"

    @property
    def words(self) -> frozenset[str]:
        """The job's state and the flags of the state, each as one word."""
        return frozenset(self.state.split(","))

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, so that it can no longer be changed."""
        return not FINISHED.isdisjoint(self.words)

    @property
    def runs(self) -> bool:
        """Whether the job can work. A flag of its state such as COMPLETING means that it cannot."""
        return self.state == "RUNNING"

    @property
    def mark(self) -> Mark | None:
        """The mark in its text; None if the text is not a mark."""
        match = MARK.match(self.text)
        if match is None:
            return None
        return Mark(
            HolderName("slurm", "", self.job_id),
            match[1],
            self.incarnation,
            "RUNNING" not in self.state,
            self,
            parse_timestamp(read_field(match[0], "observed-until")),
            self.target if self.target != self.job_id else "",
        )


def read_field(text: str, name: str) -> str | None:
    """Returns the value of `name=value` in the text of a mark; None if it is missing."""
    fields = (part.partition("=") for part in text.split(";"))
    return next((value for key, _, value in fields if key == name), None)


def parse_jobs(
    text: str, fields: Sequence[str], denied: Collection[str] = (), report: Callable[[int], None] = lambda count: None
) -> list[LiveJob]:
    """Returns the jobs in the output of `squeue --json`. A malformed job does not affect the others.

    `fields`: the fields of FIELDS that may carry a mark, the best first.
    `denied`: fields that the reconciler is not allowed to write. The reconciler does not change marks in these fields.
    `report`: called with the number of malformed jobs.
    Raises ValueError.
    """
    jobs, malformed = read_jobs(text, lambda row: _read_row(row, fields, denied))
    if malformed:
        report(malformed)
    if malformed and not jobs:
        raise ValueError(f"cannot parse any of the {malformed} jobs that squeue --json printed")
    return jobs


def _read_row(row: dict[str, Any], fields: Sequence[str], denied: Collection[str]) -> LiveJob:
    texts = {field: str(row.get(key) or "") for field, key in FIELDS.items()}
    marked = {
        field: text[match.end() :].lstrip(";, ")
        for field, text in texts.items()
        if field not in denied and (match := MARK.match(text))
    }
    gpus, has_part, asks = _given(row)
    place = next((field for field in fields if not texts[field] or field in marked), "")
    return LiveJob(
        str(_whole(row["job_id"])),
        _target(row),
        _word(row["job_state"]),
        need_real(row["start_time"] or 0),
        _whole(row.get("restart_cnt")),
        texts[next(iter(marked), place or fields[0])],
        field=place,
        marked=marked,
        leader=_leader(row),
        is_batch=row["batch_flag"] if isinstance(row.get("batch_flag"), bool) else None,
        gpus=gpus,
        has_part=has_part,
        asks=asks,
        title=_text(row.get("name")),
        reservations=_split(_text(row.get("resv_name"))),
        comment=str(row.get("comment") or ""),
        may_requeue=bool(row["requeue"]) if isinstance(row.get("requeue"), (bool, int)) else None,
        user=name_user(str(row.get("user_name") or ""), str(row.get("user_id", ""))),
        account=str(row.get("account") or ""),
        waits_for=_dependencies(str(row.get("dependency") or "")),
    )


def _target(row: dict[str, Any]) -> str:
    task = row.get("array_task_id")
    is_task = task is not None
    array = _whole(row.get("array_job_id"))
    if array and is_task:
        return f"{array}_{_whole(task)}"
    if leader := _leader(row):
        return f"{leader}+{_whole(row.get('het_job_offset'))}"
    return str(_whole(row["job_id"]))


def _leader(row: dict[str, Any]) -> str:
    leader = _whole(row.get("het_job_id"))
    return str(leader) if leader else ""


def _given(row: dict[str, Any]) -> tuple[int | None, bool, bool]:
    """Returns the number of GPUs that Slurm gave a job, whether they are only a part of a GPU, whether it may have
    GPUs.

    The second value is true for shard and mps. The third is true if the job asks for GPUs or may have some. Only
    `gres_detail` shows the GPU of a part. If AccountingStorageTRES does not name GPUs, which is the default, only
    `gres_detail` shows whole GPUs too.
    """
    allocated = str(row.get("tres_alloc_str") or "")
    asked = [str(row.get(f"tres_per_{of}") or "") for of in ("job", "node", "socket", "task")]
    has_part = any(PART.search(text) for text in (allocated, *asked))
    detail = row.get("gres_detail")
    lists: list[Gres] | None = None
    if isinstance(detail, list):
        with suppress(ValueError):
            lists = [parse_gres(str(text)) for text in detail]
    has_part |= any(each.shared or each.unnamed_share for each in lists or ())
    may_have = bool(detail and lists is None) or any(ASKED.search(text) for text in asked)
    match = ALLOCATED.search(allocated)
    if match and not has_part:
        return need_whole(match[1]), False, may_have
    return (add_devices(lists) if lists else None) or None, has_part, may_have or has_part


def _dependencies(text: str) -> frozenset[str]:
    """Ids of the jobs that must end before this job starts. Ignores `after`, which waits for a job's start."""
    parts = (part for part in re.split("[,?]", text) if not part.startswith("after:"))
    return frozenset(job for part in parts for job in DEPENDS_ON.findall(part))


def _split(names: str | None) -> tuple[str, ...] | None:
    """Returns the names in a list such as that of sbatch(1), --reservation; "" contains no name."""
    return None if names is None else tuple(filter(None, names.split(",")))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int:
    return need_whole(value or 0)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
