"""Traffic over NVLink: KiB over all links together before Blackwell, bytes of each link since (138 is gone there).

The sum over the links never falls. A link that stops answering keeps what it has counted in the sum. For PATIENCE_S its
silence is an error, since it may have moved bytes meanwhile; after that the other links go on without it, and it is
asked again after a while. One that comes back, or joins late, adds what it counts from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpu_exporter.devices.errors import DeviceError, NotSupported
from gpu_exporter.devices.nvml import constants as nvml
from gpu_exporter.devices.nvml.asker import Fields
from gpu_exporter.devices.protocol import Traffic

log = logging.getLogger(__name__)
KIB = 1024.0
PATIENCE_S = 60.0
Field = tuple[int, int]  # field id and scope (a link, or all of them)
ALL_TX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_VALUE_ALL_LINKS)
ALL_RX: Field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_VALUE_ALL_LINKS)
LINK_TX = tuple((nvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, link) for link in range(nvml.NVLINKS))
LINK_RX = tuple((nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES, link) for link in range(nvml.NVLINKS))
TX = (ALL_TX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES)
RX = (ALL_RX[0], nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES)


@dataclass(slots=True)
class _Counter:
    """One link in one direction. `value`: as last read; `base`: what is added to it, so that the sum never falls."""

    value: float
    base: float
    silent_since: float | None = None
    is_left: bool = False  # silent for so long that the others go on without it


class NvlinkCounters:
    """The links of one GPU."""

    def __init__(self, fields: Fields, label: str, monotonic: Callable[[], float]) -> None:
        self._fields = fields
        self._label = label
        self._monotonic = monotonic
        self._links: dict[Field, _Counter] = {}

    def read(self) -> Traffic:
        """Bytes since the driver was loaded, over all links that answer.

        Raises NotSupported on a board without links, DeviceError while one that has answered before is silent.
        """
        told = self._ask()
        self._take(told)
        sent, received = ([link for (field, _), link in self._links.items() if field in kind] for kind in (TX, RX))
        if not (sent and received):
            raise NotSupported(Fields.CALL, "NVML_ERROR_NOT_SUPPORTED")
        waiting = [field for field, link in self._links.items() if link.silent_since is not None and not link.is_left]
        if waiting:
            raise DeviceError(Fields.CALL, "NVML_ERROR_NO_DATA", once_told=True)
        if all(link.is_left for link in self._links.values()):
            raise NotSupported(Fields.CALL, "NVML_ERROR_NO_DATA")
        return Traffic(rx=sum(c.base + c.value for c in received), tx=sum(c.base + c.value for c in sent))

    def _ask(self) -> dict[Field, float]:
        """Bytes by field: of all links together where the board has that, else of each."""
        if not self._links or ALL_TX in self._links:
            told = self._fields.read(ALL_TX, ALL_RX)
            if ALL_TX in self._links or len(told) == 2:
                return {field: value * KIB for field, value in told.items() if isinstance(field, tuple)}
        told = self._fields.read(*LINK_TX, *LINK_RX)
        return {field: float(value) for field, value in told.items() if isinstance(field, tuple)}

    def _take(self, told: Mapping[Field, float]) -> None:
        now = self._monotonic()
        is_first = not self._links
        for field, value in told.items():
            link = self._links.get(field)
            if link is None:
                self._links[field] = _Counter(value, 0.0 if is_first else -value)
                continue
            if value < link.value:  # this link alone was reset
                link.base += link.value
            link.value, link.silent_since, link.is_left = value, None, False
        for field, link in self._links.items():
            if field in told:
                continue
            if link.is_left:
                self._fields.refuse(field)
                continue
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
