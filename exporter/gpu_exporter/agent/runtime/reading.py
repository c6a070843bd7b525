"""Reads a node once, for `--once`. To save time, it asks the driver while Python still imports other modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gpu_exporter.agent.sampling.reader import Readers
from gpu_exporter.common.model.views import AllocationView, View

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.source import Source
    from gpu_exporter.agent.devices.protocol import Backend, Device
    from gpu_exporter.agent.runtime.surroundings import Host
    from gpu_exporter.agent.sampling.sampler import DeviceSampler
    from gpu_exporter.common.clock import Clock
    from gpu_exporter.common.config.defaults import Settings

TOO_NEW = "seen for only "  # begin of a text of judge_state
ONE_READING = "one reading: states need a running exporter with the same --state.directory"


def make_readers(
    settings: Settings, backend: Backend, clock: Clock, enabled: Collection[str], timeout_s: float
) -> Readers:
    """Returns readers of all GPUs. `enabled`: names of collectors. `timeout_s`: timeout of the whole reading."""

    def make_sampler(device: Device) -> DeviceSampler:
        from gpu_exporter.agent.collectors import registry
        from gpu_exporter.agent.runtime.wiring import activity_rules
        from gpu_exporter.agent.sampling.sampler import DeviceSampler

        chosen = [collector for collector in registry.ALL if collector.name in enabled]
        return DeviceSampler(device, chosen, clock, activity_rules(settings))

    return Readers(backend, enabled, clock, make_sampler, settings.sampling.interval, timeout_s)


def take_one_view(
    settings: Settings,
    backend: Backend,
    reading: Readers,
    sources: Sequence[Source],
    clock: Clock,
    host: Host | None = None,
) -> View:
    """Returns one view of the GPUs and sources that answer in time. `reading` may already have been started.

    One reading is too short to judge a state; the evidence of each state then asks for a running exporter. Raises
    DriverUnavailable if a GPU is expected.
    """
    reading.wait_open()
    # Loaded while the GPUs are read.
    from gpu_exporter.agent.runtime.runtime import HOST, Runtime

    view = Runtime(settings, backend, sources, clock, host=host or HOST).run_once(reading)
    return view._replace(allocations=tuple(map(_without_history, view.allocations)))


def _without_history(allocation: AllocationView) -> AllocationView:
    if not allocation.verdict.evidence.startswith(TOO_NEW):  # there is another reason
        return allocation
    return allocation._replace(verdict=allocation.verdict._replace(evidence=ONE_READING))
