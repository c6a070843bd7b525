"""Sums the traffic over NVLink, and counts the links that are up.

Before Blackwell, NVML counts KiB of all links together. Since Blackwell, it counts bytes of each link (field 138 no
longer exists). The sum over the links never falls:

- If a link stops answering, the sum keeps its last count. For PATIENCE_S this is an error, because the link may still
  move bytes. Then the sum continues with the other links, and the silent link is read less often.
- If a link returns or appears late, only its later bytes are added.
- An implausible value (a code for "no value", or a too large step) counts as no answer. If the next reading continues
  from it, the counter was reset, and counts from there. Otherwise it continues from its last accepted value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import OUT_OF_RANGE, DeviceError, NotSupported
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.asker import Asker, Fields
from gpu_exporter.agent.devices.protocol import Traffic
from gpu_exporter.common.clock import Clock

log = logging.getLogger(__name__)
KIB = 1024.0
PATIENCE_S = 60.0
Field = tuple[int, int]  # field id and scope (a link, or all links)
ALL_TX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_VALUE_ALL_LINKS)
ALL_RX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_VALUE_ALL_LINKS)
TX = (ALL_TX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES)
RX = (ALL_RX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)


# Bytes per second in one direction, ten times the known maximum: 18 links of Blackwell move 0.05 TB/s each.
LINK_MAX, BOARD_MAX = 1e12, 1e13
SLACK_S = 1.0  # the counter moves in steps
SENTINEL = 0xFFFFFFFF  # all ones of 32 bits; a real count is almost never exactly this number
COUNT_MAX = 2**63  # larger values are 64-bit sentinels


class _Reading(NamedTuple):
    """Bytes that a link reported. `at`: time of the reading in monotonic seconds."""

    value: float
    at: float


class _Counter:
    """The counter of one link in one direction.

    - `believed`: the last accepted reading, None before the first.
    - `base`: added to the reading, so that the sum never falls.
    - `doubted`: the last reading if it was not accepted, otherwise None.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self.base = 0.0
        self.believed: _Reading | None = None
        self.doubted: _Reading | None = None
        self.silent_since: float | None = None
        self.is_answered = True  # by the last reading, with any value
        self.is_left = False  # silent for PATIENCE_S: the other links continue without it

    @property
    def sum(self) -> float:
        return self.base + (self.believed.value if self.believed else 0.0)

    def admit(self, reading: _Reading, *, is_first: bool) -> bool:
        """Accepts this reading if it is plausible. Returns whether it was. `is_first`: no sum was returned yet."""
        doubted, self.doubted = self.doubted, None
        if self.believed is None:
            self.base = 0.0 if is_first else -reading.value
        elif not self._follows(self.believed, reading) or (doubted is not None and doubted.value == reading.value):
            if doubted is None or not self._follows(doubted, reading) or not self._was_reset(doubted, reading):
                self.doubted = reading
                return False
            self.base = self.sum - doubted.value
        self.believed, self.silent_since, self.is_left = reading, None, False
        return True

    def _follows(self, before: _Reading, reading: _Reading) -> bool:
        """Returns whether a link can move this number of bytes between the two readings."""
        return 0.0 <= reading.value - before.value <= self.max_rate * (reading.at - before.at + SLACK_S)

    def _was_reset(self, doubted: _Reading, reading: _Reading) -> bool:
        """Returns whether two implausible readings show a reset of the counter. Otherwise they repeat one invalid
        value.

        A small value may stay the same, because the link may be idle since the reset. A larger value must increase.
        """
        assert self.believed is not None
        small = self.max_rate * (doubted.at - self.believed.at + SLACK_S)
        return reading.value > doubted.value or doubted.value < min(self.believed.value, small)


