"""Defines the input of the rules for causes: one allocation with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.model.causes import Cause
from gpu_exporter.common.model.evidence import HostEvidence, ProcessEvidence
from gpu_exporter.common.model.training import TrainingPace
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.causes.numbers import CauseRules

IDLE = frozenset(("held_idle", "held_no_process"))
WORKING = frozenset(("low", "bursty", "busy_inefficient"))
WITH_PROCESS = WORKING | {"held_idle"}
KNOWN_MIN = 0.5  # share of the looks in which a value must be known


class HostLook(NamedTuple):
    """One reading of a holder's host. `utilization`: mean of the holder's GPUs over the same time, None if unknown."""

    evidence: HostEvidence
    utilization: float | None = None


class HeldGpu(NamedTuple):
    """One whole GPU of the holder on this node.

    `label`: its index. `utilization`: mean over the window, None if unknown. `processes`: number of the holder's
    contexts on it, None if not proven. `idle_run_s`: length of the present idle run.
    """

    uuid: str
    label: str
    utilization: float | None = None
    processes: float | None = None
    idle_run_s: float | None = None
    spin: Spin | None = None


class CauseCase(NamedTuple):
    """One allocation with its evidence.

    `uuid`: UUID of the GPU. `held_s`: seconds since the holder got the GPU. `worked`: whether any GPU of the holder was
    ever busy, None if unknown. `members`: all GPUs of the holder on this node. `looks`: readings of the host, oldest
    first. `share`: this holder's share of the node's GPUs. `held`: the share of all holders together. `link`: PCIe
    bandwidth while the GPU works, as a share of the maximum, None while unknown. `link_text`: both bandwidths.
    `memory`: share of the GPU's memory in use, None while unknown. `training`: the report of the holder's training
    loop, None without a report.
    """

    state: str
    uuid: str
    held_s: float
    worked: bool | None
    idle_run_s: float | None = None
    mean: float | None = None
    processes: float | None = None
    spin: Spin | None = None
    members: tuple[HeldGpu, ...] = ()
    looks: tuple[HostLook, ...] = ()
    share: float = 1.0
    held: float = 1.0
    link: float | None = None
    link_text: str = ""
    memory: float | None = None
    training: TrainingPace | None = None
    rules: CauseRules = CauseRules()

    @property
    def recent(self) -> Sequence[HostEvidence]:
        """The readings of the host in the last `rules.window` seconds.

        At least the last `rules.looks_min` readings, even if they are older; empty if fewer exist.
        """
        if not self.looks:
            return ()
        since = self.looks[-1].evidence.end - self.rules.window
        found = [look.evidence for look in self.looks if look.evidence.end > since]
        if len(found) < self.rules.looks_min:  # on a crowded node, looks are rare
            found = [look.evidence for look in self.looks[-self.rules.looks_min :]]
        return found if len(found) >= self.rules.looks_min else ()

    @property
    def seen(self) -> Sequence[ProcessEvidence]:
        """The processes that the recent looks have shown."""
        return [each.processes for each in self.recent if each.processes is not None]

    def average(self, read: Callable[[HostEvidence], float | None]) -> float | None:
        """Returns the mean of a value over the recent readings of the host. None if too few of them contain it."""
        return _average([read(each) for each in self.recent])

    def average_processes(self, read: Callable[[ProcessEvidence], float | None]) -> float | None:
        """Returns the mean of a value of the processes over the recent readings. None if too few of them contain it."""
        return _average([None if each.processes is None else read(each.processes) for each in self.recent])

    @property
    def limit(self) -> float | None:
        """The number of CPUs that the holder's own limits allow. None if it may use all CPUs of the host."""
        newest = self.recent[-1]
        found = min((each for each in (newest.cpus, newest.quota) if each is not None), default=None)
        return None if found is None or (newest.host_cpus is not None and found >= newest.host_cpus) else found

    @property
    def bound(self) -> float | None:
        """The number of CPUs on which the holder's processes may run. None if unknown, or if they may use all CPUs.

        Slurm without cgroups binds jobs in this way, perhaps several jobs to the same CPUs.
        """
        newest = self.recent[-1]
        found = None if newest.processes is None else newest.processes.cpus
        return None if found is None or (newest.host_cpus is not None and found >= newest.host_cpus) else float(found)

    @property
    def has_loaders(self) -> bool:
        """Whether the holder has processes with PyTorch's name for data loaders. If not, CPU use identifies them."""
        return any(each.named_loaders for each in self.seen)

    @property
    def runnable(self) -> float | None:
        """The mean number of threads that run or wait for a CPU."""
        return self.average_processes(lambda each: float(each.runnable))

    @property
    def throttled(self) -> float | None:
        """The mean share of periods in which the CPU quota ran out."""
        return self.average(lambda each: each.throttled)


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) >= KNOWN_MIN * len(values) else None


class Needs(NamedTuple):
    """The answer of a rule without enough evidence. `text`: the missing evidence."""

    text: str


HOST = Needs("the holder's cgroup: mount /sys/fs/cgroup (--path.cgroup)")
PROCESSES = Needs("the host's processes: hostPID, or the host's /proc (--path.procfs)")
MORE = Needs("more readings of its host, which take a few minutes, or longer on a crowded node")


def need(case: CauseCase) -> Needs:
    """Returns the missing evidence if there are too few looks at the host, or looks without processes."""
    if not case.looks:
        return HOST if case.held_s > case.rules.window else MORE
    return PROCESSES if case.recent and not case.seen else MORE


class Rule(NamedTuple):
    """The rule for the cause that has the name of its module.

    `states`: the states in which the rule applies. `judge`: returns the cause, the missing evidence, or None if the
    cause does not apply. `needs`, `against`: texts for the documentation, about the evidence and the reasons for a
    lower confidence.
    """

    states: frozenset[str]
    judge: Callable[[CauseCase], Cause | Needs | None]
    needs: str
    against: str


def rule(
    states: frozenset[str], needs: str, against: str = ""
) -> Callable[[Callable[[CauseCase], Cause | Needs | None]], Rule]:
    """Makes a function the `judge` of a rule. The parameters are as in Rule."""
    return lambda judge: Rule(states, judge, needs, against)
