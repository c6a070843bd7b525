"""Jobs as `squeue --json` prints them, and the marks that they carry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_exporter.outside import load_json, need_real, need_whole, parse_timestamp
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Mark
from gpu_exporter.slurm.gres import Gres, add_devices, parse_gres

# What a mark is, at the beginning of a field. Others may have written something behind it.
MARK = re.compile(re.escape(LABEL) + r"=([a-z-]+)((?:;[a-z-]+=[^;,\s]*)*)(?=[;,]|$)")
ALLOCATED = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")  # GPUs and MIG devices of a job, all types together
ASKED = re.compile(r"(?:^|[,:/])gpu(?:[:=,]|$)")  # in what a job asks for: gres/gpu:2, gres:gpu:h100:1
PART = re.compile(r"(?:^|[,:/])(?:shard|mps)(?:[:=,]|$)")  # of what it asks for, or was given: gres/shard=1
DEPENDS_ON = re.compile(r"[:](\d+)")  # in afterok:12(unfulfilled) or afterany:13_*:14_3, the jobs
# Fields of a job that may carry a mark, with their names in JSON: first what only an Administrator may write, so that
# neither the job's owner nor anybody who copies a submit line sets or removes it.
FIELDS = {"AdminComment": "admin_comment", "Extra": "extra", "Comment": "comment"}
# A job in one of these states can no longer be changed.
FINISHED = frozenset(
    ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
)


class LiveJob(NamedTuple):
    """What the reconciler needs of one job. `start`: Unix seconds, 0 while unknown.

    `target`: its name for scontrol. The id of an array or of a heterogeneous job would name all of its parts, and one
    part has it as its job id. `text`: what its mark says, else what stands in `field`, which is where a mark of it
    belongs, "" where every field that may be used holds a text of others. `marked`: the fields
    that have marks, and what others have added behind each.
    `leader`: the first component of a heterogeneous job, "" for all others. `gpus`: how many Slurm gave it, None where
    it gave none or does not say which. `has_part`: it has only a part of one or more of them (shard, mps). `asks`:
    whether it asks for some, or may have been given some. `title`: the job's name, and `comment` its Comment, both in
    its owner's words. `may_requeue`: whether Slurm may start it again, as its owner or the site said; None where that
    is not known. `waits_for`: ids of the jobs on whose end it depends, of an array without the task.
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
    title: str = ""
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
        """Its state and the flags of that."""
        return frozenset(self.state.split(","))

    @property
    def has_ended(self) -> bool:
        """Whether it can no longer be changed."""
        return not FINISHED.isdisjoint(self.words)

    @property
    def runs(self) -> bool:
        """Whether it can work: flags such as COMPLETING come as further words."""
        return self.state == "RUNNING"

    @property
    def mark(self) -> Mark | None:
        """The mark that its text is, if it is one."""
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
    """`name=value` of a mark's text; None when it has none."""
    fields = (part.partition("=") for part in text.split(";"))
    return next((value for key, _, value in fields if key == name), None)


def parse_jobs(
    text: str, fields: Sequence[str], denied: Collection[str] = (), report: Callable[[int], None] = lambda count: None
) -> list[LiveJob]:
    """Jobs of an answer of `squeue --json`; `fields`: those of FIELDS that may carry a mark, the best first.
    `denied`: those that we may not write, whose marks are not ours to change. `report`: is told how many jobs are left
    out since they are not understood.

    Raises ValueError.

    22.05 prints plain numbers and words; later releases print {"set", "infinite", "number"} and lists.
    """
    try:
        answer = load_json(text)
        rows: list[dict[str, Any]] = answer["jobs"]
        errors = answer.get("errors") or ()
        parsed = [_read_job(row, fields, denied) for row in rows]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ValueError(f"squeue --json printed what is not understood: {exc!r}") from exc
    if errors:  # 22.05 ends with status 0 and no jobs when the controller does not answer
        raise ValueError(f"squeue --json answered with errors: {str(errors)[:200]}")
    jobs = [job for job in parsed if job is not None]
    if len(jobs) < len(rows):
        report(len(rows) - len(jobs))
    if rows and not jobs:
        raise ValueError(f"squeue --json printed {len(rows)} jobs, all of them not understood")
    return jobs


def _read_job(row: dict[str, Any], fields: Sequence[str], denied: Collection[str]) -> LiveJob | None:
    """One job; None when it is not understood, which must not hide the others."""
    try:
        return _read_row(row, fields, denied)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


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
        need_real(_plain(row["start_time"])),
        _whole(row.get("restart_cnt")),
        texts[next(iter(marked), place or fields[0])],
        field=place,
        marked=marked,
        leader=_leader(row),
        is_batch=row["batch_flag"] if isinstance(row.get("batch_flag"), bool) else None,
        gpus=gpus,
        has_part=has_part,
        asks=asks,
        title=str(row.get("name") or ""),
        comment=str(row.get("comment") or ""),
        may_requeue=bool(row["requeue"]) if isinstance(row.get("requeue"), (bool, int)) else None,
        user=str(row.get("user_name") or row.get("user_id") or ""),
        account=str(row.get("account") or ""),
        waits_for=_dependencies(str(row.get("dependency") or "")),
    )


def _target(row: dict[str, Any]) -> str:
    task = row.get("array_task_id")
    is_task = task.get("set") if isinstance(task, dict) else task is not None
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
    """How many GPUs Slurm gave a job, whether it has a part of one only, and whether it may have some.

    Which GPU a part is of stands in `gres_detail` alone; so do all GPUs where AccountingStorageTRES does not name them,
    as by default.
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
    """Ids of the jobs on whose end a job waits. `after` is about their beginning."""
    parts = (part for part in re.split("[,?]", text) if not part.startswith("after:"))
    return frozenset(job for part in parts for job in DEPENDS_ON.findall(part))


def _plain(value: Any) -> Any:
    """0 for what is not set."""
    return value["number"] if isinstance(value, dict) else value or 0


def _whole(value: Any) -> int:
    return need_whole(_plain(value))


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
