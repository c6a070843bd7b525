"""Traffic over NVLink: KiB over all links together before Blackwell, bytes of each link since (138 is gone there).

The sum over the links never falls. A link that stops answering keeps what it has counted in the sum. For PATIENCE_S its
silence is an error, since it may have moved bytes meanwhile; after that the other links go on without it, and it is
asked again after a while. One that comes back, or joins late, adds what it counts from then on.

A value that cannot be true is silence too: a sentinel, or a step that no link can make. It is kept only to be compared
with the next reading. When that goes on from it, the counter was reset, and counts on from there; else the counter
goes on from before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.clock import Clock
from gpu_exporter.devices.errors import OUT_OF_RANGE, DeviceError, NotSupported
from gpu_exporter.devices.nvml import constants as nvml
from gpu_exporter.devices.nvml.asker import Fields
from gpu_exporter.devices.protocol import Traffic

log = logging.getLogger(__name__)
KIB = 1024.0
PATIENCE_S = 60.0
Field = tuple[int, int]  # field id and scope (a link, or all of them)
ALL_TX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_VALUE_ALL_LINKS)
ALL_RX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_VALUE_ALL_LINKS)
TX = (ALL_TX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES)
RX = (ALL_RX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)


# Bytes per second in one direction, ten times what is known: 18 links of Blackwell move 0.05 TB/s each.
LINK_MAX, BOARD_MAX = 1e12, 1e13
SLACK_S = 1.0  # the counter moves in steps
SENTINEL = 0xFFFFFFFF  # all ones of 32 bits; a count can hardly be just that
COUNT_MAX = 2**63  # above it are the sentinels of 64 bits


class _Reading(NamedTuple):
    """Bytes that a link reported, and when, in monotonic seconds."""

    value: float
    at: float


class _Counter:
    """One link in one direction.

    `believed`: None before the first value; `base`: what is added to it, so that the sum never falls. `doubted`: the
    last reading, while it is not believed.
    """

    def __init__(self, max_rate: float) -> None:
        self.max_rate = max_rate
        self.base = 0.0
        self.believed: _Reading | None = None
        self.doubted: _Reading | None = None
        self.silent_since: float | None = None
        self.is_left = False  # silent for so long that the others go on without it

    @property
    def sum(self) -> float:
        return self.base + (self.believed.value if self.believed else 0.0)

    def admit(self, reading: _Reading, *, is_first: bool) -> bool:
        """Take this reading into the sum, unless it cannot be true. `is_first`: no sum has been returned yet."""
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
        """Whether a link can have counted from one to the other."""
        return 0.0 <= reading.value - before.value <= self.max_rate * (reading.at - before.at + SLACK_S)

    def _was_reset(self, doubted: _Reading, reading: _Reading) -> bool:
        """Whether the two readings show a counter that counts, and not twice the same nonsense.

        A link at rest stays at the small value that it was reset to. Any other value has to move.
        """
        assert self.believed is not None
        small = self.max_rate * (doubted.at - self.believed.at + SLACK_S)
        return reading.value > doubted.value or doubted.value < min(self.believed.value, small)


class NvlinkCounters:
    """The links of one GPU."""

    def __init__(self, fields: Fields, label: str, clock: Clock) -> None:
        self._fields = fields
        self._label = label
        self._clock = clock
        self._links: dict[Field, _Counter] = {}
        self._is_read = False
        self._count: int | None = None  # of links, once the driver has said it

    def read(self) -> Traffic:
        """Bytes since the driver was loaded, over all links that answer.

        Raises NotSupported on a board without links, DeviceError while one that has answered before is silent.
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

    def _ask(self) -> dict[Field, float]:
        """Values by field, as the driver counts them: of all links together where the board has that, else of each."""
        if not self._links or ALL_TX in self._links:
            answers = self._fields.read(ALL_TX, ALL_RX)
            if ALL_TX in self._links or len(answers) == 2:
                return {field: value for field, value in answers.items() if isinstance(field, tuple)}
        answers = self._fields.read(*self._list_links())
        return {field: value for field, value in answers.items() if isinstance(field, tuple)}

    def _list_links(self) -> Sequence[Field]:
        """Both fields of each link that the driver counts; where it counts none, of as many as boards have."""
        if self._count is None:
            count = self._fields.read(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT).get(nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
            self._count = int(count) if count is not None and 0 < count <= nvml.NVLINKS_MAX else None
        count = nvml.NVLINKS if self._count is None else self._count
        return [(field, link) for field in (TX[1], RX[1]) for link in range(count)]

    def _take(self, answers: Mapping[Field, float]) -> bool:
        """Add what the links have counted; whether one reported what cannot be true."""
        now = self._clock.monotonic()
        admitted: set[Field] = set()
        for field, value in answers.items():
            is_board = field in (ALL_TX, ALL_RX)
            link = self._links.setdefault(field, _Counter(BOARD_MAX if is_board else LINK_MAX))
            if 0 <= value < COUNT_MAX and value != SENTINEL:
                reading = _Reading(value * KIB if is_board else float(value), now)
                if link.admit(reading, is_first=not self._is_read):
                    admitted.add(field)
        for field, link in self._links.items():
            if field not in admitted:
                self._note_silence(field, link, now)
        return admitted != answers.keys()

    def _note_silence(self, field: Field, link: _Counter, now: float) -> None:
        if link.is_left:
            self._fields.refuse(field)
            return
        self._fields.ask_again(field)
        link.silent_since = now if link.silent_since is None else link.silent_since
        if now - link.silent_since >= PATIENCE_S:
            link.is_left = True
            self._fields.refuse(field)
            self._fields.errors.append(DeviceError(Fields.CALL, "NVML_ERROR_NO_DATA"))
            log.warning(
                "%s: NVLink %d has not answered field %d for %.0f s; what it counted stays in the sum, the other "
                "links go on",
                self._label,
                field[1],
                field[0],
                PATIENCE_S,
            )
