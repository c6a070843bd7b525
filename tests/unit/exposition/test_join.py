"""The join of GPUs, MIG instances and allocations to the rows of the table."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.statuses import ROW, SILENT, status_of

from gpu_exporter.common.model.rows import TONES, UNKNOWN, Row, join_rows
from gpu_exporter.common.model.views import Throttling

FREE = Row("0", "H100", 0.0, None, None, None, "", "", None, None, "free", "")
HELD = ROW._replace(state="stalled", why="no progress", advice="read the log")
NUMBERS = st.none() | st.integers(0, 1000)
WORDS = st.sampled_from(("", "a", "a; b", "not a number: 7", "é"))


def joined(*rows: Row, **more: Any) -> list[Row]:
    return list(join_rows(status_of(rows, **more)))


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Rows of GPUs that are shared, divided, silent or free. Each holder has one row."""
    rows: list[Row] = []
    for number in range(draw(st.integers(0, 4))):
        board = FREE._replace(
            gpu=str(number), name=draw(st.sampled_from(("H100", "A100"))), power_w=draw(NUMBERS),
            temperature_celsius=draw(NUMBERS), age_s=draw(NUMBERS),
            throttling=draw(st.none() | st.just(Throttling("hw_thermal", 0.4)) | st.just(Throttling("", 0.0))),
        )  # fmt: skip
        instances = [f"{number}:{each}/0" for each in range(draw(st.sampled_from((0, 0, 2))))]
        silent = draw(st.sampled_from(("", "", *SILENT)))
        if silent:
            board = board._replace(state=silent, why=draw(WORDS), utilization=None)
        part = board._replace(name="1g.10gb", utilization=None, power_w=None, temperature_celsius=None, throttling=None)
        for unit in (board, *(part._replace(gpu=label) for label in instances)):
            rows += draw(st.lists(holders(unit, len(rows)), max_size=2, unique_by=lambda row: row.holder)) or [unit]
    return rows


@st.composite
def holders(draw: st.DrawFn, unit: Row, before: int) -> Row:
    """The row of a holder of this unit, with states and causes unless the GPU is silent."""
    name = draw(st.integers(1000 * before, 1000 * before + 999))
    row = unit._replace(
        holder=f"job {name}", owner=draw(st.sampled_from(("", "ada", "ada/phys"))), held_s=draw(st.integers(0, 10**6)),
        idle_s=draw(NUMBERS), stalled_s=draw(NUMBERS),
    )  # fmt: skip
    if unit.state in SILENT:
        return row
    row = row._replace(utilization=draw(NUMBERS), memory_bytes=draw(NUMBERS), advice=draw(WORDS), why=draw(WORDS))
    row = row._replace(power_w=draw(NUMBERS) if ":" in unit.gpu else unit.power_w)
    row = row._replace(state=draw(st.sampled_from(sorted(set(TONES) - set(SILENT)))))
    return row._replace(cause=draw(st.sampled_from(("", "cpu_quota high", "starting low"))))


@given(tables())
def test_the_join_makes_the_same_rows_from_their_parts(rows: list[Row]) -> None:
    status = json.loads(json.dumps(status_of(rows)))
    before = copy.deepcopy(status)
    assert list(join_rows(status)) == rows
    assert status == before, "the join changes nothing"


@pytest.mark.parametrize("state", SILENT)
def test_a_silent_gpu_gives_its_state_to_all_of_its_rows_and_its_advice_to_the_first_of_each_holder(state: str) -> None:
    board = HELD._replace(gpu="0", holder="job 8")
    status = status_of([board, HELD._replace(gpu="0:1/0"), FREE._replace(gpu="0:2/0"), HELD._replace(gpu="0:3/0")])
    (gpu,) = status["gpus"]
    gpu |= {"up": False, "state": state, "error": "it is lost", "advice": "reset it", "read_error": "power: failed"}
    gpu["conditions"] = [{"text": "it is lost"}]
    rows = list(join_rows(status))
    assert [(row.state, row.cause) for row in rows] == [(state, "")] * 4
    assert [row.why for row in rows] == ["it is lost; power: failed", *["it is lost"] * 3]
    assert [row.advice for row in rows] == ["reset it", "reset it", "reset it", ""]
    gpu["reason"] = "the driver has not answered for 5s"
    assert next(join_rows(status)).why == "the driver has not answered for 5s; power: failed"


def test_a_row_of_a_whole_gpu_has_what_is_wrong_with_it_before_the_reason_of_its_holder_and_once() -> None:
    status = status_of([HELD, FREE._replace(gpu="0:1/0")])
    (gpu,) = status["gpus"]
    gpu |= {"conditions": [{"text": "asks for a reset"}, {"text": "NVLink is down"}], "read_error": "power: failed"}
    board, instance = join_rows(status)
    assert board.why == "asks for a reset; NVLink is down; no progress; power: failed" and instance.why == ""
    status["allocations"][0]["evidence"] = "idle, but the GPU is unusable: asks for a reset"
    assert next(join_rows(status)).why == (
        "NVLink is down; idle, but the GPU is unusable: asks for a reset; power: failed"
    )


def test_a_cause_explains_its_state_and_a_state_without_a_cause_names_what_is_missing() -> None:
    status = status_of([HELD])
    (held,) = status["allocations"]
    held |= {"cause_needs": ["the CPU time", "more"]}
    (row,) = join_rows(status)
    missing = "no progress; not enough evidence: needs the CPU time"
    assert (row.why, row.cause, row.advice) == (missing, "unknown", "read the log")
    held["causes"] = [
        {"name": "late_rank", "confidence": "high", "evidence": "rank 3 is late", "advice": "look at rank 3"},
        {"name": "disk", "confidence": "low", "evidence": "a full disk", "advice": "buy one"},
    ]
    (row,) = join_rows(status)
    assert (row.why, row.cause, row.advice) == ("rank 3 is late", "late_rank high", "look at rank 3")
    held["causes"][0]["advice"] = ""
    assert next(join_rows(status)).advice == "read the log", "the state has an advice too"


def test_an_advice_is_in_the_first_row_of_its_holder() -> None:
    rows = [HELD._replace(gpu=str(number)) for number in range(3)]
    rows[2] = rows[2]._replace(advice="another")
    other = HELD._replace(gpu="3", holder="job 8")
    assert [row.advice for row in joined(*rows, other)] == ["read the log", "", "another", "read the log"]


def test_a_gpu_is_named_by_its_index_its_address_or_its_uuid() -> None:
    status = status_of([FREE])
    (gpu,) = status["gpus"]
    for known, label in ({}, "0"), ({"gpu": None}, "0"), ({"pci_bus_id": "0000:3b:00.0"}, "0000:3b:00.0"):
        gpu |= known
        assert next(join_rows(status)).gpu == label
    gpu |= {"pci_bus_id": "", "name": ""}
    assert next(join_rows(status))[:2] == ("GPU-0", UNKNOWN)


def test_an_allocation_has_one_row_also_where_two_gpus_have_one_uuid() -> None:
    status = status_of([HELD])
    status["gpus"] *= 2
    assert [row.holder for row in join_rows(status)] == ["job 7", ""]