class NvlinkCounters:
    """The counters of all links of one GPU."""

    def __init__(self, fields: Fields, label: str, clock: Clock) -> None:
        self._fields = fields
        self._label = label
        self._clock = clock
        self._links: dict[Field, _Counter] = {}
        self._is_read = False
        self._count: int | None = None  # number of links, once the driver has reported it
        self._had_state = False
        self.up: frozenset[int] = frozenset()  # links that were up at the last count

    def read(self) -> Traffic:
        """Returns the bytes since the driver was loaded, over all links.

        Raises NotSupported on a board without links, and DeviceError for PATIENCE_S after a link stopped answering.
        """
        is_nonsense = self._take(self._ask())
        sent, received = ([link for (field, _), link in self._links.items() if field in kind] for kind in (TX, RX))
        if not (sent and received):
            raise NotSupported(Fields.CALL, "NVML_ERROR_NOT_SUPPORTED")
        if any(link.silent_since is not None and not link.is_left for link in self._links.values()):
            raise DeviceError(Fields.CALL, OUT_OF_RANGE if is_nonsense else "NVML_ERROR_NO_DATA", once_answered=True)
        if any(all(link.is_left for link in links) for links in (sent, received)):
            raise NotSupported(Fields.CALL, "NVML_ERROR_NO_DATA")
        self._is_read = True
        return Traffic(rx=sum(link.sum for link in received), tx=sum(link.sum for link in sent))

    def count_active(self, ask: Asker) -> int:
        """Returns the number of links that are up. A link still counts until two calls in a row find it down, because a
        link that trains again is down for seconds.

        Where the driver reports no state of links, a link is up while its own counters are answered. Raises
        NotSupported if they are unknown too, and DeviceError if a state cannot be read now.
        """
        states: dict[int, bool] = {}
        for link in range(self._read_count()):
            try:
                state = ask("nvmlDeviceGetNvLinkState", link)
            except NotSupported:
                continue
            except DeviceError as exc:
                if exc.error != "NVML_ERROR_INVALID_ARGUMENT":  # the board has no such link
                    raise
                continue
            if state not in (0, nvml.NVML_FEATURE_ENABLED):
                raise DeviceError("nvmlDeviceGetNvLinkState", OUT_OF_RANGE)
            states[link] = bool(state)
        self._had_state |= bool(states)
        if not states and not self._had_state:  # otherwise the driver refuses the call now, so the number is unknown
            for field, counter in self._links.items():
                if field not in (ALL_TX, ALL_RX):
                    states[field[1]] = states.get(field[1], False) or counter.is_answered
        if not states:
            raise NotSupported("nvmlDeviceGetNvLinkState", "NVML_ERROR_NOT_SUPPORTED")
        before, self.up = self.up, frozenset(link for link, is_up in states.items() if is_up)
        return len(self.up | before)

    def _ask(self) -> dict[Field, float]:
        """Reads the driver's counters: of all links together if the board has this counter, otherwise of each link."""
        if not self._links or ALL_TX in self._links:
            answers = self._fields.read(ALL_TX, ALL_RX)
            if ALL_TX in self._links or len(answers) == 2:
                return {field: value for field, value in answers.items() if isinstance(field, tuple)}
        answers = self._fields.read(*self._list_links())
        return {field: value for field, value in answers.items() if isinstance(field, tuple)}

    def _list_links(self) -> Sequence[Field]:
        """Returns the two fields (received, sent) of each link."""
        return [(field, link) for field in (TX[1], RX[1]) for link in range(self._read_count())]

    def _read_count(self) -> int:
        """Returns the number of links. Assumes NVLINKS if the driver reports no number."""
        if self._count is None:
            count = self._fields.read(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT).get(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
            self._count = int(count) if count is not None and 0 < count <= nvml.NVLINKS_MAX else None
        return nvml.NVLINKS if self._count is None else self._count

    def _take(self, answers: Mapping[Field, float]) -> bool:
        """Adds the new counts of the links. Returns whether a link reported an implausible value."""
        now = self._clock.monotonic()
        admitted: set[Field] = set()
        for field, value in answers.items():
            is_board = field in (ALL_TX, ALL_RX)
            link = self._links.setdefault(field, _Counter(BOARD_MAX if is_board else LINK_MAX))
            if 0 <= value < COUNT_MAX and value != SENTINEL:
                reading = _Reading(value * KIB if is_board else float(value), now)
                if link.admit(reading, is_first=not self._is_read):
                    admitted.add(field)
        left: set[int] = set()
        for field, link in self._links.items():
            link.is_answered = field in answers
            if field not in admitted and self._note_silence(field, link, now):
                left.add(field[1])
        if left:
            self._log_silence(left)
        return admitted != answers.keys()

    def _note_silence(self, field: Field, link: _Counter, now: float) -> bool:
        """Returns whether the counter has just been silent for PATIENCE_S."""
        if link.is_left:
            self._fields.refuse(field)
            return False
        self._fields.ask_again(field)
        link.silent_since = now if link.silent_since is None else link.silent_since
        if now - link.silent_since < PATIENCE_S:
            return False
        link.is_left = True
        self._fields.refuse(field)
        self._fields.errors.append(DeviceError(Fields.CALL, "NVML_ERROR_NO_DATA"))
        return True

    def _log_silence(self, left: set[int]) -> None:
        """Logs once that these links no longer count. `left`: their numbers, or NVML_VALUE_ALL_LINKS."""
        silent = {link for (_, link), counter in self._links.items() if counter.is_left}
        counting = {link for _, link in self._links} - silent
        which = "NVLink" if nvml.NVML_VALUE_ALL_LINKS in left else f"NVLink {', '.join(map(str, sorted(left)))}"
        log.warning(
            "%s: %s: no traffic counters for %.0f s; the last counts stay in the sum; %s",
            self._label,
            which,
            PATIENCE_S,
            f"{len(counting)} links are still counted" if counting else "no link is counted any more",
        )
