"""Simulates a node by a scenario: its GPUs (as a backend), its holders (as a source) and the holders' host data."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.attribution.static import CallbackSource, static_holder
from gpu_exporter.agent.devices.scenario import Scenario, ScenarioHolder
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedBackend
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Grant, Who, identify
from gpu_exporter.common.model.training import RankReport
from gpu_exporter.common.tasks import Task
from gpu_exporter.diagnosis.interface import TICK_S, HostNode, HostWorks, TrainingFiles


class Simulation(NamedTuple):
    """The parts of a simulated node."""

    backend: SimulatedBackend
    source: Source
    host: SimulatedHost


def build_simulation(scenario: Scenario, clock: Clock, sample_period_s: float = 0.2) -> Simulation:
    stage = ScenarioTime(scenario, clock, sample_period_s)

    def read_grants() -> Sequence[Grant]:
        return [_grant(holder) for holder in scenario.holders_at(stage.now())]

    return Simulation(SimulatedBackend(stage), CallbackSource("scenario", read_grants), SimulatedHost(stage))


class SimulatedHost:
    """Reports the host data of a scenario's holders. The work of the last minutes is unknown."""

    works: HostWorks | None = None

    def __init__(self, stage: ScenarioTime) -> None:
        self._stage = stage
        self._looked = stage.clock.monotonic()
        self.tasks = (Task("host"),)

    def run(self, stop: threading.Event, node: HostNode) -> None:
        while not stop.is_set():
            with self.tasks[0]:
                self.look(node)
            self._stage.clock.wait(stop, TICK_S)

    def look(self, node: HostNode) -> None:
        """Reports the host data of each holder that does not use its GPUs well, and of each training loop."""
        start, self._looked = self._looked, self._stage.clock.monotonic()
        holders = {_who(holder): holder for holder in self._stage.scenario.holders_at(self._stage.now())}
        for subject in node.list_subjects():
            holder = holders.get(subject.who)
            evidence = holder.evidence_at(self._stage.now()) if holder is not None else None
            if evidence is not None and self._looked > start:
                node.note(subject.who, evidence._replace(start=start, end=self._looked))
        now, reports = self._stage.now(), dict[Who, list[RankReport]]()
        for who, holder in ((_who(holder), holder) for holder in self._stage.scenario.holders_at(now)):
            if who is not None and (report := holder.report_at(now)) is not None:
                reports.setdefault(who, []).append(report)
        for who, found in reports.items():  # as the real reader finds them
            node.note_training(who, TrainingFiles(self._looked, tuple(found)))


def _who(holder: ScenarioHolder) -> Who | None:
    return identify(_grant(holder).holder)


def _grant(holder: ScenarioHolder) -> Grant:
    texts = {
        holder.kind: holder.name,
        "user": holder.user,
        "account": holder.account,
        "partition": holder.partition,
    }
    held = static_holder(texts, "scenario", "")
    if holder.kind == "pod" and (holder.host or holder.training):  # a host is found by the UID of its pod
        held = held._replace(pod_uid=str(uuid.uuid5(uuid.NAMESPACE_URL, holder.name)))
    return Grant("uuid", holder.unit.mig_uuid or holder.unit.uuid, held)
