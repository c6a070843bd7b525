"""The command line: what the flags ask for becomes a call into the app. No logic of its own.

What only some commands need is imported there, since `--once` is measured in milliseconds.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpu_exporter.flags import (
    COLLECTORS,
    build_check_config_parser,
    build_demo_parser,
    build_forget_parser,
    build_record_parser,
    build_serve_parser,
    build_slurm_collector_parser,
    build_top_parser,
)
from gpu_exporter.parser import Parser, read_config
from gpu_exporter.version import VERSION

TEXTFILE_INTERVAL_MAX_S = 60.0
SWITCH_INTERVAL_S = 0.0005  # a thread that comes back from the driver does not wait for 5 ms of imports

if TYPE_CHECKING:
    from gpu_exporter.attribution.processes import ProcessOwners
    from gpu_exporter.attribution.source import Source
    from gpu_exporter.clock import Clock
    from gpu_exporter.collectors.contract import Collector
    from gpu_exporter.defaults import Settings
    from gpu_exporter.devices.protocol import Backend
    from gpu_exporter.host.work import HostWorks
    from gpu_exporter.vendor import Vendor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that this terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="replace")
    commands: dict[str, Callable[[list[str]], int]] = {
        **{name: partial(_run_reconciler, name) for name in ("reconcile", "explain", "pause", "digest")},
        "holders": _holders,
        "top": _top,
        "slurm-collector": _collect_slurm,
        "demo": _demo,
        "check-config": _check_config,
        "record": _record,
        "forget": _forget,
    }
    if given and given[0] in commands:
        return commands[given[0]](given[1:])
    if given and not given[0].startswith("-"):
        build_serve_parser().error(f"{given[0]!r} is not a command; the commands are {', '.join(commands)}")
    return _serve(given)


def _run_reconciler(name: str, given: list[str]) -> int:
    from gpu_exporter.cli_reconciler import COMMANDS

    return COMMANDS[name](given)


def _build_backend(parser: Parser, options: argparse.Namespace, clock: Clock) -> tuple[Backend, list[Source]]:
    """The backend that the flags ask for, and the holders that a scenario brings along."""
    if options.scenario is not None and options.replay:
        parser.error("--devices.scenario and --devices.replay exclude each other")
    if options.scenario is not None:
        from gpu_exporter.app.simulation import build_simulation
        from gpu_exporter.devices.scenario import ScenarioError, load_scenario

        try:
            backend, source = build_simulation(load_scenario(options.scenario), clock)
        except (ScenarioError, OSError) as exc:
            parser.fail(str(exc))
        return backend, [source]
    if options.replay:
        return _build_replay(parser, options.replay, clock), []
    from gpu_exporter.devices.nvml.backend import NvmlBackend

    return NvmlBackend(), []


def _build_sources(
    parser: Parser, options: argparse.Namespace, clock: Clock, settings: Settings, vendor: Vendor
) -> list[Source]:
    """The attribution sources that the flags ask for, or that this host has."""
    from gpu_exporter.attribution.registry import SourceOptions, find_sources
    from gpu_exporter.host.cgroups import Cgroups

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
        claims=options.claims,
        pod_uid=options.pod_uid,
        find_pods=Cgroups(options.cgroup).list_pods if options.cgroup.is_dir() else None,
        state=Path(options.state_directory) if options.state_directory else None,
        keeps_state=not options.once,
    )
    try:
        return find_sources(asked, clock, vendor)
    except ValueError as exc:
        parser.error(str(exc))


def _build_processes(
    parser: Parser, options: argparse.Namespace, backend: Backend, clock: Clock
) -> ProcessOwners | None:
    """What looks up whose processes run on the GPUs, None where that is switched off or cannot be known."""
    if options.process is False or not backend.is_live:
        return None  # neither a scenario nor a recording has processes of this host
    from gpu_exporter.attribution.processes import ProcessOwners

    owners = ProcessOwners(options.procfs, clock, pod_logs=options.kubelet_logs)
    if owners.is_host():
        return owners
    if options.process:
        parser.fail(
            f"--attribution.process: {options.procfs} does not show the host's processes, and the driver's pids mean "
            "those; run with hostPID, name the host's /proc with --path.procfs, or leave the flag out"
        )
    return None


def _build_host(options: argparse.Namespace, backend: Backend, clock: Clock) -> HostWorks | None:
    """What reads the holders' cgroups, None where none are mounted or the GPUs are not of this host."""
    if not (backend.is_live and options.cgroup.is_dir()):
        return None
    import os

    from gpu_exporter.host.cgroups import Cgroups
    from gpu_exporter.host.work import HostWorks

    return HostWorks(Cgroups(options.cgroup), clock, os.cpu_count() or 1)


