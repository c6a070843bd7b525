"""`gpu-exporter` without a command: the daemon on a node, or one reading with `--once`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpu_exporter.cli.agent_flags import add_agent_flags, add_daemon_flags, add_form_flags, add_waiting_flags
from gpu_exporter.cli.agent_parts import build_backend, build_host, build_processes, build_sources, list_enabled
from gpu_exporter.cli.commands import COMMANDS, list_commands
from gpu_exporter.cli.parser import Options, Parser, read_config
from gpu_exporter.common.exits import list_exits
from gpu_exporter.common.version import VERSION

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.source import Source
    from gpu_exporter.agent.devices.protocol import Backend
    from gpu_exporter.agent.ledger.state import StateFile
    from gpu_exporter.agent.runtime.surroundings import Host
    from gpu_exporter.common.config.defaults import Settings

PREFIX = "GPU_EXPORTER_"
TEXTFILE_INTERVAL_MAX_S = 60.0
DESCRIPTION = f"Shows the holder of each GPU, its use, and the cause of low use.\ncommands:\n{list_commands()}"
EPILOG = f"""signals:
  SIGUSR1 releases the driver, e.g. for an upgrade or to switch MIG; SIGHUP opens the driver again
exit codes:
{list_exits()}"""


class _ExporterParser(Parser):
    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        if misplaced := next((word for word in unknown if word in COMMANDS), None):
            self.error(f"the command comes first: gpu-exporter {misplaced} [FLAGS]")
        super().refuse(unknown)


def build_parser() -> Parser:
    usage = "gpu-exporter [FLAGS]\n       gpu-exporter COMMAND [FLAGS]"
    parser = _ExporterParser("", DESCRIPTION, EPILOG, usage, prefix=PREFIX)
    add_daemon_flags(parser)
    parser.section("one reading (no variables)")
    add_form_flags(parser)
    add_waiting_flags(parser)
    add_agent_flags(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Serves until a signal, or prints one reading. Returns the exit code."""
    _check_combinations(parser, options)
    if options.once:
        from gpu_exporter.cli.once import print_reading

        return print_reading(parser, options)
    return _run_daemon(parser, options, read_config(parser, options.config_file).settings)


def check_files(parser: Parser, options: argparse.Namespace) -> None:
    """Ends the process if a named file does not exist, or if flags contradict each other."""
    if options.process and not options.collector_processes:
        parser.error("--attribution.process needs --collector.processes, which is off")
    if options.xid_kmsg and not options.collector_xid:
        parser.error("--collector.xid.kmsg requires --collector.xid, which is off")
    for path in (*options.replay, *(path for path in (options.scenario, options.static) if path is not None)):
        if not path.is_file():
            parser.fail(f"{path}: no such file")


def _check_combinations(parser: Parser, options: argparse.Namespace) -> None:
    """Ends the process if flags are combined in an invalid way."""
    if not options.once and (options.output is not None or options.format != "prometheus" or options.check is not None):
        parser.error("--output, --format and --check require --once")
    if options.once and options.textfile is not None:
        parser.error("--once and --textfile.output cannot be combined; --once --output FILE writes one textfile")
    if options.textfile is not None and options.textfile.suffix != ".prom":
        parser.error(f"--textfile.output {options.textfile}: node_exporter reads only files named *.prom")
    if options.textfile_interval > TEXTFILE_INTERVAL_MAX_S:
        parser.error(
            f"--textfile.interval {options.textfile_interval:g}s: the maximum is 60s. The reconciler accepts samples "
            "that are at most four intervals old, which is 4 min at 60s"
        )
    if not options.telemetry_path.startswith("/"):
        parser.error(f"--web.telemetry-path {options.telemetry_path}: must start with /")
    check_files(parser, options)


def describe_settings(settings: Settings) -> str:
    """Returns the settings that differ from the defaults, each as `section.key=value`."""
    from gpu_exporter.common.config.defaults import Settings as Defaults

    defaults = Defaults()
    changes = [
        f"{section}.{name}={value if isinstance(value, str) else format(value, 'g')}"
        for section, values in settings._asdict().items()
        for name, value in values._asdict().items()
        if value != getattr(getattr(defaults, section), name)
    ]
    return ", ".join(changes) or "the defaults"


def _run_daemon(parser: Parser, options: argparse.Namespace, settings: Settings) -> int:
    import logging
    import os

    from gpu_exporter.agent.ledger.state import StateInUse, open_state, read_boot_id
    from gpu_exporter.agent.runtime.restart import restart_or_exit
    from gpu_exporter.agent.runtime.serve import allocate_together, hold_signals
    from gpu_exporter.agent.runtime.surroundings import Host
    from gpu_exporter.common.clock import SYSTEM_CLOCK
    from gpu_exporter.common.logs import set_up_logging

    allocate_together()
    backend, simulated, simulated_host = build_backend(parser, options, SYSTEM_CLOCK)
    hold_signals()
    os.umask(0o022)  # new files are not writable for other users, and the socket's group can reach them
    set_up_logging(options.log_level, options.log_format)
    log = logging.getLogger("gpu_exporter")
    directory = Path(options.state_directory) if options.state_directory else None
    try:
        state = open_state(directory, settings.state.write_interval, read_boot_id())
    except StateInUse as exc:
        parser.fail(str(exc))
    kept = state.path.parent if state is not None else None  # no part uses a directory that cannot be locked
    recall = (lambda: state.past) if state is not None else (lambda: None)
    sources = [*build_sources(parser, options, SYSTEM_CLOCK, settings, backend.vendor, kept, recall), *simulated]
    processes = build_processes(parser, options, backend, SYSTEM_CLOCK)
    names = ", ".join([source.name for source in sources] + ["process"] * (processes is not None)) or "none"
    log.info("gpu-exporter %s, backend %s, attribution %s", VERSION, backend.name, names)
    log.info("settings: %s", describe_settings(settings))
    try:
        host = simulated_host or build_host(
            options,
            backend,
            SYSTEM_CLOCK,
            with_files=settings.causes.files == "trace",
            with_training=settings.training.files == "read",
        )
        is_replaced = _serve(
            options,
            settings,
            backend,
            sources,
            Host(
                options.sysfs if backend.is_live else None, processes, options.kmsg if options.xid_kmsg else None, host
            ),
            state,
        )
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    if is_replaced:
        return restart_or_exit(options.driver_changed, SYSTEM_CLOCK.wall())
    log.info("ended")
    return 0


def _serve(
    options: argparse.Namespace,
    settings: Settings,
    backend: Backend,
    sources: list[Source],
    host: Host,
    state: StateFile | None,
) -> bool:
    """Publishes until a signal. Returns True if a new process must take over. Raises ValueError, OSError."""
    from gpu_exporter.agent.runtime.agent import Agent
    from gpu_exporter.agent.runtime.serve import serve, write_textfiles
    from gpu_exporter.agent.runtime.surroundings import Publishing
    from gpu_exporter.common.clock import SYSTEM_CLOCK

    agent = Agent(
        settings,
        backend,
        sources,
        SYSTEM_CLOCK,
        state,
        list_enabled(options),
        Publishing(interval_s=options.textfile_interval if options.textfile is not None else 0.0),
        host,
    )
    if options.textfile is not None:
        return write_textfiles(agent, options.textfile, options.textfile_interval)
    return serve(
        agent,
        options.address,
        options.telemetry_path,
        state.path.parent if state is not None else None,
        options.socket_mode,
        options.web_config,
        options.hosts,
    )
