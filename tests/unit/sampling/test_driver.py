"""The driver's life cycle: every transition of the table, and Driver's behaviour, on a manual clock."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest

from gpu_exporter.agent.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.agent.sampling.driver import (
    NOT_ASKED,
    RELEASED_TEXT,
    SILENT,
    TRANSITIONS,
    Driver,
    DriverEvent,
    DriverState,
    transition,
)
from gpu_exporter.common.clock import ManualClock

ABSENT, OPENING, OPEN, RELEASING, RELEASED, REPLACED = DriverState
DEADLINE_S = 2.0
NO_LIBRARY = DriverUnavailable("libnvidia-ml.so.1 is not here", absent=True)
MISMATCH = DriverUnavailable("the library is of another version", changed=True)


class Backend:
    """A driver with scripted answers. `opens`: number of opens without close; `inside`: called during a call."""

    name = "test"

    def __init__(self) -> None:
        self.opens = self.closes = 0
        self.gpus = 8
        self.failure: Exception | None = None
        self.inside: Callable[[], object] = lambda: None

    def open(self) -> None:
        self.opens += 1
        self.inside()
        if self.failure is not None:
            raise self.failure

    def count(self) -> int:
        return self.gpus

    def close(self) -> None:
        self.closes += 1


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.backend = Backend()
        self.expects = False
        self.driver = Driver(self.backend, self.clock, DEADLINE_S, lambda: self.expects)  # type: ignore[arg-type]

    def ask(self, failure: Exception | None = None) -> int | None:
        self.backend.failure = failure
        count = self.driver.ask()
        self.driver.asked.set()
        return count


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_table_of_transitions_is_as_written_here() -> None:
    """The table is written out a second time; pairs that are not listed change nothing."""
    life = {
        ABSENT: {"ASK": OPENING, "RELEASE": RELEASING},
        OPENING: {"ANSWERED": OPEN, "FAILED": ABSENT, "RELEASE": RELEASING},
        OPEN: {"ASK": OPENING, "RELEASE": RELEASING},
        RELEASING: {"CLOSED": RELEASED, "TAKE": ABSENT},
        RELEASED: {"TAKE": ABSENT},
        REPLACED: {},
    }
    for state, event in itertools.product(DriverState, DriverEvent):
        expected = REPLACED if event is DriverEvent.REPLACED else life[state].get(event.name, state)
        assert transition(state, event) is expected, (state, event)


def test_every_driver_state_can_be_reached_and_only_replaced_is_final() -> None:
    assert {ABSENT, *TRANSITIONS.values()} == set(DriverState)
    left = {state for (state, _), after in TRANSITIONS.items() if after is not state}
    assert left == set(DriverState) - {REPLACED}


def test_a_driver_that_answers_is_open_and_remains_open(bench: Bench) -> None:
    assert (bench.driver.state, bench.driver.error, bench.driver.is_missed) == (ABSENT, NOT_ASKED, True)
    for _ in range(2):
        assert bench.ask() == 8
        assert (bench.driver.state, bench.driver.error, bench.driver.is_missed) == (OPEN, "", False)


@pytest.mark.parametrize(
    ("failure", "error", "is_missed"),
    [
        (NO_LIBRARY, str(NO_LIBRARY), False),
        (DriverUnavailable("it is broken"), "it is broken", True),
        (DeviceError("nvmlInit_v2", "NVML_ERROR_UNKNOWN"), "nvmlInit_v2 answered NVML_ERROR_UNKNOWN", True),
        (KeyError("who"), "internal error (KeyError: 'who'): report it with the traceback in the log", True),
        (MISMATCH, str(MISMATCH), True),  # at the start of this process: it may be repaired without a restart
    ],
    ids=["absent", "broken", "a call", "a bug in the exporter", "mismatch"],
)
def test_a_failing_driver_is_absent_with_a_reason_and_is_retried(
    bench: Bench, failure: Exception, error: str, is_missed: bool
) -> None:
    assert bench.ask(failure) is None
    assert (bench.driver.state, bench.driver.error) == (ABSENT, error)
    assert bench.driver.is_missed is is_missed
    assert not bench.driver.replaced.is_set()
    assert bench.ask() == 8
    assert (bench.driver.state, bench.driver.error, bench.driver.is_missed) == (OPEN, "", False)


def test_a_driver_error_is_logged_once_and_only_as_info_if_no_gpu_is_expected(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        bench.ask(NO_LIBRARY)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    bench.expects = True
    bench.ask(DriverUnavailable("libnvidia-ml.so.1 is not readable", absent=True))
    bench.expects = False
    bench.ask(DriverUnavailable("it is broken"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]


def test_a_driver_that_was_replaced_after_it_worked_is_final(bench: Bench) -> None:
    bench.ask()
    assert bench.ask(MISMATCH) is None
    assert bench.driver.replaced.is_set()
    assert (bench.driver.state, bench.driver.is_missed) == (REPLACED, True)
    assert bench.driver.error == f"the driver was replaced while this process used it: {MISMATCH}"
    opens = bench.backend.opens
    assert bench.ask() is None
    bench.driver.release()
    bench.driver.take()
    assert (bench.driver.state, bench.backend.opens) == (REPLACED, opens)


def test_a_node_without_a_gpu_may_get_another_driver(bench: Bench) -> None:
    bench.backend.gpus = 0
    assert bench.ask() == 0
    assert bench.ask(MISMATCH) is None
    assert (bench.driver.state, bench.driver.replaced.is_set()) == (ABSENT, False)


def test_a_call_of_a_gpu_may_report_that_the_driver_was_replaced(bench: Bench) -> None:
    bench.ask()
    for reason in ("first", "second"):
        bench.driver.note_replaced(reason)
    assert bench.driver.error == "the driver was replaced while this process used it: first"
    assert bench.driver.state is REPLACED


def test_between_a_release_and_the_next_answer_the_driver_is_unknown(bench: Bench) -> None:
    """Otherwise each expected GPU would be called lost while the driver starts, which takes seconds."""
    bench.ask()
    bench.driver.release()
    bench.driver.close()
    bench.driver.take()
    assert (bench.driver.error, bench.driver.asked.is_set(), bench.driver.is_missed) == (NOT_ASKED, False, True)
    assert bench.ask() == 8
    assert (bench.driver.error, bench.driver.is_missed) == ("", False)


def test_a_release_closes_the_driver_until_it_is_taken_again(bench: Bench) -> None:
    bench.ask()
    bench.driver.release()
    assert (bench.driver.state, bench.driver.is_released, bench.driver.error) == (RELEASING, True, RELEASED_TEXT)
    assert bench.ask() is None
    bench.driver.close()
    assert (bench.driver.state, bench.driver.is_released, bench.driver.error) == (RELEASED, True, RELEASED_TEXT)
    assert not bench.driver.is_missed
    bench.driver.close()
    assert bench.ask() is None
    assert (bench.backend.opens, bench.backend.closes) == (1, 1)
    bench.driver.take()
    assert (bench.driver.state, bench.driver.is_released) == (ABSENT, False)
    assert bench.ask() == 8


def test_a_driver_that_was_never_opened_is_not_closed(bench: Bench) -> None:
    bench.driver.release()
    bench.driver.close()
    assert (bench.driver.state, bench.backend.closes) == (RELEASED, 0)


def test_a_partly_opened_driver_is_closed(bench: Bench) -> None:
    bench.ask(DriverUnavailable("it is broken"))
    bench.driver.close()
    assert (bench.driver.state, bench.backend.closes) == (ABSENT, 1)


@pytest.mark.parametrize("failure", [None, NO_LIBRARY], ids=["answers", "fails"])
def test_a_release_during_a_query_prevails_over_the_answer(bench: Bench, failure: Exception | None) -> None:
    bench.backend.inside = bench.driver.release
    assert bench.ask(failure) is None
    assert (bench.driver.state, bench.driver.error) == (RELEASING, RELEASED_TEXT)


def test_a_driver_that_is_taken_during_a_call_is_asked_again(bench: Bench) -> None:
    bench.ask()
    bench.driver.release()
    bench.driver.take()
    assert bench.ask() == 8
    assert bench.backend.closes == 0


def test_a_driver_start_that_hangs_is_silent_from_its_deadline_until_it_ends(bench: Bench) -> None:
    seen: list[tuple[bool, str]] = []

    def hang() -> None:
        for seconds in (DEADLINE_S, 0.1):
            bench.clock.advance(seconds)
            seen.append((bench.driver.is_silent, bench.driver.error))

    bench.backend.inside = hang
    assert bench.ask() == 8
    assert seen == [(False, NOT_ASKED), (True, SILENT)]
    assert (bench.driver.is_silent, bench.driver.error) == (False, "")
