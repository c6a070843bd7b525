"""The rules on recorded evidence of real processes: how often a cause is right, and how often a fault is found."""

from __future__ import annotations

import json

import pytest
from tests.workloads.score import HOOK_RECORDS, Scored, read_records, replay, score, specificity, strip_names

RECORDS = read_records()


@pytest.fixture(scope="module")
def named() -> list[Scored]:
    return [replay(record) for record in RECORDS]


def test_of_twenty_causes_nineteen_are_right_and_of_six_faults_five_are_found(named: list[Scored]) -> None:
    precision, recall = score(named)
    assert precision is not None
    assert recall is not None
    assert precision >= 0.94, [each for each in named if each.found and each.found[0] not in each.truth]
    assert recall >= 0.83


def test_without_names_of_threads_fewer_faults_are_found_and_none_is_wrong_more_often() -> None:
    """A process beside that on the GPU may be a server's front end as well as a loader."""
    precision, recall = score(replay(record, strip_names) for record in RECORDS)
    assert precision is not None
    assert recall is not None
    assert precision >= 0.96
    assert recall >= 0.77


def test_the_hook_finds_more_faults_and_accuses_no_more() -> None:
    """Evaluation, the wait for other ranks and the user's own code lie outside of the loop's `next`, as in real loops."""
    records = read_records(HOOK_RECORDS)
    without, with_hook = map(replay, records), [replay(record, with_hook=True) for record in records]
    before, after = score(without), score(with_hook)
    assert (after.precision or 0.0) >= max(0.95, before.precision or 0.0)
    assert (after.recall or 0.0) >= max(0.95, before.recall or 0.0)
    assert [each.script for each in with_hook if each.hard and each.found] == ["actors_of_reinforcement_learning"]


def test_no_easy_healthy_job_is_accused(named: list[Scored]) -> None:
    quiet, whole = specificity(named, hard=False)
    assert quiet == whole >= 8


def test_half_of_the_healthy_jobs_are_hard_and_as_many_jobs_are_healthy_as_ill(named: list[Scored]) -> None:
    ill = sum(bool(each.truth) for each in named)
    hard = sum(each.hard for each in named)
    assert hard >= (len(named) - ill) / 2
    assert len(named) - ill >= 0.7 * ill


def test_a_record_names_no_process_and_no_path() -> None:
    text = json.dumps(RECORDS)
    assert '"pid' not in text
    assert "/" not in text.replace("B/s", "")
