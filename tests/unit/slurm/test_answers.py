"""The jobs of Slurm's JSON: numbers of every release, one malformed job among others, answers that are no such answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.slurm.answers import read_jobs, unpack_number


def read(row: dict[str, Any]) -> tuple[int, int]:
    return row["job_id"], row["restart_cnt"] or 0


@pytest.mark.parametrize(
    ("number", "restarts"),
    [
        (2, 2),  # 22.05
        ({"set": True, "infinite": False, "number": 2}, 2),
        ({"set": False, "infinite": False, "number": 2}, 0),
        ({"set": True, "infinite": True, "number": 2}, 0),
        ({"number": 2}, 2),
    ],
)
def test_a_number_is_read_in_the_form_of_every_release(number: Any, restarts: int) -> None:
    text = json.dumps({"jobs": [{"job_id": 7, "restart_cnt": number}], "errors": []})
    assert read_jobs(text, read) == ([(7, restarts)], 0)


def test_a_malformed_job_is_counted_and_costs_no_other_job() -> None:
    rows = [{"job_id": 1, "restart_cnt": 0}, {"job_id": 2}, {}, 7, None, {"job_id": 3, "restart_cnt": 1}]
    assert read_jobs(json.dumps({"jobs": rows}), read) == ([(1, 0), (3, 1)], 4)


def test_a_job_that_the_reader_leaves_out_is_not_malformed() -> None:
    text = json.dumps({"jobs": [{"job_id": 1}, {"job_id": 2}]})
    assert read_jobs(text, lambda row: row["job_id"] if row["job_id"] > 1 else None) == ([2], 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot parse Slurm's JSON: JSONDecodeError"),
        ("[]", "cannot parse Slurm's JSON: TypeError"),
        ("{}", "cannot parse Slurm's JSON: KeyError"),
        ('{"jobs": 7}', "cannot parse Slurm's JSON: TypeError"),
        ('{"jobs": [7]}', "cannot parse Slurm's JSON: TypeError"),
        ('{"job_id": 7}', "cannot parse Slurm's JSON: TypeError"),
        ("[" * 100_000, "cannot parse Slurm's JSON: RecursionError"),
        ('{"jobs": [], "errors": ["down"]}', "Slurm answered with errors: ['down']"),
    ],
)
def test_an_answer_that_is_no_list_of_jobs_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="Slurm") as raised:
        read_jobs(text, read)
    assert str(raised.value) == reason


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["job_id", "set", "infinite", "number", "jobs", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=6))
def test_no_answer_raises_anything_else_and_every_row_is_a_job_or_malformed(rows: list[Any]) -> None:
    try:
        jobs, malformed = read_jobs(json.dumps({"jobs": rows}), lambda row: [row["job_id"]])
    except ValueError:
        return
    assert len(jobs) + malformed == len(rows)


def test_another_object_is_left_as_it_is() -> None:
    fields = {"number": 1, "unit": "s"}
    assert unpack_number(fields) is fields
