"""Reads a node once, for `--once`. To save time, it asks the driver while Python still imports other modules."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gpu_exporter.agent.sampling.reader import Readers
from gpu_exporter.common.model.views import AllocationView, View

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.source import Source
    from gpu_exporter.agent.devices.protocol import Backend, Device
    from gpu_exporter.agent.ledger.state import StateFile
    from gpu_exporter.agent.runtime.surroundings import Host
    from gpu_exporter.agent.sampling.sampler import DeviceSampler
    from gpu_exporter.common.clock import Clock
    from gpu_exporter.common.config.defaults import Settings

log = logging.getLogger(__name__)
TOO_SHORT = ("seen for only ", "no source of activity", "only ")  # begins of texts of judge_state
ONE_READING = "this is one reading: for states, run the exporter with the same --state.directory"


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
    state: StateFile | None = None,
) -> View:
    """Returns one view of the GPUs and sources that answer in time. `reading` may already have been started.

    One reading is too short to judge a state, so each state is unknown, and its evidence advises to run the exporter.
    With `state`, the counters continue, and the file remains locked until this process ends: an older view must not
    replace the output of a later reading. Raises DriverUnavailable if a GPU is expected, and StateInUse.
    """
    reading.wait_open()
    # Loaded while the GPUs are read.
    from gpu_exporter.agent.runtime.runtime import HOST, Runtime

    if state is not None:
        try:
            state.acquire()
        except OSError as exc:
            log.warning("%s: %s; the counters start at 0", state.path.parent, exc.strerror)
            state = None
    runtime = Runtime(settings, backend, sources, clock, state, host=host or HOST)
    runtime.node.restore()
    view = runtime.run_once(reading)
    return view._replace(allocations=tuple(map(_without_history, view.allocations)))


def _without_history(allocation: AllocationView) -> AllocationView:
    if not allocation.verdict.evidence.startswith(TOO_SHORT):  # there is another reason
        return allocation
    return allocation._replace(verdict=allocation.verdict._replace(evidence=ONE_READING))
