"""What the tests of this subject share: a node of Slurm, and an exporter on it, while Slurm's commands do not answer."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.testbed.simulated_node import SimulatedNode
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.slurm.parse import COLUMNS
from gpu_exporter.agent.attribution.source import SlowSource, SourceError
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.runtime.agent import PATIENCE_S
from gpu_exporter.common.clock import ManualClock

GPUS = 4
PARTS = 8  # of each GPU
POLL_S = 5.0
WRITE_S = 10.0
SCENARIO = {"gpus": [{"model": "H100"}] * GPUS, "holders": []}


class Job(NamedTuple):
    """A run of a job on one GPU, from `begin` to `end` in seconds since the node's start. `kind`: whole, shard or mps.

    `nodes`: its number of nodes. `late_s`: how much later than the last step its epilog runs. `restarts`: how often the
    job was requeued before. `parts`: how many of the PARTS of its GPU it has, unless it has the whole GPU.
    """

    number: int
    begin: float
    end: float
    kind: str = "whole"
    nodes: int = 1
    late_s: float = 0.1
    gpu: int = 0
    restarts: int = 0
    parts: int = PARTS

    @property
    def user(self) -> str:
        """Each run has a user of its own, so that the hours of tenants are those of runs."""
        return f"u{self.number}" + (f"r{self.restarts}" if self.restarts else "")

    @property
    def uid(self) -> int:
        return 1000 + self.number + 500 * self.restarts


class Silence(NamedTuple):
    """The time in which commands with one of these words do not answer, in seconds since the node's start.

    `refuses`: they fail at once, as while slurmctld is away.
    """

    begin: float
    end: float
    words: tuple[str, ...]
    refuses: bool = False


class _Clock(ManualClock):
    """A clock during whose steps the node's jobs begin and end, and the exporter polls."""

    def __init__(self) -> None:
        super().__init__(1_000.0, 4_000_000_500.0)
        self.plan: list[tuple[float, int, object]] = []
        self.stops_at = math.inf
        """No later moment is reached: the exporter is stopped then, perhaps in the middle of a question."""

    def advance(self, seconds: float) -> None:
        until = min(self.monotonic() + seconds, self.stops_at)
        while self.plan and self.plan[0][0] <= until:
            at, _, act = self.plan.pop(0)
            super().advance(max(0.0, at - self.monotonic()))
            assert callable(act)
            act()
        super().advance(until - self.monotonic())

    def at(self, when: float, order: int, act: object) -> None:
        self.plan = sorted([*self.plan, (when, order, act)], key=lambda entry: entry[:2])