def _build_replay(parser: Parser, paths: list[Path], clock: Clock) -> Backend:
    """Logs of nvidia-smi, one for each GPU, or one recording of a whole node."""
    from gpu_exporter.devices.replay import ReplayBackend

    with paths[0].open("rb") as file:
        begins_gzipped = file.read(2) == b"\x1f\x8b"
    if begins_gzipped:  # only then can it be a recording, whose reader needs the NVML backend
        from gpu_exporter.devices.nvml.backend import NvmlBackend
        from gpu_exporter.devices.nvml.recording import RecordedLibrary, is_recording

        if any(is_recording(path) for path in paths):
            if len(paths) > 1:
                parser.error("--devices.replay: a file of `gpu-exporter record` is a whole node and stands alone")
            return NvmlBackend(RecordedLibrary(paths[0], clock), clock, name="replay")
    return ReplayBackend(paths, clock)


def _enabled(options: argparse.Namespace) -> list[Collector]:
    from gpu_exporter.collectors import registry

    return [c for c in registry.ALL if getattr(options, f"collector_{c.name}")]  # every flag has its collector


def _check_combinations(parser: Parser, options: argparse.Namespace) -> None:
    """A combination that cannot be honoured is an error, never ignored."""
    if not options.once and (options.output is not None or options.format != "prometheus" or options.check != "all"):
        parser.error("--output, --format and --check are for --once")
    if options.once and options.textfile is not None:
        parser.error("--once and --textfile.output exclude each other; --once --output FILE writes one textfile")
    if options.textfile is not None and options.textfile.suffix != ".prom":
        parser.error(f"--textfile.output {options.textfile}: node_exporter reads only files named *.prom")
    if options.process and not options.collector_processes:
        parser.error("--attribution.process needs the collector processes, which is switched off")
    if options.textfile_interval > TEXTFILE_INTERVAL_MAX_S:
        parser.error("--textfile.interval: at most 60s, since evidence counts as fresh for four intervals")
    if options.xid_kmsg and not options.collector_xid:
        parser.error("--collector.xid.kmsg adds to collector xid, which is off")
    if not options.telemetry_path.startswith("/"):
        parser.error(f"--web.telemetry-path {options.telemetry_path}: must start with /")
    for path in (*options.replay, *(path for path in (options.scenario, options.static) if path is not None)):
        if not path.is_file():
            parser.fail(f"{path}: no such file")


def _serve(given: list[str]) -> int:
    parser = build_serve_parser()
    options = parser.parse_args(given)
    _check_combinations(parser, options)
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.clock import SYSTEM_CLOCK

    clock = SYSTEM_CLOCK
    backend, simulated = _build_backend(parser, options, clock)
    state_directory = Path(options.state_directory) if options.state_directory else None
    if options.once:
        _run_once(parser, options, settings, clock, backend, simulated, state_directory)
    sources = [*_build_sources(parser, options, clock, settings, backend.vendor), *simulated]
    processes = _build_processes(parser, options, backend, clock)
    return _run_daemon(parser, options, settings, backend, sources, processes, state_directory)


def _holders(given: list[str]) -> int:
    return _serve(["--once", "--format=holders", *given])


def _run_once(
    parser: Parser,
    options: argparse.Namespace,
    settings: Settings,
    clock: Clock,
    backend: Backend,
    simulated: list[Source],
    state_directory: Path | None,
) -> NoReturn:
    """`--once`. Where there is no daemon to ask, the GPUs are read while the rest of the program is loaded."""
    from gpu_exporter.app.one_view import make_readers, take_one_view

    socket_path = state_directory / "gpu-exporter.sock" if state_directory is not None and backend.is_live else None
    enabled = {name for name in COLLECTORS if getattr(options, f"collector_{name}")}
    reading = make_readers(settings, backend, clock, enabled)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if socket_path is None or not socket_path.exists():
        reading.start()
    from gpu_exporter.app.once import exit_now, run_once

    sources = [*_build_sources(parser, options, clock, settings, backend.vendor), *simulated]
    processes = _build_processes(parser, options, backend, clock)
    sysfs = options.sysfs if backend.is_live else None
    try:
        code = run_once(
            lambda: take_one_view(
                settings, backend, reading, sources, clock, options.timeout, state_directory, sysfs, processes
            ),
            options.format,
            options.output,
            options.timeout,
            socket_path,
            backend.name,
            devices_only=options.check == "devices",
        )
    except OSError as exc:
        parser.fail(str(exc))
    exit_now(code)


def describe_settings(settings: Settings) -> str:
    """What differs from the defaults, one `section.key=value` each."""
    from gpu_exporter.defaults import Settings as Defaults

    defaults = Defaults()
    changes = [
        f"{section}.{name}={value if isinstance(value, str) else format(value, 'g')}"
        for section, values in settings._asdict().items()
        for name, value in values._asdict().items()
        if value != getattr(getattr(defaults, section), name)
    ]
    return ", ".join(changes) or "the defaults"


