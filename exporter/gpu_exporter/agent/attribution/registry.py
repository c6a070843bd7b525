"""Lists the sources of holders, in order of precedence.

A source is loaded only if a flag requests it, or if the exporter detects it on the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import PastEnds
from gpu_exporter.common.vendor import Vendor

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.kubelet.alive import FindPods
    from gpu_exporter.common.address import Address

COLLECTED_EACH_S = 15.0  # reading a collector's answer costs slurmctld nothing


class SourceOptions(NamedTuple):
    """The administrator's choices.

    - `kubelet`, `slurm`: None to detect them on this host.
    - `resources`: regular expressions for names of further resources that are GPUs.
    - `timeout_s`: timeout of one request.
    - `empty_confirm_s`: an empty answer of the kubelet counts after this time.
    - `slurm_interval_s`: shortest interval between requests to slurmctld if no job changes.
    - `slurm_collected`: address or directory of a collector.
    - `procfs`: the host's /proc.
    - `monitors`: NAMESPACE/POD of further pods whose resource claims only watch a device.
    - `reservations`: further namespaces whose pods only reserve GPUs for fractions.
    - `claims`: folder of the DRA driver's kubelet plugin, None to ignore it.
    - `pod_uid`: UID of the exporter's own pod, "" to read it from the cgroup.
    - `find_pods`: finds the cgroups of pods (alive.py), None if the host's cgroups are not visible.
    - `state`: directory for state that survives a restart, None to keep no state.
    - `keeps_state`: the exporter also writes to `state`.
    - `list_running`, `list_inside`: as in PodLives.
    - `recall`: as in SlurmOptions.
    """

    timeout_s: float
    empty_confirm_s: float
    static: Path | None
    kubelet: bool | None
    kubelet_socket: Path
    kubelet_logs: Path
    resources: Sequence[str]
    slurm: bool | None
    slurm_node: str
    slurm_gres_conf: Path | None
    slurm_interval_s: float
    slurm_job_files: Path | None
    slurm_collected: Address | Path | None
    procfs: Path
    monitors: Sequence[str]
    reservations: Sequence[str]
    claims: Path | None
    pod_uid: str
    find_pods: FindPods | None
    state: Path | None
    keeps_state: bool
    list_running: Callable[[], Set[str] | None] = lambda: None
    list_inside: Callable[[PurePosixPath], Set[str] | None] = lambda folder: None
    recall: Callable[[], PastEnds | None] | None = None


def find_sources(options: SourceOptions, clock: Clock, vendor: Vendor) -> list[Source]:
    """Returns the sources to ask, highest precedence first. Raises ValueError for invalid options."""
    found = (make(options, clock, vendor) for make in REGISTRY)
    return [source for source in found if source is not None]


def _make_static(options: SourceOptions, clock: Clock, vendor: Vendor) -> Source | None:
    if options.static is None:
        return None
    from gpu_exporter.agent.attribution.static import StaticSource

    return StaticSource(options.static)


def _make_kubelet(options: SourceOptions, clock: Clock, vendor: Vendor) -> Source | None:
    if not _is_wanted(options.kubelet, options.kubelet_socket.parent.is_dir):
        return None
    from gpu_exporter.agent.attribution.kubelet.alive import PodLives, find_own_pod
    from gpu_exporter.agent.attribution.kubelet.consumers import Consumers, check_namespace, parse_monitor
    from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource

    monitors = [parse_monitor(text) for text in (*vendor.monitors, *options.monitors)]
    lives = None
    if options.find_pods is not None:
        own = options.pod_uid or find_own_pod()
        lives = PodLives(options.find_pods, own, options.list_running, options.list_inside)
    return KubeletSource(
        clock,
        KubeletOptions(
            socket=options.kubelet_socket,
            logs=options.kubelet_logs,
            timeout_s=options.timeout_s,
            empty_confirm_s=options.empty_confirm_s,
            resources=options.resources,
            reservations=[check_namespace(name) for name in options.reservations],
            boot_wall=clock.wall() - time.clock_gettime(time.CLOCK_BOOTTIME),
        ),
        vendor=vendor,
        consumers=Consumers(monitors, options.claims),
        lives=lives,
    )


def _make_slurm(options: SourceOptions, clock: Clock, vendor: Vendor) -> Source | None:
    if not _is_wanted(options.slurm, is_slurm_node):
        return None
    from gpu_exporter.agent.attribution.slurm.pace import Pace
    from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource

    return SlurmSource(
        SlurmOptions(
            node=options.slurm_node,
            timeout_s=options.timeout_s,
            gres_conf=options.slurm_gres_conf,
            procfs=options.procfs,
            job_files=options.slurm_job_files,
            collected=options.slurm_collected,
            state=options.state,
            keeps_state=options.keeps_state,
            recall=options.recall,
        ),
        clock=clock,
        vendor=vendor,
        pace=Pace(options.slurm_interval_s if options.slurm_collected is None else COLLECTED_EACH_S),
    )


# The administrator's own list takes precedence over a scheduler.
REGISTRY: tuple[Callable[[SourceOptions, Clock, Vendor], Source | None], ...] = (
    _make_static,
    _make_kubelet,
    _make_slurm,
)


def _is_wanted(chosen: bool | None, is_present: Callable[[], bool]) -> bool:
    return is_present() if chosen is None else chosen


def is_slurm_node(procfs: Path = Path("/proc")) -> bool:
    """Returns whether this host belongs to a Slurm cluster: it has a Slurm configuration, or a slurmd is visible."""
    places = (os.environ.get("SLURM_CONF", ""), "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
    return any(place and Path(place).is_file() for place in places) or runs_slurmd(procfs)


def runs_slurmd(procfs: Path) -> bool:
    for entry in procfs.glob("[0-9]*/comm"):
        try:
            if entry.read_text("ascii", "replace").strip() == "slurmd":
                return True
        except OSError:  # the process has ended
            continue
    return False
