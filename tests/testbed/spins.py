"""A holder of one whole GPU that goes through published levels, as the search for stalls sees it.

The levels are those of devices/levels.py, which the rules do not know. Each board has its own error of up to 5 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_exporter.agent.devices.levels import LEVELS, WOBBLE_S, Level
from gpu_exporter.agent.devices.products import PRODUCTS
from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.readings import Activity, DeviceSnapshot, Effort, Facts, HostProgress, Span
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.stalls.boards import Boards, HeldBoard
from gpu_exporter.diagnosis.stalls.rules import StallRules
from gpu_exporter.diagnosis.stalls.watch import SpinWatch

UNIT, OTHER = UnitId("GPU-0"), UnitId("GPU-1")  # the holder's second GPU does the same: a collective has two members
KEY = HolderKey("slurm", "7")
HOST_S = 30.0
NO_GPM = frozenset(("V100", "A100", "T4"))
GIB = 1024.0**3


class Host(NamedTuple):
    """What the holder does on its host; None is unknown."""

    loaders: float | None = 0.01
    new_process: bool | None = False
    disk: float | None = 0.0
    network: float | None = 2000.0
    steps: int | None = None


QUIET, BLIND = Host(), Host(None, None, None, None)


class Stage(NamedTuple):
    """`level`: a name of LEVELS, or a level. `memory`: GiB. `cap_w`: an administrator's power limit. `reading_w`:
    what the driver reports in place of the mean power. `hidden`: names of
    values that cannot be read. `lost`: no reading at all. `without_process`: no process has a context. `draws`: one
    has a graphics context.
    """

    seconds: float
    level: str | Level
    host: Host = QUIET
    memory: float = 40.0
    cap_w: float | None = None
    reading_w: float | None = None
    hidden: frozenset[str] = frozenset()
    lost: bool = False
    contradiction: str = ""
    without_process: bool = False
    draws: bool = False


class Trace:
    """Plays stages. `step_s`: how often the GPU is read. The watch has been on since `seen_from` seconds."""

    def __init__(self, model: str, *, step_s: float = 5.0, seed: int = 0, rules: StallRules | None = None) -> None:
        self.model, self.step_s = model, step_s
        self.product = PRODUCTS[model]
        self.rules = rules or StallRules()
        self.random = random.Random(seed)
        self.gain = 1.0 + self.random.uniform(-0.05, 0.05)
        self.t = 1000.0
        self._host_at = self.t
        self.key = KEY
        self._boards = Boards(self.rules)
        self._identity = DeviceIdentity(0, UNIT.uuid, self.product.name, "580", "0000:01:00.0", 0, "disabled")
        self.hold()

    @property
    def watch(self) -> SpinWatch | None:
        return self._boards.watch_of(UNIT, self.key)

    def hold(self, held: HeldBoard | None = None) -> None:
        self._boards.drop([(UNIT, self.key), (OTHER, self.key)])
        self._boards.hold([held or HeldBoard(UNIT, self.key), HeldBoard(OTHER, self.key)])

    def hold_another(self) -> None:
        """Another job begins on the GPU."""
        self.key = HolderKey("slurm", "8")
        self.hold()

    def doubt(self) -> None:
        """One poll cannot prove the holder, the next one can."""
        self._boards.drop([])
        self.hold()

    def hear_of(self, key: HolderKey, host: Host) -> None:
        """A look at the host of any holder ends now."""
        self._boards.hear(UNIT, key, HostProgress(self.t - HOST_S, self.t, *host))

    def enable_mig(self) -> None:
        self._identity = self._identity._replace(mig_mode="enabled")

    def restart(self, away_s: float) -> None:
        """A new process, which has only what the state file keeps."""
        watch = self.watch
        held = HeldBoard(UNIT, self.key)
        if watch is not None:
            held = HeldBoard(UNIT, self.key, watch.remember(), watch.work.total_s, watch.work.median_w() or 0.0)
        floors = self._boards.floors()
        self.t += away_s
        self._host_at = self.t
        self._boards = Boards(self.rules)
        self._boards.restore(floors)
        self.hold(held)

    def play(self, *stages: Stage) -> list[tuple[float, Spin]]:
        """The report after every reading, with the time since the begin of these stages."""
        began = self.t
        return [(self.t - began, spin) for stage in stages for spin in self._play(stage)]

    def _play(self, stage: Stage) -> Iterator[Spin]:
        level = LEVELS[self.model, stage.level] if isinstance(stage.level, str) else stage.level
        until = self.t + stage.seconds
        while self.t < until:
            start, self.t = self.t, min(until, self.t + self.step_s)
            if stage.lost:
                self._host_at = self.t
                continue
            snapshot = self._snapshot(stage, level, start)
            other = snapshot.identity._replace(uuid=OTHER.uuid, index=1)
            for each in (snapshot, snapshot._replace(identity=other)):
                self._boards.read(each, without_process=stage.without_process)
            if self.t - self._host_at >= HOST_S:
                self._hear(stage.host)
            yield self.report()

    def report(self) -> Spin:
        report = self._boards.report(UNIT, self.key)
        assert report is not None
        return report

    def _hear(self, host: Host) -> None:
        start, self._host_at = self._host_at, self.t
        if (UNIT, self.key) in self._boards.suspects():
            self._boards.hear(UNIT, self.key, HostProgress(start, self.t, *host))

    def _snapshot(self, stage: Stage, level: Level, start: float) -> DeviceSnapshot:
        phase = math.sin(2 * math.pi * self.t / WOBBLE_S)
        watts = self.gain * (level.watts + level.wobble_w * phase) + self.random.uniform(-0.5, 0.5)
        if stage.cap_w is not None:
            watts = min(watts, stage.cap_w)
        limit_w = self.product.power_limit
        values: dict[str, float | None] = {
            "power_w": watts,
            "reading_w": watts if stage.reading_w is None else stage.reading_w,
            "limit_w": stage.cap_w or limit_w,
            "default_limit_w": limit_w,
            "memory_bytes": stage.memory * GIB,
            "pcie": level.pcie + 3000.0,
            "nvlink": level.nvlink,
            "sm": level.sm,
            "pipes": max(level.tensor, level.fp64),
            "dram": level.dram,
        }
        if self.model in NO_GPM:
            values |= {"sm": None, "pipes": None, "dram": None}
        values |= dict.fromkeys(stage.hidden & values.keys())
        spans = () if "utilization" in stage.hidden else (Span(start, self.t, level.utilization),)
        return DeviceSnapshot(
            self._identity,
            self.t,
            self.t,
            up=True,
            activity=None if stage.contradiction else Activity(UNIT, spans, 3),
            facts=Facts(graphics_processes=float(stage.draws)),
            effort=Effort(start, self.t, **values),
            contradiction=stage.contradiction,
        )


def first_stall(reports: Sequence[tuple[float, Spin]]) -> float | None:
    """Seconds until the first report of a stall, None without one."""
    return next((at for at, spin in reports if spin.is_stall), None)


def strongest(reports: Sequence[tuple[float, Spin]]) -> str:
    """The highest confidence of all reports."""
    order = ("none", "low", "medium", "high")
    return max((spin.confidence for _, spin in reports), key=order.index, default="none")
