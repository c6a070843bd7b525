"""Remembers the valid order of GPUs for each time. A job keeps the IDX numbers that it had at its start.

slurmd reads gres.conf when it starts (before Slurm 23.11 also at `scontrol reconfigure`), and running jobs continue. So
the present file applies only to jobs that started after slurmd read it. An older job is resolved only with the order of
its start time. A new date without new content for this node changes nothing. Times are Unix seconds of the node's
clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_exporter.agent.attribution.remembered import Remembered
from gpu_exporter.agent.attribution.slurm.gres.conf import GpuOrder, Shares
from gpu_exporter.common.files import READABLE
from gpu_exporter.common.outside import need_real, need_whole, need_wholes

FILE = "slurm-orders.json"
EPOCHS_MAX = 16  # orders of one node; sites change gres.conf a few times a year
SKEW_S = 10.0  # between slurmctld's clock, which dates jobs, and the node's clock
# If the order is the same before and after a gap of at most this length, it did not change in the gap.
GAP_S = 600.0
SAVE_EACH_S = 60.0  # how often the file records that an order still applies
BEFORE = (
    "the job began before slurmd read this gres.conf, and the earlier order of GPUs is unknown; jobs that begin "
    "now are not affected"
)
_UNKNOWN = GpuOrder("unknown", problem=BEFORE)


class GresContent(NamedTuple):
    """The present content of gres.conf.

    - `since`: when slurmd began to use it. None if slurmd may still use an older content.
    - `changed`, `path`: time of the change and the changed file, if `since` is None.
    - `shares`: the GPUs of which jobs can get parts.
    - `boot`: the node's boot time, if the file was last changed before it. Then every slurmd since the boot read this
      content. Otherwise None.
    """

    order: GpuOrder
    since: float | None = None
    changed: float = 0.0
    path: str = ""
    shares: Shares = MappingProxyType({})
    boot: float | None = None


class Epoch(NamedTuple):
    """A period in which the GPUs had one order (`order`), from `since` until it was last seen (`seen`). Unix seconds.

    `is_over`: after `seen`, the GPUs may have another order.
    """

    since: float
    seen: float
    order: GpuOrder
    is_over: bool = False


class Epochs:
    """The orders of one node over time, saved in a file if there is a directory for it. Not thread-safe."""

    def __init__(self, directory: Path | None, node: str, *, writes: bool = True) -> None:
        """`writes`: whether to write the file."""
        self._file = Remembered(directory, FILE, node, "the order of older jobs", writes=writes)
        self._epochs = self._read()
        self._saved: tuple[float, Sequence[Epoch]] = (0.0, list(self._epochs))

    def note(self, found: GresContent, slurmd_start: float | None, now: float) -> GpuOrder:
        """Records the present content of gres.conf. Returns the present order (kind "unknown" if unproven)."""
        if found.order.kind == "unknown":
            return found.order
        if slurmd_start is None:
            return GpuOrder(
                "unknown",
                problem="the start time of slurmd is unknown, so slurmd may have read another gres.conf; "
                "restart slurmd",
            )
        order = self._decide(found, slurmd_start, now)
        self._save(now)
        return order

    def _decide(self, found: GresContent, slurmd_start: float, now: float) -> GpuOrder:
        last = self._epochs[-1] if self._epochs else None
        if found.since is not None:
            since = found.since if self._is_contradicted(found) else min(found.since, found.boot or found.since)
            if last is None or not _goes_on(last, found.order, since):
                self._begin(Epoch(since, max(since, now), found.order))
            else:
                self._epochs[-1] = last._replace(since=min(last.since, since), seen=max(last.seen, now))
            return found.order
        if last is None or not last.since <= slurmd_start <= last.seen:
            return GpuOrder(
                "unknown",
                problem=f"{found.path} was changed after slurmd started, and its earlier content is unknown; "
                "restart slurmd",
            )
        if not last.is_over and last.order == found.order:
            self._epochs[-1] = last._replace(seen=max(last.seen, now))
            return found.order
        if not last.is_over:
            # A file from another host may have a date ahead of the clock.
            self._epochs[-1] = last._replace(seen=max(last.seen, min(found.changed, now)), is_over=True)
        return GpuOrder(
            "unknown",
            problem=f"{found.path} lists the GPUs in another order than when slurmd started: restart slurmd "
            "(`scontrol reconfigure` is not enough)",
        )

    def _is_contradicted(self, found: GresContent) -> bool:
        """Returns whether another order applied after the boot. Then the date of the file proves nothing."""
        return any(epoch.order != found.order and epoch.seen >= (found.boot or 0.0) for epoch in self._epochs)

    def at(self, start: float | None, order: GpuOrder) -> GpuOrder:
        """Returns the order for a job that started at `start` (None if unknown). `order`: the present
        result of `note`.
        """
        if start is None:
            is_the_same = all(epoch.order == order for epoch in self._epochs)
            return order if is_the_same or order.kind == "unknown" else _UNKNOWN
        for number, epoch in enumerate(self._epochs):
            begin, end = epoch.since, epoch.seen
            if number and self._epochs[number - 1].order != epoch.order:
                begin += SKEW_S
            after = self._epochs[number + 1] if number + 1 < len(self._epochs) else None
            if after is None and order.kind != "unknown":
                end = math.inf
            elif epoch.is_over and (after is None or after.order != epoch.order):
                end -= SKEW_S
            if begin <= start <= end:
                return epoch.order
        return order if order.kind == "unknown" else _UNKNOWN

    def _begin(self, epoch: Epoch) -> None:
        if self._epochs:
            self._epochs[-1] = self._epochs[-1]._replace(is_over=True)
        self._epochs = [*self._epochs, epoch][-EPOCHS_MAX:]

    def _save(self, now: float) -> None:
        """Saves the orders after a change, and otherwise every SAVE_EACH_S."""
        at, epochs = self._saved
        same = [each._replace(seen=0.0) for each in epochs] == [each._replace(seen=0.0) for each in self._epochs]
        if not self._file.is_kept or (same and 0.0 <= now - at < SAVE_EACH_S):
            return
        self._file.write([epoch._asdict() | {"order": epoch.order._asdict()} for epoch in self._epochs], READABLE)
        self._saved = (now, list(self._epochs))

    def _read(self) -> list[Epoch]:
        try:
            return [_epoch(row) for row in self._file.read() or ()][-EPOCHS_MAX:]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            self._file.refuse(exc)
            return []


def _goes_on(last: Epoch, order: GpuOrder, since: float) -> bool:
    """Returns whether `order` continues the last epoch, without a gap in which another order may have applied."""
    return last.order == order and not last.is_over and since <= last.seen + GAP_S


def _epoch(row: Any) -> Epoch:
    order = row["order"]
    if order["kind"] not in ("minor", "index"):
        raise ValueError(f"{order['kind']!r:.40} is not an order")
    minors = tuple(order["minors"])
    if not all(isinstance(minor, str) and len(minor) < 20 for minor in minors):
        raise ValueError("a minor number is not a short text")
    caps = tuple(need_wholes(each) for each in order["caps"])
    return Epoch(
        need_real(row["since"]),
        need_real(row["seen"]),
        GpuOrder(order["kind"], minors, need_whole(order["total"]), caps=caps),
        row["is_over"] is True,
    )
