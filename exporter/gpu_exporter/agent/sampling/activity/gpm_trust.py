"""Decides whether zeros of GPM are credible. Other witnesses that show work contradict them.

- If GPM reads 0 while utilization, power or another witness of the board shows work, the reading is withheld: its
  ratios are not published, and its time does not count as idle.
- The instances of a board share its power. If the board works but no instance shows work, the zeros of all its
  instances are withheld.
- After CONFIRM such readings in a row, the contradiction is counted and logged. From then on, GPM is withheld until it
  shows work again. After REOPEN_S, the driver's GPM window is opened again.
- A shorter contradiction is normal when work begins or ends, because the witnesses are read at slightly different
  times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpu_exporter.agent.collectors.contract import Cycle, InstanceCycle
from gpu_exporter.agent.collectors.gpm import GPM
from gpu_exporter.agent.collectors.mig import RATIOS as INSTANCE_RATIOS
from gpu_exporter.agent.devices.protocol import ENGINES, Gpm
from gpu_exporter.agent.sampling.activity.driver_ring import UNWATCHED_MAX_S
from gpu_exporter.agent.sampling.activity.witnesses import (
    GPM_NAMES,
    QUIET,
    UNKNOWN,
    ActivityRules,
    Observation,
    active_names,
)
from gpu_exporter.common.model.readings import UTILIZATION

log = logging.getLogger(__name__)
CONTRADICTED = ("nvmlGpmMetricsGet", "CONTRADICTED")
CONFIRM = 3  # windows in a row: utilization and power may cover time before a window, up to a period and a second
REOPEN_S = 60.0
APART_MAX_S = 0.3  # power that was read longer than this before the end of a cycle is no evidence on its GPM windows
BOARD = ""
BOARD_FAMILIES = frozenset(family.name for family in GPM.families)
INSTANCE_FAMILIES = frozenset(family.name for family in INSTANCE_RATIOS.values())


@dataclass(slots=True)
class _Doubt:
    """The contradictions of one board or instance. `windows`: their number in a row. `since`: their confirmation."""

    windows: int = 0
    since: float | None = None


class GpmTrust:
    """Reviews the GPM readings of one board and its instances in each cycle."""

    def __init__(self, rules: ActivityRules) -> None:
        self._rules = rules
        self._doubts: dict[str, _Doubt] = {}
        self._stuck_since: dict[str, float] = {}
        self._power_at: float | None = None  # when power was last read
        self._unexplained_at: float | None = None  # when the board (possibly) worked, but no instance showed work

    def review(self, cycle: Cycle, seen: dict[str, Observation], now: float) -> None:
        """Removes GPM readings that are not credible from `cycle` and `seen`. `seen`: observations by witness."""
        self._review_stuck(cycle, now)
        power = seen.get("power", UNKNOWN)
        if power is not UNKNOWN:
            self._power_at = now
        # Power was read recently, but is missing now: it might have contradicted GPM. MIG has no other such witness.
        is_late = cycle.begin is not None and now - cycle.begin > APART_MAX_S
        expected = self._power_at is not None and now - self._power_at < REOPEN_S
        power_missing = expected and (power is UNKNOWN or (power is QUIET and is_late))
        if cycle.instances or not cycle.instances_known:
            self._review_instances(cycle, seen, now, power_missing)
        gpm = cycle.gpm
        if gpm is not None and gpm.graphics is not None:
            against = _work(cycle, seen, gpm) if _reads_zero(gpm) else []
            is_unsure = power_missing and cycle.utilization is None and not cycle.driver_samples and _reads_zero(gpm)
            if self._is_withheld(cycle, BOARD, _reads_zero(gpm), against, now) or is_unsure:
                cycle.samples = [sample for sample in cycle.samples if sample.family.name not in BOARD_FAMILIES]
                cycle.gpm = None
                cycle.witness_missing = True
                for name in GPM_NAMES:
                    seen.pop(name, None)
        if (self._doubts or self._stuck_since) and cycle.instances_known:
            present = {BOARD, *(instance.uuid for instance in cycle.instances)}
            self._doubts = {subject: doubt for subject, doubt in self._doubts.items() if subject in present}
            self._stuck_since = {subject: since for subject, since in self._stuck_since.items() if subject in present}

    def _review_stuck(self, cycle: Cycle, now: float) -> None:
        """Logs GPM readings whose cycle counters do not grow, and tries GPM again every REOPEN_S.

        The collector has already dropped their values.
        """
        for subject in cycle.gpm_stuck:
            since = self._stuck_since.get(subject)
            if since is None:
                self._stuck_since[subject] = now
                log.warning(
                    "gpu %d%s: the cycle counters of GPM do not move: the exporter publishes no GPM series, and does "
                    "not know the activity; it tries GPM again every %.0f s",
                    cycle.device.identity.index,
                    f" {subject}" if subject else "",
                    REOPEN_S,
                )
            elif now - since >= REOPEN_S:
                self._stuck_since[subject] = now
                cycle.device.reopen_gpm(subject)
        if len(self._stuck_since) > len(cycle.gpm_stuck):
            read = {instance.uuid for instance in cycle.instances if instance.gpm is not None}
            read |= {BOARD} if cycle.gpm is not None else set()
            for subject in [s for s in self._stuck_since if s in read and s not in cycle.gpm_stuck]:
                del self._stuck_since[subject]

    def _review_instances(self, cycle: Cycle, seen: Mapping[str, Observation], now: float, power_missing: bool) -> None:
        readings = [instance.gpm for instance in cycle.instances]
        works = any(gpm is not None and _shows_work(gpm, self._rules) for gpm in readings)
        active = () if works else active_names(seen)
        names = [name for name in active if name == "power" or name in GPM_NAMES]
        if all(gpm is not None and _is_dead(gpm) for gpm in readings):
            names = list(active)
        # The board works, but no instance shows work. An instance that could not be read may do the work.
        all_read = all(gpm is not None and gpm.graphics is not None for gpm in readings)
        # A window that begins before unexplained work of the board ended is not quiet either.
        before, self._unexplained_at = self._unexplained_at, now if names or power_missing else self._unexplained_at
        reviewed: list[InstanceCycle] = []
        for instance in cycle.instances:
            gpm = instance.gpm
            if gpm is None or gpm.graphics is None:
                reviewed.append(instance)
            elif names and not all_read:
                reviewed.append(instance._replace(gpm=gpm._replace(missing=True)))
            elif self._is_withheld(cycle, instance.uuid, _reads_zero(gpm), names, now) or (
                _reads_zero(gpm)
                and not works
                and (power_missing or (before is not None and instance.gpm_at - gpm.span_s < before - UNWATCHED_MAX_S))
            ):
                samples = tuple(s for s in instance.samples if s.family.name not in INSTANCE_FAMILIES)
                reviewed.append(instance._replace(gpm=Gpm(gpm.span_s, missing=True), samples=samples))
            else:
                reviewed.append(instance)
        cycle.instances = reviewed

    def _is_withheld(self, cycle: Cycle, subject: str, is_zero: bool, against: Iterable[str], now: float) -> bool:
        """Returns whether this window is withheld. Counts and logs contradictions, and opens GPM again."""
        names = sorted(set(against)) if is_zero else []
        doubt = self._doubts.get(subject)
        if not is_zero or (doubt is None and not names):
            if doubt is not None:
                del self._doubts[subject]
            return False
        if doubt is None:
            doubt = self._doubts[subject] = _Doubt()
        if doubt.since is not None and now - doubt.since >= REOPEN_S:
            cycle.device.reopen_gpm(subject)
            del self._doubts[subject]
            return True
        if not names:
            if doubt.since is None:
                del self._doubts[subject]
            return doubt.since is not None
        doubt.windows += 1
        if doubt.windows < CONFIRM:
            return True
        cycle.remarks.append(CONTRADICTED)
        if doubt.since is None:
            doubt.since = now
            log.warning(
                "gpu %d%s: GPM reads 0 while %s shows work: the exporter publishes no GPM series and counts no idle "
                "time; it tries GPM again in %.0f s",
                cycle.device.identity.index,
                f" {subject}" if subject else "",
                ", ".join(names),
                REOPEN_S,
            )
        return True


def _reads_zero(gpm: Gpm) -> bool:
    return gpm.graphics == 0.0 and not gpm.sm


def _is_dead(gpm: Gpm) -> bool:
    """Returns whether all values are 0. If GPM works, at least some traffic is above 0."""
    rest = (gpm.occupancy, gpm.tensor, gpm.dram, gpm.pcie, gpm.nvlink, gpm.engines)
    return _reads_zero(gpm) and not any(rest)


def _shows_work(gpm: Gpm, rules: ActivityRules) -> bool:
    ratios = (gpm.graphics, gpm.sm, gpm.tensor, gpm.dram, gpm.engines)
    return any(ratio is not None and ratio > rules.gpm_idle_max_ratio for ratio in ratios)


def _work(cycle: Cycle, seen: Mapping[str, Observation], gpm: Gpm) -> list[str]:
    """Returns the witnesses of a board that show work while GPM reads 0.

    Utilization and power show kernels, which GPM must report. Engines and links also work without kernels. They
    contradict GPM only if all of its values are 0; a link must also be among the values of GPM.
    """
    active = active_names(seen)
    names = [name for name in ("power",) if name in active]
    if cycle.utilization or any(0.0 < sample.ratio <= 1.0 for sample in cycle.driver_samples):
        names.append(UTILIZATION)
    if _is_dead(gpm):
        names += [name for name in active if name in ENGINES]
        names += [name for name in active if name in ("pcie", "nvlink") and getattr(gpm, name) is not None]
    return names
