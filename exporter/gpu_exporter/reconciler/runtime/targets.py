"""Builds from the flags the source of evidence, and the markers that read and mark pods and jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, ManualClock
from gpu_exporter.common.config.defaults import Alerts, Policy
from gpu_exporter.common.promql.absence import Absence, FindMonitors
from gpu_exporter.common.promql.client import Client
from gpu_exporter.common.vendor import gpu_resources
from gpu_exporter.reconciler.decision.policy import HOST_HOLD_S
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.exporters import ExporterSource
from gpu_exporter.reconciler.evidence.pause_expression import Pauses
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import ExplainingSource, HostLimits
from gpu_exporter.reconciler.marks import Marker, MarkError
from gpu_exporter.reconciler.pause import PauseFile, PausePlace
from gpu_exporter.reconciler.preview import Preview
from gpu_exporter.reconciler.slurm.demand import SlurmDemand
from gpu_exporter.reconciler.slurm.marker import JobMarker, run_slurm
from gpu_exporter.reconciler.texts import TextFiles, TextPlace

if TYPE_CHECKING:
    from gpu_exporter.reconciler.kubernetes.client.lease import Lease


def build_source(
    prometheus: Address | None,
    exporters: Sequence[Address],
    matcher: str,
    book: Rulebook,
    client: Client,
    at: float | None = None,
    find_monitors: FindMonitors | None = None,
) -> ExplainingSource:
    """Builds the source of evidence: the PromQL API if its address is given, otherwise the exporters. `at`: a past time
    (Unix seconds). `find_monitors`: called if Prometheus has no target; None without a cluster. Raises ValueError.
    """
    if (prometheus is not None) == bool(exporters):
        raise ValueError("give either --source.prometheus or --source.exporter")
    site = book.site
    kept_s = max(HOST_HOLD_S, site.host_delay_max - book.loosest.underused_after)
    host = HostLimits(site.host_busy_ratio, site.host_busy_io, kept_s) if site.host_delay_max else None
    if prometheus is not None:
        clock = SYSTEM_CLOCK if at is None else ManualClock(wall=at)
        options = PromQLOptions(
            prometheus,
            book.loosest.candidate_after,
            site.underused_after,
            matcher,
            asks_models=book.asks_models,
            host=host,
            at=at,
        )
        peaks = Peaks(site.sharing_below, site.sharing_window, clock) if at is None else None
        return PromQLSource(options, clock, client, Pauses(site.pause_when, book.longest_s), peaks, find_monitors)
    if at is not None:
        raise ValueError("--at needs --source.prometheus: an exporter keeps no past values")
    if book.site.pause_when:
        raise ValueError("policy.pause_when is PromQL: it needs --source.prometheus")
    return ExporterSource(exporters, site.underused_after, SYSTEM_CLOCK, client, host=host)


class Targets(NamedTuple):
    """The schedulers whose pods and jobs are read and marked. None: use Kubernetes or Slurm if this host has it.

    `resources`: regular expressions for additional pod resources whose devices are GPUs. `condition`: whether pods get
    a condition in addition to their label. `field`: the field of a job that contains marks, as --slurm.field.
    """

    kubernetes: bool | None = None
    kubeconfig: str = ""
    slurm: bool | None = None
    resources: Sequence[str] = ()
    condition: bool = False
    field: str = "auto"


def explain_monitors(targets: Targets) -> Absence | None:
    """Explains missing series from the cluster's PodMonitors. None without a cluster, or if they cannot be read."""
    if targets.kubernetes is False:
        return None
    try:
        from gpu_exporter.reconciler.kubernetes import monitors
        from gpu_exporter.reconciler.kubernetes.client.api import connect, is_in_cluster

        if not (targets.kubeconfig or is_in_cluster()):
            return None
        return monitors.explain_monitors(connect(targets.kubeconfig))
    except (ModuleNotFoundError, MarkError):
        return None


def find_makers(policy: Policy, targets: Targets) -> dict[str, Callable[[], Marker]]:
    """Returns, by scheduler, the function that makes its marker. Raises ValueError if a wanted marker is missing."""
    known = gpu_resources(targets.resources)
    makers: dict[str, Callable[[], Marker]] = {}
    if targets.kubernetes is not False:
        try:
            from gpu_exporter.reconciler.kubernetes.client.api import connect, is_in_cluster
            from gpu_exporter.reconciler.kubernetes.marker import PodMarker
        except ModuleNotFoundError as exc:
            if targets.kubernetes or targets.kubeconfig:
                hint = "pip install 'kubernetes>=36'"
                raise ValueError(f"the reconciler needs the kubernetes client for pods: {hint} ({exc})") from exc
        else:
            if targets.kubernetes or targets.kubeconfig or is_in_cluster():
                makers["kubernetes"] = lambda: PodMarker(
                    connect(targets.kubeconfig), policy, resources=known, sets_condition=targets.condition
                )
    if targets.slurm or (targets.slurm is None and JobMarker.is_present()):
        makers["slurm"] = lambda: JobMarker(SYSTEM_CLOCK, policy, targets.field)
    return makers


def build_markers(policy: Policy, targets: Targets) -> list[Marker]:
    """Builds the markers that write. Raises ValueError if no scheduler is found, and MarkError."""
    markers = [make() for make in find_makers(policy, targets).values()]
    if not markers:
        raise ValueError(
            "--apply needs access to Kubernetes or Slurm: set --kubernetes.kubeconfig, run in a pod with a service "
            "account, or run on a host with squeue and scontrol"
        )
    return markers


def build_preview(policy: Policy, targets: Targets) -> Preview:
    """Builds the preview for a dry run, with all available markers. It only reads.

    Raises ValueError and MarkError if a requested scheduler is not available.
    """
    makers = find_makers(policy, targets)
    asked = {"kubernetes": bool(targets.kubernetes or targets.kubeconfig), "slurm": bool(targets.slurm)}
    return Preview(makers, {scheduler: make() for scheduler, make in makers.items() if asked[scheduler]})


def build_demand(slurm: bool | None, alerts: Alerts) -> SlurmDemand | None:
    """Builds the reader of pending jobs; None without Slurm."""
    if not (slurm or (slurm is None and JobMarker.is_present())):
        return None
    return SlurmDemand(run_slurm, alerts.demand_pod_max, alerts.demand_tenant_max)


def build_lease(kubeconfig: str, place: str) -> Lease:
    """Opens the Lease at NAMESPACE/NAME. Needs the kubernetes client. Raises ValueError, MarkError."""
    from gpu_exporter.reconciler.kubernetes.client.lease import open_lease

    return open_lease(kubeconfig, place, SYSTEM_CLOCK)


def build_record_place(kubeconfig: str, lease: str, directory: Path | None) -> TextPlace | None:
    """Builds the place where the record of decisions survives a restart; None without a directory and a Lease.

    The place is a directory, or else a second Lease beside the Lease at NAMESPACE/NAME. Raises ValueError, OSError,
    MarkError.
    """
    if directory is not None:
        return TextFiles(directory)
    if not lease:
        return None
    from gpu_exporter.reconciler.kubernetes.client.lease import open_record

    return open_record(kubeconfig, lease)


def build_pause(kubeconfig: str, lease: str, path: Path | None) -> PausePlace:
    """Builds the place of a pause: a file, or a Lease at NAMESPACE/NAME.

    Raises ValueError and MarkError, and ModuleNotFoundError without the kubernetes client.
    """
    if path is not None:
        return PauseFile(path)
    from gpu_exporter.reconciler.kubernetes.client.lease import open_pause

    return open_pause(kubeconfig, lease)
