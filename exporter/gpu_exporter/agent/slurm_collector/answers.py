"""Parses all nodes and jobs of a cluster from the output of Slurm's commands or of slurmrestd. Pure.

`squeue --json` costs slurmctld one message and `scontrol show node -d` two, for any number of nodes (measured on
22.05.8 and 24.11.5). A job's owner cannot forge either output: a name in JSON cannot imitate another field.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from gpu_exporter.agent.attribution.slurm.parse import (
    Job,
    JobGpus,
    NodeRecord,
    close_node,
    divide_gpus,
    parse_node,
    read_node,
)
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.outside import load_json, need_real, need_whole
from gpu_exporter.common.slurm.answers import read_jobs, unpack_number

# A quotation mark in a job's name is escaped with a backslash, so no name can be mistaken for this key.
_CLUSTER = re.compile(r"""\"cluster"\s*:\s*"([^"\\]*)["]""")
_NODE = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
# State flags that squeue prints in place of RUNNING, and RUNNING itself.
_STATES = ("CONFIGURING", "STOPPED", "SUSPENDED", "RUNNING")


class ClusterJob(NamedTuple):
    """A job that may hold GPUs, with its GPUs by node name."""

    job: Job
    gpus: dict[str, JobGpus]


def parse_cluster_nodes(text: str) -> dict[str, NodeRecord]:
    """Returns every node with GPUs in the output of `scontrol show node -d`, by name.

    Omits a node that cannot be parsed. Raises SourceError if no node can be parsed.
    """
    nodes: dict[str, NodeRecord] = {}
    _, *records = _NODE.split(text)  # name, record, name, record ...
    problem = "" if records else "scontrol show node -d names no node"
    for name, record_text in zip(records[::2], records[1::2], strict=True):
        try:
            record = parse_node(record_text)
        except SourceError as exc:
            problem = f"node {name}: {exc}"
            continue
        if record.configured:
            nodes[name] = record
    if problem and not nodes:
        raise SourceError(problem)
    return nodes


def parse_rest_nodes(text: str) -> tuple[dict[str, NodeRecord], str]:
    """Returns the nodes in slurmrestd's /nodes/ by name, and the cluster's name ("" before Slurm 24.05).

    Omits a node that cannot be parsed. Raises SourceError if no node can be parsed.
    """
    nodes: dict[str, NodeRecord] = {}
    problem = ""
    try:
        answer = load_json(text, unpack_number)
        cluster = _word(answer["meta"].get("slurm", {}).get("cluster"))
        for row in answer["nodes"]:
            try:
                record = read_node(row["gres"], row["gres_used"], need_real(row["slurmd_start_time"] or 0) or None)
                record = close_node(record, _list_states(row), _word(row.get("reason")))
                if record.configured:
                    nodes[str(row["name"])] = record
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
                name = str(row.get("name")) if isinstance(row, dict) else "without a name"
                problem = f"node {name:.60}: {type(exc).__name__} {exc}"
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise SourceError(f"cannot parse slurmrestd's nodes: {type(exc).__name__} {exc}") from exc
    if problem and not nodes:
        raise SourceError(f"cannot parse slurmrestd's nodes: {problem}")
    return nodes, cluster


def _list_states(row: dict[str, Any]) -> str:
    """Returns the words of a node's state. Slurm 22.05 has them in two fields, later versions in one list."""
    words = [row.get("state"), *(row.get("state_flags") or ())]
    return "+".join(str(word) for each in words for word in (each if isinstance(each, list) else [each]))


def find_cluster(text: str) -> str:
    """Returns the cluster's name from the jobs in slurmrestd's /jobs/, "" if they have none."""
    match = _CLUSTER.search(text)
    return match[1] if match else ""


def parse_cluster_jobs(text: str) -> list[ClusterJob]:
    """Returns every job in the output of `squeue --json` that is in one of _STATES. Omits a job that cannot be parsed.

    Raises SourceError if the text is not such an output.
    """
    try:
        return read_jobs(text, _read_job)[0]
    except ValueError as exc:
        raise SourceError(str(exc)) from exc


def _read_job(row: dict[str, Any]) -> ClusterJob | None:
    states = row["job_state"]
    flags = set(states) if isinstance(states, list) else {str(states)}
    state = next((each for each in _STATES if each in flags), "")
    if not state or "COMPLETING" in flags:  # a completing job no longer holds GPUs
        return None
    task = row.get("array_task_id")
    array, leader = _number(row.get("array_job_id")), _number(row.get("het_job_id"))
    start = _number(row.get("start_time"))
    job = Job(
        job_id=str(need_whole(row["job_id"])),
        user=_word(row.get("user_name")),
        account=_word(row.get("account")),
        partition=_word(row.get("partition")),
        qos=_word(row.get("qos")),
        state=state,
        start=need_real(start) if start else None,
        restarts=str(_number(row.get("restart_cnt"))),
        array_job_id=str(array) if array and task is not None else "",
        array_task_id=str(_number(task)) if array and task is not None else "",
        het_job_id=str(leader) if leader else "",
        het_job_offset=str(_number(row.get("het_job_offset"))) if leader else "",
        uid="" if row.get("user_id") is None else str(need_whole(row["user_id"])),
    )
    return ClusterJob(job, divide_gpus(row["nodes"], row["gres_detail"]))


def _number(value: Any) -> int:
    """Returns the number, 0 if it is not set. Raises ValueError, TypeError."""
    return need_whole(value or 0)


def _word(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"a name must be a string, not {type(value).__name__}")
    return value or ""
