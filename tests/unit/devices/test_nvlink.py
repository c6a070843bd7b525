"""NVLink counters: sentinels and impossible steps count as silence; they neither raise the sum nor stop it for good."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.asker import Fields
from gpu_exporter.agent.devices.nvml.nvlink import ALL_RX, ALL_TX, KIB, PATIENCE_S, RX, TX, Field, NvlinkCounters
from gpu_exporter.agent.devices.nvml.support import RETRY_S, SupportMatrix
from gpu_exporter.agent.devices.protocol import Traffic
from gpu_exporter.common.clock import ManualClock

LINK_TX, LINK_RX = ([(field[1], link) for link in range(nvml.NVLINKS)] for field in (TX, RX))
SENTINELS = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, -(2**63), float("nan"))


class Board:
    """A driver whose field values are `values`; it does not support other fields."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.support = SupportMatrix(self.clock)
        self.values: dict[Field, float] = {}
        self.fields = Fields(self)  # type: ignore[arg-type]
        self.counters = NvlinkCounters(self.fields, "gpu 0", self.clock)

    def __call__(self, call: str, ids: tuple[Field, ...]) -> list[tuple[int, Any]]:
        return [
            (nvml.NVML_SUCCESS, self.values[field]) if field in self.values else (nvml.NVML_ERROR_INVALID_ARGUMENT, 0)
            for field in ids
        ]

    def read(self, seconds: float = 1.0) -> Traffic | str:
        """The traffic `seconds` after the last reading, or the error."""
        self.clock.advance(seconds)
        try:
            return self.counters.read()
        except DeviceError as exc:
            assert exc.once_answered is not isinstance(
                exc, NotSupported
            )  # after a failure the traffic of this moment is unknown
            return exc.error


class Kind(NamedTuple):
    """How a board counts: fields, bytes per count, and the highest count of a field in one step of 1 s."""

    tx: Field
    rx: Field
    unit: float
    most: int


KINDS = {
    "all links together": Kind(ALL_TX, ALL_RX, KIB, int(2e13 / KIB)),
    "each link": Kind(LINK_TX[3], LINK_RX[3], 1.0, int(2e12)),
}


def run(kind: Kind, counts: list[float], board: Board | None = None) -> list[float | str]:
    """The reads of a board whose transmit counter takes these values, in the driver's unit."""
    board, seen = board or Board(), []
    for count in counts:
        board.values |= {kind.tx: count, kind.rx: 7}
        traffic = board.read()
        seen.append(traffic if isinstance(traffic, str) else traffic.tx / kind.unit)
        assert isinstance(traffic, str) or traffic.rx == 7 * kind.unit
    return seen


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


BAD = "OUT_OF_RANGE"


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_a_sentinel_makes_only_its_own_moment_unknown(kind: Kind, sentinel: float) -> None:
    assert run(kind, [1000, 1001, sentinel, 1002, 1003]) == [1000, 1001, BAD, 1002, 1003]
    assert run(kind, [1000, sentinel, sentinel, sentinel, 1002]) == [1000, BAD, BAD, BAD, 1002]
    assert run(kind, [sentinel, 1000, 1001]) == [BAD, 1000, 1001]
    assert run(kind, [10**13, sentinel, 10**13 + 1]) == [10**13, BAD, 10**13 + 1]


def test_a_counter_that_rests_or_counts_is_read_unchanged(kind: Kind) -> None:
    assert run(kind, [1000, 1000, 1000, 1007]) == [1000, 1000, 1000, 1007]


def test_a_step_is_accepted_up_to_the_bandwidth_of_a_link(kind: Kind) -> None:
    assert run(kind, [5, 5 + kind.most]) == [5, 5 + kind.most]
    most = 5 + kind.most + 1000
    assert run(kind, [5, most, 6, 7]) == [5, BAD, 6, 7]
    assert run(kind, [5, most, most, most, 6]) == [5, BAD, BAD, BAD, 6]


def test_a_counter_that_was_reset_continues_after_one_more_reading(kind: Kind) -> None:
    """Later counts are added to the sum, and nothing is added twice."""
    assert run(kind, [10**6, 3, 10, 12]) == [10**6, BAD, 10**6 + 7, 10**6 + 9]
    assert run(kind, [10**6, 0, 0, 0, 5]) == [10**6, BAD, 10**6, 10**6, 10**6 + 5]  # it rests after the reset
    assert run(kind, [10**6, 0, 10**6 + 1]) == [10**6, BAD, 10**6 + 1]  # it was not reset


