"""One cycle over all GPUs and sources, for `--once`. Each GPU has its own thread, so a hanging GPU delays no other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.devices.protocol import Backend, Device
from gpu_exporter.agent.sampling.reader import Reader, Readers
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.views import AgentStatus, View
from gpu_exporter.common.threads import start
from gpu_exporter.common.vendor import Vendor
from gpu_exporter.common.version import VERSION

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.poller import Poller
    from gpu_exporter.agent.attribution.processes import ProcessOwners
    from gpu_exporter.agent.attribution.source import Source
    from gpu_exporter.agent.inventory.inventory import Inventory
    from gpu_exporter.agent.node.state import NodeState
    from gpu_exporter.agent.sampling.sampler import DeviceSampler

PATIENCE = 0.8  # share of the time limit for the GPUs; the rest is for the view of the GPUs that answered


def _status_without_driver(
    reason: DriverUnavailable, settings: Settings, backend: Backend, around: NodePlaces
) -> AgentStatus:
    """The status of this node while the driver does not answer: which GPUs should be here."""
    inventory = _read_inventory(backend.vendor, around)
    return AgentStatus(
        version=VERSION,
        backend=backend.name,
        driver_up=False,
        driver_error=str(reason),
        devices_visible=0,
        devices_expected=inventory.count(()),
        sample_interval_s=settings.sampling.interval,
        last_sample_wall=None,
        unmanaged=inventory.unmanaged(),
        driver_missed=not reason.absent,
    )


def _read_inventory(vendor: Vendor, around: NodePlaces) -> Inventory:
    """The list of GPUs that should be here."""
    from gpu_exporter.agent.inventory.expected import ExpectedDevices
    from gpu_exporter.agent.inventory.inventory import InventoryKeeper
    from gpu_exporter.agent.ledger.state import read_boot_id

    boot_id = read_boot_id()
    keeper = InventoryKeeper(ExpectedDevices(around.state_directory, boot_id), around.sysfs, vendor, boot_id)
    keeper.look()
    return keeper.value


def make_readers(settings: Settings, backend: Backend, clock: Clock, enabled: Collection[str]) -> Readers:
    """Readers of all GPUs; `enabled`: names of collectors."""

    def make_sampler(device: Device) -> DeviceSampler:
        from gpu_exporter.agent.collectors import registry
        from gpu_exporter.agent.runtime.wiring import activity_rules
        from gpu_exporter.agent.sampling.sampler import DeviceSampler

        chosen = [collector for collector in registry.ALL if collector.name in enabled]
        return DeviceSampler(device, chosen, clock, activity_rules(settings))

    return Readers(backend, enabled, clock, make_sampler)


class NodePlaces(NamedTuple):
    """The places that one view reads beside the GPUs. `state_directory`: None if no state is kept. `sysfs`,
    `processes`: as in Host of the agent.
    """

    state_directory: Path | None = None
    sysfs: Path | None = None
    processes: ProcessOwners | None = None


ALONE = NodePlaces()


def take_one_view(
    settings: Settings,
    backend: Backend,
    reading: Readers,
    sources: Sequence[Source],
    clock: Clock,
    timeout_s: float,
    around: NodePlaces = ALONE,
) -> View:
    """One view of the GPUs and sources that answer well within `timeout_s`. The view is empty on a node without GPUs.

    `reading` may have been started already. Raises DriverUnavailable if a GPU is expected.
    """
    deadline = clock.monotonic() + PATIENCE * timeout_s
    too_late = f"the driver did not answer within {timeout_s:g} s"
    try:
        readers = reading.take(deadline)
    except DriverUnavailable as exc:
        status = _status_without_driver(exc, settings, backend, around)
        if status.expects_gpus:
            raise
        return View(clock.wall(), status, (), ())
    if readers is None:
        raise DriverUnavailable(too_late)
    # Loaded while the GPUs are read.
    from gpu_exporter.agent.attribution.identity import Identity
    from gpu_exporter.agent.attribution.poller import Poller
    from gpu_exporter.agent.node.place import count_answering, count_expected, place
    from gpu_exporter.agent.node.state import NodeState
    from gpu_exporter.agent.runtime.wiring import asks_slurm, settle_poll
    from gpu_exporter.agent.sampling.driver import DriverView, Position
    from gpu_exporter.diagnosis.loop import DiagnosisLoop

    identity = Identity(settings.identity.user, around.state_directory)
    poller = Poller(sources, clock, settings.attribution.keep_last, identity)
    asking = threading.Thread(target=poller.poll, name="attribution", daemon=True)
    start(asking)
    inventory = _read_inventory(backend.vendor, around)
    ended = [reader.join(deadline) for reader in readers]
    found = (Position(reader.identity, reader.snapshot, reader.is_hung, reader.error) for reader in readers)
    driver = DriverView(dict(enumerate(found)))
    if not all(ended) and not count_answering(driver):
        raise DriverUnavailable(too_late)
    node = NodeState(settings, clock, processes=around.processes, asks_slurm=asks_slurm(sources))
    for reader in readers:
        if reader.snapshot is not None:
            node.on_snapshot(reader.snapshot)
    asking.join(max(0.0, deadline - clock.monotonic()))
    placed = place(driver, inventory, node.known(), clock.monotonic(), clock.wall())
    expected = count_expected(driver, inventory)
    # The status names a source that has not answered yet.
    settle_poll(node, poller, poller.grants(), placed, expected, around.processes)
    status = _describe(settings, backend, readers, poller, node, inventory, count_answering(driver), expected)
    diagnosis = DiagnosisLoop(settings, lambda: node.evidence(placed), clock)
    diagnosis.judge()
    view = node.view(placed, status, diagnosis.findings)
    if all(ended):
        backend.close()
    return view


def _describe(
    settings: Settings,
    backend: Backend,
    readers: Sequence[Reader],
    poller: Poller,
    node: NodeState,
    inventory: Inventory,
    visible: int,
    expected: int,
) -> AgentStatus:
    """The status of this reading."""
    from gpu_exporter.agent.runtime.wiring import flatten_counts
    from gpu_exporter.agent.sampling.driver import warn_of_persistence

    errors: Counter[tuple[str, str]] = Counter()
    for reader in readers:
        errors.update(reader.errors)
    return AgentStatus(
        version=VERSION,
        backend=backend.name,
        driver_up=True,
        driver_error="",
        devices_visible=visible,
        devices_expected=expected,
        sample_interval_s=settings.sampling.interval,
        last_sample_wall=node.last_sample_wall(),
        sources=poller.statuses(),
        attribution_known=poller.is_known() and node.is_resolved(),
        errors=flatten_counts(errors),
        warnings=(*warn_of_persistence(sum(reader.persistence_off for reader in readers)), *poller.warnings()),
        unmanaged=inventory.unmanaged(),
    )