def _run_daemon(
    parser: Parser,
    options: argparse.Namespace,
    settings: Settings,
    backend: Backend,
    sources: list[Source],
    processes: ProcessOwners | None,
    state_directory: Path | None,
) -> int:
    import logging
    import os

    from gpu_exporter.app.agent import Agent
    from gpu_exporter.app.once import exit_now
    from gpu_exporter.app.restart import restart_or_exit
    from gpu_exporter.app.serve import Ended, hold_signals, serve, write_textfiles
    from gpu_exporter.clock import SYSTEM_CLOCK
    from gpu_exporter.ledger.state import StateInUse, open_state, read_boot_id
    from gpu_exporter.logs import set_up_logging

    hold_signals()
    os.umask(0o022)  # what is made here is neither writable for others nor out of reach for the socket's group
    set_up_logging(options.log_level, options.log_format)
    log = logging.getLogger("gpu_exporter")
    names = ", ".join([source.name for source in sources] + ["process"] * (processes is not None)) or "none"
    log.info("gpu-exporter %s, backend %s, attribution %s", VERSION, backend.name, names)
    log.info("settings: %s", describe_settings(settings))
    try:
        state = open_state(state_directory, settings.state.write_interval, read_boot_id())
        sysfs = options.sysfs if backend.is_live else None
        publish_interval_s = options.textfile_interval if options.textfile is not None else 0.0
        agent = Agent(
            settings,
            backend,
            sources,
            SYSTEM_CLOCK,
            state,
            _enabled(options),
            sysfs=sysfs,
            publish_interval_s=publish_interval_s,
            processes=processes,
            kmsg=options.kmsg if options.xid_kmsg else None,
            host=_build_host(options, backend, SYSTEM_CLOCK),
        )
        if options.textfile is not None:
            ended = write_textfiles(agent, options.textfile, options.textfile_interval)
        else:
            socket_directory = state_directory if state is not None else None
            ended = serve(
                agent,
                options.address,
                options.telemetry_path,
                socket_directory,
                options.socket_mode,
                options.web_config,
                options.hosts,
            )
    except (StateInUse, ValueError, OSError) as exc:
        parser.fail(str(exc))
    if ended is Ended.CHANGED:
        restart_or_exit(options.driver_changed, SYSTEM_CLOCK.wall())
    log.info("ended")
    if ended is Ended.HUNG:
        exit_now(0)
    return 0


def _collect_slurm(given: list[str]) -> int:
    parser = build_slurm_collector_parser()
    options = parser.parse_args(given)
    from gpu_exporter.app.collect import collect
    from gpu_exporter.logs import set_up_logging

    set_up_logging(options.log_level, options.log_format)
    if options.directory is None and (options.once or not options.address):
        parser.error("--directory or --web.listen-address is needed, and --once needs --directory")
    if options.directory is not None and not options.directory.is_dir():
        parser.fail(f"{options.directory}: no such directory")
    if bool(options.slurmrestd) != (options.token_file is not None):
        parser.error("--slurmrestd and --slurmrestd.token-file go together")
    slurmrestd = (options.slurmrestd, options.token_file) if options.slurmrestd else None
    try:
        return collect(
            slurmrestd, options.directory, options.interval, options.address, options.web_config, once=options.once
        )
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))


def _top(given: list[str]) -> int:
    parser = build_top_parser()
    options = parser.parse_args(given)
    from gpu_exporter.app.top import ORDERS, Wish, complete, print_once, run_top

    if options.sort not in ORDERS:
        parser.fail(f"--sort: {options.sort!r} is not one of {', '.join(ORDERS)}")
    try:
        urls = list(dict.fromkeys(complete(node) for node in options.nodes or ["127.0.0.1"]))
    except ValueError as exc:
        parser.fail(f"--from: {exc}")
    wish = Wish(options.sort, options.words)
    if options.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return print_once(urls, wish)
    return run_top(urls, wish, options.interval)


def _demo(given: list[str]) -> int:
    parser = build_demo_parser()
    options = parser.parse_args(given)
    from gpu_exporter.app.demo import run_demo

    duration: float | None = options.duration
    if duration is None and not sys.stdout.isatty():
        duration = 60.0
    try:
        return run_demo(options.address, options.speed, duration)
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))


def _record(given: list[str]) -> int:
    parser = build_record_parser()
    options = parser.parse_args(given)
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.app.record import record
    from gpu_exporter.logs import set_up_logging

    set_up_logging(options.log_level, options.log_format)
    try:
        return record(options.file, options.duration, options.interval, settings, hashed=options.hashed)
    except OSError as exc:
        parser.fail(str(exc))


def _forget(given: list[str]) -> int:
    parser = build_forget_parser()
    options = parser.parse_args(given)
    from gpu_exporter.inventory.expected import forget

    try:
        known = forget(options.state_directory, options.uuid)
    except OSError as exc:
        parser.fail(str(exc))
    if not known:
        parser.fail(f"{options.uuid}: no GPU that is expected here (see {options.state_directory}/devices.json)")
    sys.stdout.write(f"{options.uuid} is no longer expected; should it answer again, it is again\n")
    return 0


def _check_config(given: list[str]) -> int:
    parser = build_check_config_parser()
    options = parser.parse_args(given)
    config = read_config(parser, options.file)
    from gpu_exporter.config.load import render_config

    sys.stdout.write(render_config(config))
    return 0
