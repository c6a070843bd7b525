"""A burst of SIGTERM and SIGINT ends every program, while it starts and while it runs. `tests.testbed.bursts` does more."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gpu_exporter.cli.commands import COMMANDS
from tests.testbed.bursts import PROGRAMS, Place, judge, open_place, run
from tests.testbed.processes import PROMPT_S


@pytest.fixture
def place() -> Iterator[Place]:
    with open_place() as place:
        yield place


def test_every_command_is_among_the_programs() -> None:
    assert {*COMMANDS} <= {program.command[0] for program in PROGRAMS.values()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_hundred_signals_end_the_program_without_a_traceback(name: str, place: Place) -> None:
    """Where a handler takes a lock, half of the bursts hang the program."""
    for after in ("started", "ready") if PROGRAMS[name].follows else ("started",):
        end = run(name, place, after, random.uniform(0, 0.1))
        assert judge(name, after, end) == ""
        assert end.took_s < PROMPT_S
