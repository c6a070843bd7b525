"""What the rules for causes know about one allocation."""

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
    """One look at the holder's host. `utilization`: mean of its GPUs on this node in that time, None if unknown."""

    evidence: HostEvidence
    utilization: float | None = None


class HeldGpu(NamedTuple):
    """One whole GPU of the holder on this node. `label`: its index. `utilization`: mean over the window, None if
    unknown. `processes`: the holder's contexts on it, None while unproven. `idle_run_s`: as in Window.
    """

    uuid: str
    label: str
    utilization: float | None = None
    processes: float | None = None
    idle_run_s: float | None = None
    spin: Spin | None = None


class CauseCase(NamedTuple):
    """One allocation. `uuid`: its GPU. `held_s`: how long it is held. `worked`: a GPU of the holder was busy at some
    time, None if that is not known. `members`: all GPUs of the holder on this node. `looks`: oldest first. `share`: of
    the node's GPUs that it holds, `held`: that anybody holds. `link`: share of the PCIe link's bandwidth that the GPU
    has while it works, `link_text` the two bandwidths; None while unknown. `memory`: share of the GPU's memory in use,
    None while unknown. `training`: what the holder's training loop says of itself, None if it says nothing.
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
        """The looks of the last `window` of the rules; empty if they are too few to judge."""
        if not self.looks:
            return ()
        since = self.looks[-1].evidence.end - self.rules.window
        found = [look.evidence for look in self.looks if look.evidence.end > since]
        if len(found) < self.rules.looks_min:  # on a crowded node, looks are rare
            found = [look.evidence for look in self.looks[-self.rules.looks_min :]]
        return found if len(found) >= self.rules.looks_min else ()

    @property
    def seen(self) -> Sequence[ProcessEvidence]:
        """The processes in the recent looks."""
        return [each.processes for each in self.recent if each.processes is not None]

    def average(self, read: Callable[[HostEvidence], float | None]) -> float | None:
        """The mean of a value over the recent looks, None if it is known in too few of them."""
        return _average([read(each) for each in self.recent])

    def average_processes(self, read: Callable[[ProcessEvidence], float | None]) -> float | None:
        """The same for a value of the processes."""
        return _average([None if each.processes is None else read(each.processes) for each in self.recent])

    @property
    def limit(self) -> float | None:
        """CPUs that the holder may use by its own limits; None without a limit, which is also one of all CPUs."""
        newest = self.recent[-1]
        found = min((each for each in (newest.cpus, newest.quota) if each is not None), default=None)
        return None if found is None or (newest.host_cpus is not None and found >= newest.host_cpus) else found

    @property
    def bound(self) -> float | None:
        """CPUs to which its processes are bound, together, None if to none or if that is not known. So Slurm divides a
        node that confines no job by cgroups. The CPUs may be those of others too, so they are no entitlement.
        """
        newest = self.recent[-1]
        found = None if newest.processes is None else newest.processes.cpus
        return None if found is None or (newest.host_cpus is not None and found >= newest.host_cpus) else float(found)

    @property
    def has_loaders(self) -> bool:
        """Whether PyTorch names processes of the holder as loaders; others are known only by their work."""
        return any(each.named_loaders for each in self.seen)

    @property
    def runnable(self) -> float | None:
        """Threads that run or wait for a CPU, mean."""
        return self.average_processes(lambda each: float(each.runnable))

    @property
    def throttled(self) -> float | None:
        """Share of the periods in which the quota ran out, mean."""
        return self.average(lambda each: each.throttled)


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) >= KNOWN_MIN * len(values) else None


class Needs(NamedTuple):
    """A rule could not be judged. `text`: what would have to be known."""

    text: str


HOST = Needs("the holder's cgroup: mount /sys/fs/cgroup (--path.cgroup)")
PROCESSES = Needs("the host's processes: hostPID, or the host's /proc (--path.procfs)")
MORE = Needs("more looks at its host: a few minutes, or longer on a crowded node")


def need(case: CauseCase) -> Needs:
    """Why there are too few looks, or looks without processes."""
    if not case.looks:
        return HOST if case.held_s > case.rules.window else MORE
    return PROCESSES if case.recent and not case.seen else MORE


class Rule(NamedTuple):
    """One cause. `states`: in which it is looked for. `judge` returns the cause, what it needs, or None. For the
    documentation, `needs` is the evidence, and `against` is what lowers the confidence.
    """

    name: str
    states: frozenset[str]
    judge: Callable[[CauseCase], Cause | Needs | None]
    needs: str
    against: str
