"""Builds the parts of the exporter on a node from its flags: backend, sources, processes, cgroups.

Each function imports what it builds, because `--once` must start within milliseconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_exporter.agent.attribution.processes import ProcessOwners
    from gpu_exporter.agent.attribution.source import Source
    from gpu_exporter.agent.collectors.contract import Collector
    from gpu_exporter.agent.devices.protocol import Backend
    from gpu_exporter.agent.runtime.surroundings import HostReader
    from gpu_exporter.common.clock import Clock
    from gpu_exporter.common.config.defaults import Settings
    from gpu_exporter.common.model.holders import PastEnds
    from gpu_exporter.common.vendor import Vendor
    from gpu_exporter.diagnosis.host.loop import HostLoop
    from gpu_exporter.diagnosis.training.files import TrainingPlaces


def build_backend(
    parser: Parser, options: argparse.Namespace, clock: Clock
) -> tuple[Backend, list[Source], HostReader | None]:
    """Builds the backend that the flags request, and the simulated holders and host if they name a scenario."""
    if options.scenario is not None and options.replay:
        parser.error("--devices.scenario and --devices.replay cannot be combined")
    if options.scenario is not None:
        from gpu_exporter.agent.devices.scenario import ScenarioError, load_scenario
        from gpu_exporter.agent.runtime.simulation import build_simulation

        try:
            simulation = build_simulation(load_scenario(options.scenario), clock)
        except (ScenarioError, OSError) as exc:
            parser.fail(str(exc))
        return simulation.backend, [simulation.source], simulation.host
    if options.replay:
        return _build_replay(parser, options.replay, clock), [], None
    from gpu_exporter.agent.devices.nvml.backend import NvmlBackend

    return NvmlBackend(), [], None


def build_sources(
    parser: Parser,
    options: argparse.Namespace,
    clock: Clock,
    settings: Settings,
    vendor: Vendor,
    state: Path | None,
    recall: Callable[[], PastEnds | None] | None = None,
) -> list[Source]:
    """Builds the attribution sources that the flags request, or that this host has.

    `state`: the state directory in use. `recall`: as in SlurmOptions.
    """
    from gpu_exporter.agent.attribution.processes import ProcessOwners
    from gpu_exporter.agent.attribution.registry import SourceOptions, find_sources
    from gpu_exporter.diagnosis.host.cgroups import Cgroups

    cgroups = Cgroups(options.cgroup)
    asked = SourceOptions(
        timeout_s=settings.attribution.timeout,
        empty_confirm_s=settings.attribution.empty_confirm,
        static=options.static,
        kubelet=options.kubelet,
        kubelet_socket=options.kubelet_socket,
        kubelet_logs=options.kubelet_logs,
        resources=options.resources,
        slurm=options.slurm,
        slurm_node=options.slurm_node,
        slurm_gres_conf=options.slurm_gres_conf,
        slurm_interval_s=settings.attribution.slurm_interval,
        slurm_job_files=options.slurm_job_files,
        slurm_collected=options.slurm_collected,
        procfs=options.procfs,
        monitors=options.monitors,
        reservations=options.reservations,
        claims=options.claims,
        pod_uid=options.pod_uid,
        find_pods=cgroups.list_pods if options.cgroup.is_dir() else None,
        state=state,
        keeps_state=not options.once,
        list_inside=cgroups.list_pods_inside,
        recall=recall,
        list_running=ProcessOwners(options.procfs, clock).list_pods if options.process is not False else lambda: None,
    )
    try:
        return find_sources(asked, clock, vendor)
    except ValueError as exc:
        parser.error(str(exc))


def build_processes(
    parser: Parser, options: argparse.Namespace, backend: Backend, clock: Clock
) -> ProcessOwners | None:
    """Builds the reader of the owners of processes on GPUs; None if it is off, or if this host hides owners."""
    if options.process is False or not backend.is_live:
        return None  # neither a scenario nor a recording has processes of this host
    from gpu_exporter.agent.attribution.processes import ProcessOwners

    owners = ProcessOwners(options.procfs, clock, pod_logs=options.kubelet_logs)
    if owners.is_host():
        return owners
    if options.process:
        parser.fail(
            f"--attribution.process: {options.procfs} does not show the host's processes; run with hostPID, "
            "name the host's /proc with --path.procfs, or leave the flag out"
        )
    return None


def build_host(
    options: argparse.Namespace, backend: Backend, clock: Clock, *, with_files: bool, with_training: bool
) -> HostLoop | None:
    """Builds the reader of holders' activity on this host; None without cgroups, or if the GPUs are not in this host.

    `with_files`: also reads the processes' open files, which needs the right to trace processes. `with_training`: also
    reads the reports that jobs write about their training.
    """
    if not (backend.is_live and options.cgroup.is_dir()):
        return None
    import os

    from gpu_exporter.common.procfs import Procfs
    from gpu_exporter.diagnosis.host.cgroups import Cgroups
    from gpu_exporter.diagnosis.host.evidence import EvidenceReader
    from gpu_exporter.diagnosis.host.loop import HostLoop
    from gpu_exporter.diagnosis.host.progress import ProgressReader
    from gpu_exporter.diagnosis.host.work import HostWorks
    from gpu_exporter.diagnosis.training.files import TrainingReader

    cgroups, cpus, procfs = Cgroups(options.cgroup), os.cpu_count() or 1, Procfs(options.procfs)
    is_host = procfs.is_host()
    return HostLoop(
        HostWorks(cgroups, clock, cpus),
        ProgressReader(cgroups, clock, procfs if is_host else None),
        EvidenceReader(cgroups, clock, cpus, options.procfs if is_host else None, with_files=with_files),
        clock,
        TrainingReader(_find_trainings(options), clock) if with_training else None,
    )


def _find_trainings(options: argparse.Namespace) -> TrainingPlaces:
    """Returns the directories with training reports: in the kubelet's directory, and beside the prolog's job files."""
    from gpu_exporter.agent.attribution.slurm.on_node.job_files import DEFAULT_PLACE
    from gpu_exporter.diagnosis.training.files import TrainingPlaces

    job_files: Path = options.slurm_job_files or DEFAULT_PLACE
    return TrainingPlaces(options.kubelet_socket.parent.parent / "pods", job_files.parent / "training")


def _build_replay(parser: Parser, paths: list[Path], clock: Clock) -> Backend:
    """Builds the backend that replays nvidia-smi logs, one for each GPU, or one recording of a whole node."""
    from gpu_exporter.agent.devices.replay import ReplayBackend
    from gpu_exporter.common.files import open_named

    try:
        with open_named(paths[0]) as file:
            begins_gzipped = file.read(2) == b"\x1f\x8b"
    except OSError as exc:
        parser.fail(str(exc))
    if begins_gzipped:  # only a gzipped file can be a recording, whose reader needs the NVML backend
        from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
        from gpu_exporter.agent.devices.nvml.recording import RecordedLibrary, is_recording

        if any(is_recording(path) for path in paths):
            if len(paths) > 1:
                parser.error(
                    "--devices.replay: a file of `gpu-exporter record` contains all GPUs of a node: give no other file"
                )
            return NvmlBackend(RecordedLibrary(paths[0], clock), clock, name="replay")
    return ReplayBackend(paths, clock)


def list_enabled(options: argparse.Namespace) -> list[Collector]:
    from gpu_exporter.agent.collectors import registry

    return [c for c in registry.ALL if getattr(options, f"collector_{c.name}")]  # every collector has a flag