def test_a_fall_that_no_reset_explains_is_accepted_only_if_the_counter_counts_on(kind: Kind) -> None:
    high, low = 10**15, 10**14  # far more than can be moved within a second
    assert run(kind, [high, low, low, low, high + 1]) == [high, BAD, BAD, BAD, high + 1]
    assert run(kind, [high, low, low + 5, low + 6]) == [high, BAD, high + 5, high + 6]


def test_after_lasting_zeros_the_sum_does_not_jump(kind: Kind) -> None:
    """Zeros looked like a reset but were not: the counter continues from its real value."""
    high = 10**15
    assert run(kind, [high, 0, 0, high + 2, high + 5]) == [high, BAD, high, BAD, high + 3]


def test_links_with_implausible_values_for_a_minute_are_left_out_until_they_count(kind: Kind) -> None:
    board = Board()
    assert run(kind, [1000], board) == [1000]
    assert set(run(kind, [0xFFFFFFFF] * int(PATIENCE_S), board)) == {BAD}
    if kind.unit == KIB:  # no link is left
        assert run(kind, [0xFFFFFFFF], board) == ["NVML_ERROR_NO_DATA"]
    board.clock.advance(1000.0)
    assert run(kind, [1005, 1006], board)[-1] == 1006


def test_an_implausible_value_of_one_link_makes_the_moment_unknown() -> None:
    board = Board()
    board.values = dict.fromkeys((*LINK_TX, *LINK_RX), 10)
    assert board.read() == (180, 180)
    board.values[LINK_TX[5]] = 0xFFFFFFFFFFFFFFFF
    assert board.read() == BAD
    board.values[LINK_TX[5]] = 11
    assert board.read() == Traffic(rx=180, tx=181)


def test_a_board_without_links_has_no_nvlink_counter() -> None:
    assert Board().read() == "NVML_ERROR_NOT_SUPPORTED"


STEPS = st.lists(st.tuples(st.sampled_from(["count"] * 3 + ["reset", "nonsense"]), st.integers(0, 10**9)), min_size=1)


@given(st.integers(0, 10**15), STEPS, st.sampled_from(SENTINELS), st.sampled_from(sorted(KINDS)))
def test_the_sum_never_falls_nor_exceeds_the_traffic_and_recovers_after_two_valid_readings(
    start: int, steps: list[tuple[str, int]], nonsense: float, name: str
) -> None:
    kind, board = KINDS[name], Board()
    counter, moved, before = start, 0, float(start)
    assert run(kind, [counter], board) == [start]
    for what, count in steps:
        counter = count if what == "reset" else counter + count
        moved += count
        (traffic,) = run(kind, [nonsense if what == "nonsense" else counter], board)
        if not isinstance(traffic, str):
            assert before <= traffic <= start + moved
            before = traffic
    last = run(kind, [counter + 1, counter + 2], board)[-1]
    assert not isinstance(last, str)
    assert before <= last <= start + moved + 2


def test_a_link_that_appears_late_adds_only_its_later_counts() -> None:
    board = Board()
    board.values = dict.fromkeys((*LINK_TX[:17], *LINK_RX[:17]), 10)
    assert board.read() == (170, 170)
    board.values |= {LINK_TX[17]: 10**9, LINK_RX[17]: 10**9}
    assert board.read(RETRY_S + 1.0) == (170, 170)
    board.values |= {LINK_TX[17]: 10**9 + 5, LINK_RX[17]: 10**9 + 6}
    assert board.read() == Traffic(rx=176, tx=175)


@pytest.mark.parametrize(("said", "links"), [(None, 18), (4, 4), (36, 36), (0, 18), (2**32 - 1, 18), (-1, 18)])
def test_the_number_of_queried_links_is_the_drivers_count(said: int | None, links: int) -> None:
    board = Board()
    board.values = {(field[1], link): 10 for field in (TX, RX) for link in range(40)}
    if said is not None:
        board.values[nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0] = said
    assert board.read() == Traffic(10 * links, 10 * links)
