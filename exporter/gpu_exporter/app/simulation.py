"""A scenario as a node: its GPUs are the backend, its holders are the attribution source."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.attribution.source import Source
from gpu_exporter.attribution.static import CallbackSource, static_holder
from gpu_exporter.clock import Clock
from gpu_exporter.devices.scenario import Scenario, ScenarioHolder
from gpu_exporter.devices.simulated import ScenarioTime, SimulatedBackend
from gpu_exporter.model.holders import Grant


def build_simulation(scenario: Scenario, clock: Clock, sample_period_s: float = 0.2) -> tuple[SimulatedBackend, Source]:
    """The backend and the source of one scenario, on one clock."""
    stage = ScenarioTime(scenario, clock, sample_period_s)

    def read_grants() -> Sequence[Grant]:
        return [_grant(holder) for holder in scenario.holders_at(stage.now())]

    return SimulatedBackend(stage), CallbackSource("scenario", read_grants)


def _grant(holder: ScenarioHolder) -> Grant:
    texts = {
        holder.kind: holder.name,
        "user": holder.user,
        "account": holder.account,
        "partition": holder.partition,
    }
    return Grant("uuid", holder.unit.mig_uuid or holder.unit.uuid, static_holder(texts, "scenario", ""))
