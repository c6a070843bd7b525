"""GPUs that pending jobs wait for, parsed from the columns of squeue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.slurm.demand import COLUMNS, SlurmDemand, parse_demand
from gpu_exporter.reconciler.telemetry import Telemetry

LIMITS = 8, 16  # GPUs that count at most, of one job and of one account


def row(reason: str = "Resources", partition: str = "gpu", nodes: str = "1", tasks: str = "1", **tres: str) -> str:
    whose = tres.pop("account", "phys"), tres.pop("user", "ada")
    cells = [
        reason,
        partition,
        nodes,
        tasks,
        *(tres.get(of, "N/A") for of in ("job", "node", "task", "socket")),
        *whose,
    ]
    return "|".join(f"{cell:<256}" for cell in cells) + "|\n"


@pytest.mark.parametrize(
    ("text", "demand"),
    [
        ("", {}),
        (row(node="gres:gpu:2"), {"gpu": 2}),  # 22.05
        (row(node="gres/gpu:h100:2", nodes="3"), {"gpu": 6}),  # 24.11
        (row(node="gres/gpu"), {"gpu": 1}),
        (row(node="gres/gpu:h100"), {"gpu": 1}),
        (row(node="gres/gpu:nvidia_h100_80gb:4"), {"gpu": 4}),
        (row(node="gres/gpu:a100:1,gres/gpu:h100:2"), {"gpu": 3}),
        (row(job="gres/gpu:8", node="gres/gpu:4", nodes="2"), {"gpu": 8}),
        (row(task="gres/gpu:2", tasks="4"), {"gpu": 8}),
        (row(socket="gres/gpu:1", nodes="2-4"), {"gpu": 2}),
        (row(node="gres/shard:3,gres/gpumem:80"), {}),
        (row(), {}),
        (
            row(reason="Priority", node="gres/gpu:1") + row(node="gres/gpu:1", partition="a,b"),
            {"gpu": 1, "a": 1, "b": 1},
        ),
        *(
            (row(reason=each, node="gres/gpu:1"), {})
            for each in ("Dependency", "BeginTime", "JobHeldUser", "QOSMaxGRESPerUser")
        ),
    ],
)
def test_the_demand_of_pending_jobs_by_partition(text: str, demand: dict[str, float]) -> None:
    assert parse_demand(text, *LIMITS).pending == demand


@pytest.mark.parametrize(
    ("rows", "counted"),
    [
        ([row(node="gres/gpu:64")], 8),
        ([row(node="gres/gpu:4")] * 30, 16),
        ([row(node="gres/gpu:4", account="")] * 30 + [row(node="gres/gpu:4", account="", user="eve")], 20),
        ([row(node="gres/gpu:4")] * 30 + [row(node="gres/gpu:4", account="chem")], 20),
        ([row(node="gres/gpu:2"), row(node="gres/gpu:1")], 3),
    ],
)
def test_the_counted_demand_of_one_job_and_of_one_account_is_limited(rows: list[str], counted: float) -> None:
    assert parse_demand("".join(rows), *LIMITS).counted == {"gpu": counted}


@pytest.mark.parametrize(
    ("rows", "counted"),
    [
        ([row(node="gres/gpu:8", partition="a,b,c,d")], {"a": 2, "b": 2, "c": 2, "d": 2}),
        ([row(node="gres/gpu:64", partition="a,b")], {"a": 4, "b": 4}),  # first the limit of a job
        ([row(node="gres/gpu:1", partition="a,b")] * 4 + [row(node="gres/gpu:1", partition="b")], {"a": 2, "b": 3}),
        ([row(node="gres/gpu:8", partition="a,b")] * 6, {"a": 16, "b": 16}),
        ([row(node="gres/gpu:1", partition=",".join("abcdefghij"))] * 10, dict.fromkeys("abcdefghij", 1)),
    ],
)
def test_a_job_with_several_partitions_counts_in_equal_parts(rows: list[str], counted: dict[str, float]) -> None:
    assert parse_demand("".join(rows), *LIMITS).counted == counted


@pytest.mark.parametrize("text", ["slurm_load_jobs error: Unable to contact slurm controller\n", row()[:-300] + "\n"])
def test_output_in_another_format_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot parse"):
        parse_demand(text, *LIMITS)


@given(st.text())
def test_any_text_is_parsed_to_numbers_or_a_clear_error(text: str) -> None:
    try:
        demand = parse_demand(text, *LIMITS)
    except ValueError as exc:
        assert "cannot parse" in str(exc)
    else:
        assert all(value > 0 for value in (*demand.pending.values(), *demand.counted.values()))
        assert demand.pending.keys() == demand.counted.keys()


def test_unknown_demand_has_no_series_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[str | MarkError] = [
        row(node="gres/gpu:2"),
        MarkError("error", "slurmctld is away"),
        MarkError("error", "slurmctld is away"),
        row(node="gres/gpu:3"),
        "",
    ]

    def run(*_: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, MarkError):
            raise answer
        return answer

    assert len(COLUMNS) == 10
    demand, telemetry = SlurmDemand(run, *LIMITS), Telemetry()
    seen = []
    while answers:
        telemetry.note_demand(demand.read())
        page = generate_latest(telemetry.registry).decode().splitlines()
        seen.append([line for line in page if line.startswith("gpu_demand_pending_gpus{")])
    two, three = 'gpu_demand_pending_gpus{pool="gpu"} 2.0', 'gpu_demand_pending_gpus{pool="gpu"} 3.0'
    assert seen == [[two], [], [], [three], []]
    assert 'gpu_demand_counted_gpus{pool="gpu"} 0.0' in page, "a missing value would not show that no job waits"
    assert [record.getMessage() for record in caplog.records] == [
        "it is unknown how many GPUs pending jobs wait for: slurmctld is away"
    ]
