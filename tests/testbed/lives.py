"""The life of one holder on one node: what its GPUs and its host show, phase by phase, and what is true of it.

A generator of such lives (tests/bench/outsiders.py) knows nothing of the rule that judges them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from gpu_exporter.agent.devices.levels import WOBBLE_S, Level
from gpu_exporter.agent.devices.products import PRODUCTS
from gpu_exporter.common.model.readings import Activity, DeviceSnapshot, Effort, HostProgress, Span
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.diagnosis.stalls.boards import SILENT, Boards, HeldBoard
from gpu_exporter.diagnosis.stalls.rules import StallRules
from tests.testbed.spins import KEY, NO_GPM, QUIET, Host

WORKS, WAITS, HANGS = "works", "waits", "hangs"


class Phase(NamedTuple):
    """`levels`: of each GPU of the holder on this node. `host`: what its processes without a spinning GPU do. `cores`:
    CPUs that its whole cgroup uses, spinning processes included. `truth`: WORKS, WAITS for what ends by itself, or HANGS.
    `memory`: GiB in use on each GPU. `event`, at the begin of the phase: "restart": all its processes end, and others begin;
    "gone 0", "stopped 0", "killed 0", "xid 0": the process on this GPU ended, was stopped by a signal, was killed for lack of
    memory, or the GPU reported an XID. "silent 0": the GPU does not answer; "answers": it does again.
    """

    seconds: float
    levels: tuple[Level, ...]
    truth: str
    host: Host = QUIET
    cores: float = 1.0
    memory: float = 40.0
    event: str = ""


class Life(NamedTuple):
    """`kind`: a name for the row of a table. `model`: a key of PRODUCTS. `visible`: whether the host's processes are."""

    kind: str
    model: str
    phases: tuple[Phase, ...]
    visible: bool = True


HOST_S, GIB = 30.0, 1024.0**3


class Said(NamedTuple):
    """What was published of one GPU after one reading. `at`: seconds since the begin of its phase."""

    phase: int
    at: float
    gpu: int
    confidence: str


class Player:
    """Plays a life to the search for stalls, and to the same questions that the node asks it."""

    def __init__(self, life: Life, *, step_s: float, seed: int, rules: StallRules | None = None) -> None:
        self.life, self.step_s = life, step_s
        self.random = random.Random(seed)
        self.boards = Boards(rules or StallRules())
        self.product = PRODUCTS[life.model]
        self.units = [UnitId(f"GPU-{i}") for i in range(len(life.phases[0].levels))]
        self.gains = [1.0 + self.random.uniform(-0.05, 0.05) for _ in self.units]
        self.t, self._host_at = 1000.0, 1000.0
        self._ended = self._stopped = 0
        self._without: set[int] = set()
        self._silent: set[int] = set()
        self._names = [
            DeviceIdentity(i, unit.uuid, self.product.name, "580", f"0000:0{i}:00.0", 0, "disabled")
            for i, unit in enumerate(self.units)
        ]
        self.boards.hold([HeldBoard(unit, KEY) for unit in self.units])

    def play(self) -> Iterator[Said]:
        """What is published, after each reading in which it is at least low."""
        for number, phase in enumerate(self.life.phases):
            self._begin(phase)
            began, until = self.t, self.t + phase.seconds
            while self.t < until:
                start, self.t = self.t, min(until, self.t + self.step_s)
                for gpu, level in enumerate(phase.levels):
                    if gpu in self._silent:
                        self.boards.note_fault(self.units[gpu], SILENT, self.t)
                        continue
                    self.boards.read(self._snapshot(phase, gpu, level, start), without_process=gpu in self._without)
                if self.t - self._host_at >= HOST_S:
                    self._hear(phase)
                for gpu, unit in enumerate(self.units):
                    spin = self.boards.report(unit, KEY) if phase.levels[gpu].utilization > 0.9 else None
                    if spin is not None and spin.confidence != "none":
                        yield Said(number, self.t - began, gpu, spin.confidence)

    def _begin(self, phase: Phase) -> None:
        event, _, gpu = phase.event.partition(" ")
        if event == "restart":
            self._ended, self._stopped, self._without = len(self.units), 0, set()
        elif event == "stopped":
            self._stopped = 1
        elif event in ("gone", "killed"):
            self._ended += 1
            if self.life.visible:
                self._without.add(int(gpu))
        elif event in ("silent", "answers"):
            self._silent = {int(gpu)} if gpu else set()
        elif event == "xid":
            self.boards.note_fault(self.units[int(gpu)], "reported XID 79", self.t)

    def _hear(self, phase: Phase) -> None:
        start, self._host_at = self._host_at, self.t
        spinning = sum(level.utilization >= 0.95 for level in phase.levels)
        progress = HostProgress(start, self.t, *phase.host, cores=phase.cores, spinning=spinning)
        if self.life.visible:
            progress = progress._replace(ended=self._ended, stopped=self._stopped)
        self._ended = 0
        for unit, _ in self.boards.suspects():
            self.boards.hear(unit, KEY, progress)

    def _snapshot(self, phase: Phase, gpu: int, level: Level, start: float) -> DeviceSnapshot:
        unit, noise = self.units[gpu], self.random.uniform
        wave = level.wobble_w * math.sin(2 * math.pi * self.t / WOBBLE_S) if level.wobble_w else 0.0
        watts = self.gains[gpu] * (level.watts + wave) + noise(-0.5, 0.5)
        limit_w = self.product.power_limit
        has_gpm = self.life.model not in NO_GPM
        pipes = max(level.tensor, level.fp64)
        effort = Effort(
            start,
            self.t,
            watts,
            watts,
            limit_w,
            limit_w,
            phase.memory * GIB,
            level.pcie + 3000.0,
            level.nvlink,
            level.sm if has_gpm else None,
            pipes if has_gpm else None,
            level.dram if has_gpm else None,
        )
        activity = Activity(unit, (Span(start, self.t, level.utilization),), 3)
        return DeviceSnapshot(self._names[gpu], self.t, self.t, up=True, activity=activity, effort=effort)
