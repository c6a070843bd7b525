"""Every answer of Slurm's commands: one invalid row among fifty, at any position, does not affect the other rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.memory_slurm import row_of_22_05, row_of_24_11
from tests.unit.attribution.test_slurm_words import squeue_row
from tests.unit.cluster.test_rest import node
from tests.unit.reconciler.test_demand import row as pending

from gpu_exporter.agent.attribution.slurm.parse import parse_job_gpus, parse_listpids, parse_squeue
from gpu_exporter.agent.slurm_collector.answers import parse_cluster_jobs, parse_cluster_nodes, parse_rest_nodes
from gpu_exporter.reconciler.slurm.demand import parse_demand
from gpu_exporter.reconciler.slurm.live import parse_jobs

COUNT = 50
NINES = "9" * 5_000
DEEP = "[" * 300 + "]" * 300


class Answer(NamedTuple):
    """`good`: the valid row at a position, as text. `odd`: invalid rows. `whole`: makes an answer from rows. `read`: the
    parsed result of an answer, by row.
    """

    good: Callable[[int], str]
    odd: list[str]
    whole: Callable[[list[str]], str]
    read: Callable[[str], dict[str, Any]]


def as_lines(rows: list[str]) -> str:
    return "".join(f"{row.rstrip()}\n" for row in rows)


def under(key: str, **more: Any) -> Callable[[list[str]], str]:
    return lambda rows: (
        f'{{"{key}":[{",".join(rows)}]{"".join(f",{json.dumps(k)}:{json.dumps(v)}" for k, v in more.items())}}}'
    )


def job(at: int) -> str:
    return json.dumps({"job_id": at + 1, "nodes": "n0", "gres_detail": ["gpu:1(IDX:0)"], "job_state": ["RUNNING"]})


# JSON rows that no release writes.
ROWS = ["7", "null", "[]", "{}", '"x"', DEEP, '{"job_id": "²"}', f'{{"job_id": {NINES}}}', '{"job_id": {"number": []}}']
ANSWERS = {
    "squeue": Answer(
        lambda at: squeue_row(JobID=str(at + 1)),
        ["x", "", "|" * 40, squeue_row(JobID="²"), squeue_row(JobID=NINES), squeue_row(JobID="1 2"), "\x1b[2J|" * 17],
        as_lines,
        lambda text: {each.job_id: each for each in parse_squeue(text)},
    ),
    "scontrol listpids": Answer(
        lambda at: f"{at + 100} {at + 1} batch 0 0",
        ["x", f"{NINES} 7 batch 0 0", "² 7 batch 0 0", "7 ² batch 0 0", "7"],
        lambda rows: "PID JOBID STEPID LOCALID GLOBALID\n" + as_lines(rows),
        lambda text: dict(parse_listpids(text)),
    ),
    "squeue of pending jobs": Answer(
        lambda at: pending(partition=f"p{at}", node="gres/gpu:2", account=f"a{at}"),
        ["x", "|" * 3, pending(partition="odd", node=f"gres/gpu:{NINES}"), pending(partition="odd", nodes=NINES, node="gpu")],
        as_lines,
        lambda text: dict(parse_demand(text, 8, 16).pending),
    ),
    "JSON of jobs, for their GPUs": Answer(
        job,
        [*ROWS, '{"job_id": 99, "nodes": 7, "gres_detail": 7}'],
        under("jobs", errors=[]),
        lambda text: parse_job_gpus(text, "n0"),
    ),
    "JSON of all jobs, for the collector": Answer(
        job,
        [*ROWS, '{"job_id": 99, "nodes": 7, "gres_detail": 7, "job_state": 7}'],
        under("jobs", errors=[]),
        lambda text: {each.job.job_id: each for each in parse_cluster_jobs(text)},
    ),
    "slurmrestd's nodes": Answer(
        lambda at: json.dumps(node(f"n{at}")),
        ["7", "null", "{}", json.dumps(node("odd", gres=NINES)), json.dumps(node("odd", start="²")), DEEP],
        under("nodes", meta={}),
        lambda text: dict(parse_rest_nodes(text)[0]),
    ),
    "scontrol show node": Answer(
        lambda at: f"NodeName=n{at} Arch=x86\n   Gres=gpu:h100:4\n   GresUsed=gpu:h100:1(IDX:2)\n",
        ["NodeName=odd\n", f"NodeName=odd x\n   Gres=gpu:{NINES}\n   GresUsed=gpu:1(IDX:{NINES})\n", "NodeName=odd x\n GresUsed=(\n"],
        "".join,
        lambda text: dict(parse_cluster_nodes(text)),
    ),
    **{
        f"squeue --json of {release}, for marks": Answer(
            lambda at, make=make: json.dumps(make(job_id=at + 1)),  # type: ignore[misc]
            [*ROWS, json.dumps(make(start_time="²")), json.dumps(make(job_state=None, job_id=[]))],
            under("jobs", errors=[]),
            lambda text, field=field: {each.job_id: each for each in parse_jobs(text, [field])},  # type: ignore[misc]
        )
        for release, make, field in (("22.05", row_of_22_05, "Comment"), ("24.11", row_of_24_11, "Extra"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_invalid_row_affects_no_other_row(name: str, data: st.DataObject) -> None:
    answer = ANSWERS[name]
    rows = [answer.good(at) for at in range(COUNT - 1)]
    honest = answer.read(answer.whole(rows))
    assert len(honest) == COUNT - 1
    position = data.draw(st.integers(0, COUNT - 1))
    odd = data.draw(st.sampled_from(range(len(answer.odd))))
    found = answer.read(answer.whole([*rows[:position], answer.odd[odd], *rows[position:]]))
    assert {key: found.get(key) for key in honest} == honest
    assert len(found) <= COUNT
