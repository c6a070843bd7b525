"""Functions that serving and `--once` share to connect the rooms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.common.config.defaults import Settings

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.poller import Poller
    from gpu_exporter.agent.attribution.processes import ProcessOwners
    from gpu_exporter.agent.node.place import Placed
    from gpu_exporter.agent.node.state import NodeState
    from gpu_exporter.common.model.holders import Grant


def activity_rules(settings: Settings, driver_period_max_s: float = 1.0) -> ActivityRules:
    """The settings that sampling needs. `driver_period_max_s`: the driver's longest sample period (ActivityRules)."""
    ledger = settings.ledger
    return ActivityRules(
        interval_s=settings.sampling.interval,
        interval_max_s=settings.sampling.interval_max,
        gap_intervals=ledger.gap_intervals,
        power_floor_max_ratio=ledger.power_floor_max_ratio,
        power_active_step=ledger.power_active_step,
        driver_period_max_s=driver_period_max_s,
        gpm_idle_max_ratio=ledger.gpm_idle_max_ratio,
        gpm_sm_idle_max_ratio=ledger.gpm_sm_idle_max_ratio,
        pcie_idle_max_bytes_per_second=ledger.pcie_idle_max_bytes_per_second,
        nvlink_idle_max_bytes_per_second=ledger.nvlink_idle_max_bytes_per_second,
    )


def flatten_counts(errors: Counter[tuple[str, str]]) -> tuple[tuple[str, str, int], ...]:
    """(call, error, count), sorted."""
    return tuple((call, error, count) for (call, error), count in sorted(errors.items()))


def asks_slurm(sources: Iterable[Source]) -> bool:
    """Whether Slurm itself is a source here."""
    return any(source.name == "slurm" for source in sources)


def settle_poll(
    node: NodeState,
    poller: Poller,
    grants: Sequence[Grant],
    placed: Mapping[str, Placed],
    expected: int,
    processes: ProcessOwners | None,
) -> None:
    """Settle the holders after one poll of the sources, and report the result for each grant to the poller.

    `grants`: of that poll. `placed`, `expected`: the GPUs as they are shown, and how many should answer.
    """
    owners = processes.read([each.snapshot for each in placed.values()]) if processes is not None else None
    resolution = node.on_poll(
        grants,
        placed,
        owners,
        expected,
        is_complete=poller.has_all(),
        offers=poller.offers(),
        ended=poller.take_ended(),
    )
    poller.note_resolution(resolution.conflicts, resolution.unresolved, resolution.doubted)