class SilentNode(Filing):
    """A node whose prolog and epilog write files, with an exporter that is polled as by its agent."""

    def __init__(self, directory: Path, jobs: Sequence[Job], silences: Sequence[Silence], shared: str = "") -> None:
        """`shared`: `shard` or `mps`, into which gres.conf divides each GPU."""
        self.node = SimulatedNode(parse_scenario(SCENARIO))  # replaced at each start
        super().__init__(directory)
        self.clock = self._clock = _Clock()
        self._began = self.clock.monotonic()
        self._silences, self._running = silences, dict[str, Job]()
        self.steps = {}
        self.spans: dict[str, tuple[int, int]] = {}
        """Begin and end of each run that has ended, by user, as its prolog and epilog wrote them."""
        if shared:
            own = f"Name={shared} Count={PARTS * GPUS} File=/dev/nvidia[0-{GPUS - 1}]\n"
            self.gres_conf.write_text(f"{self.gres_conf.read_text('utf-8')}{own}", "utf-8")
        (self.files / ".ended").mkdir(mode=0o755)
        for job in jobs:
            self._plan(job)
        self._missed = 0
        self._directory = directory / "state"
        self.start()

    def _plan(self, job: Job) -> None:
        for order, when, act in ((2, job.begin, self._start_job), (0, job.end, self._end_steps),
                                 (1, job.end + job.late_s, self._end_job)):  # fmt: skip
            self._clock.at(self._began + when, order, lambda act=act: act(job))

    def _start_job(self, job: Job) -> None:
        name, wall = str(job.number), math.floor(self.clock.wall())
        said = {
            "job": name, "gpus": job.gpu, "visible": job.gpu, "mps": "yes" if job.kind == "mps" else "", "user": job.user,
            "uid": job.uid, "cluster": "lab", "restarts": job.restarts, "start": wall, "nodes": job.nodes, "began": wall,
        }  # fmt: skip
        self.file(name, "".join(f"{key}={value}\n" for key, value in said.items()))
        self._running[name], self.steps = job, {**(self.steps or {}), name: {job.uid}}
        self.spans[job.user] = wall, 0
        self._show()

    def _end_steps(self, job: Job) -> None:
        assert self.steps is not None
        del self.steps[str(job.number)], self._running[str(job.number)]  # slurmctld ends a job before its epilog
        self._show()

    def _end_job(self, job: Job) -> None:
        end, path = math.floor(self.clock.wall()), self.files / str(job.number)
        path.write_text(f"{path.read_text('utf-8')}end={end}\n", "utf-8")
        number = 1_000_000_001 + len(os.listdir(self.files / ".ended"))
        path.rename(self.files / ".ended" / f"{number}.{job.number}")
        self.spans[job.user] = self.spans[job.user][0], end

    def _show(self) -> None:
        """What slurmctld reports from now on."""
        self.jobs = {name: [_gres([job])] for name, job in self._running.items()}
        kinds = sorted({job.kind for job in self._running.values()})
        self.used = ",".join(_gres([job for job in self._running.values() if job.kind == kind]) for kind in kinds)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        for begin, end, words, refuses in self._silences:
            left_s = self._began + end - self.clock.monotonic()
            if 0.0 < left_s <= end - begin and not {*words}.isdisjoint(command):
                self.clock.advance(0.01 if refuses else min(left_s, timeout_s) + 0.01)
                if refuses or left_s > timeout_s:
                    raise SlowSource(f"{command[0]} did not answer within {timeout_s:g} s")
        self.clock.advance(0.05)
        if self.clock.monotonic() >= self._clock.stops_at:
            raise SourceError("the exporter was stopped")
        return super().run(command, timeout_s)

    def _row(self, job: str) -> str:
        own = self._running[job]
        user = {"UserName": own.user, "UserID": str(own.uid), "StartTime": str(self.spans[own.user][0])}
        values = dict.fromkeys(COLUMNS, "N/A") | {
            "JobID": job,
            "State": "RUNNING",
            "RestartCnt": str(own.restarts),
            **user,
        }
        return "".join(f"{values[column]}|" for column in COLUMNS) + "\n"

    def start(self) -> None:
        """Start an exporter, perhaps after another one, of which only the state directory remains."""
        self._clock.stops_at, self.is_up = math.inf, True
        self._state = StateFile(self._directory, WRITE_S, "boot")
        self._state.acquire()
        self.node = SimulatedNode(parse_scenario(SCENARIO), state=self._state, clock=self.clock)
        self.node.state.restore()
        self.node.sample()
        self.recall = lambda: self._state.past
        self.restart()
        self._poller = Poller([self.source], self.clock, 300.0)
        self._clock.at(self.clock.monotonic() + WRITE_S, 3, partial(self._write, self._state))

    def _write(self, state: StateFile) -> None:
        if state is self._state and self.is_up:
            self.node.state.write_state()
            self._clock.at(self.clock.monotonic() + WRITE_S, 3, partial(self._write, state))

    def stop(self, *, saves: bool) -> None:
        if saves:
            self.node.state.write_state()
        self.is_up, self._clock.stops_at = False, math.inf
        self._missed = self.missed
        self._state.release()

    @property
    def missed(self) -> int:
        return self._missed + self._poller.statuses()[0].missed

    def run_until(self, seconds: float) -> None:
        """Poll as the agent does: it uses the last answer while a question takes longer than PATIENCE_S."""
        self._clock.stops_at = self._began + seconds
        while self.clock.monotonic() < self._began + seconds:
            self.node.sample()
            asked, plan = self.clock.monotonic(), self._clock
            for number in range(4):
                plan.at(asked + PATIENCE_S + number * (PATIENCE_S + POLL_S), 9, self._settle)
            self._poller.poll()
            plan.plan = [entry for entry in plan.plan if entry[1] != 9]
            took_s = self.clock.monotonic() - asked
            if self.clock.monotonic() >= self._clock.stops_at:
                return
            if took_s <= PATIENCE_S:
                self._settle()
                self.clock.advance(POLL_S)
            else:  # the next poll takes this answer, and asks again
                self.clock.advance((PATIENCE_S + POLL_S) - took_s % (PATIENCE_S + POLL_S))

    def _settle(self) -> None:
        found = self.node.state.on_poll(
            self._poller.grants(), self.node.placed(), is_complete=self._poller.has_all(), asked=self._poller.asked(),
            ended=self._poller.take_ended(), reported=self._poller.reported(),
        )  # fmt: skip
        self._poller.note_resolution(found.conflicts, found.unresolved, found.doubted, found.missed)
        asked, held = self._poller.asked() or 0.0, {allocation.unit for allocation, _ in found.allocations}
        for job in self._running.values():
            if self._poller.has_all() and self._began + job.begin < asked - 0.5:
                uuid = self.node.samplers[job.gpu].device.identity.uuid
                assert uuid in {unit.uuid for unit in held}, f"the GPU of job {job.number} is called free"

    def held(self) -> dict[str, float]:
        """GPU-seconds by user: u1 for job 1."""
        return {tenant.user: totals.held_s for tenant, totals in self.node.state.ledger.tenants.totals()}


def _gres(jobs: Sequence[Job]) -> str:
    """`jobs`: of one kind."""
    parts, kind = Counter[int](), jobs[0].kind
    for job in jobs:
        parts[job.gpu] += job.parts
    if kind == "whole":
        return f"gpu:h100:{len(parts)}(IDX:{','.join(map(str, sorted(parts)))})"
    return f"{kind}:h100:{parts.total()}({','.join(f'{parts[gpu]}/{PARTS}' for gpu in range(GPUS))})"
