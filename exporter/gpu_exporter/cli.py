"""The command line: flags and environment to a call into the app. No logic of its own.

Each flag can be given by the environment: `--web.listen-address` is GPU_EXPORTER_WEB_LISTEN_ADDRESS. What only some
commands need is imported there, since `--once` is measured in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpu_exporter.version import VERSION

if TYPE_CHECKING:
    from gpu_exporter.attribution.source import Source
    from gpu_exporter.clock import Clock
    from gpu_exporter.collectors import Collector
    from gpu_exporter.defaults import Settings
    from gpu_exporter.devices.protocol import Backend

DEFAULT_PORT = ":9836"
DEFAULT_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEFAULT_LOGS = "/var/log/pods"
DEFAULT_STATE = "/var/lib/gpu-exporter"
COLLECTORS = ("utilization", "memory", "power", "thermal", "throttle", "processes", "mig")
EPILOG = """commands:
  (none)        serve metrics and the status page
  reconcile     decide from metrics which holders are underused; dry run
  demo          a simulated node on a compressed clock
  check-config  read a configuration file and print what is in force

exit codes:
  0  done
  1  unforeseen
  2  wrong usage or configuration
  3  no GPU data (--once), no evidence (reconcile)
  4  partial data (--once)
"""


class _Parser(argparse.ArgumentParser):
    """Takes defaults from the environment and shows them."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._environment: list[argparse.Action] = []

    def flag(self, name: str, **options: object) -> None:
        """One flag; its value in the environment, where set, becomes the default."""
        action = self.add_argument(name, **options)  # type: ignore[arg-type]
        variable = environment_name(name)
        text = os.environ.get(variable)
        action.help = f"{action.help or ''} [{variable}]"
        if text is None:
            return
        if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
            if text.lower() not in ("true", "false", "1", "0"):
                self.error(f"environment variable {variable}: {text!r} is none of true, false")
            action.default = text.lower() in ("true", "1")
        elif isinstance(action.default, list):
            action.default = text.split(",")
        else:
            if action.choices is not None and text not in action.choices:
                self.error(f"environment variable {variable}: {text!r} is none of {', '.join(action.choices)}")
            action.default = text  # argparse converts text defaults by `type`

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        sys.exit(2)


def environment_name(flag: str) -> str:
    """`--web.listen-address` to GPU_EXPORTER_WEB_LISTEN_ADDRESS."""
    return "GPU_EXPORTER_" + flag.lstrip("-").replace(".", "_").replace("-", "_").upper()


def _duration(text: str) -> float:
    from gpu_exporter.config import parse_duration

    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _add_common(parser: _Parser) -> None:
    parser.flag("--config.file", dest="config_file", type=Path, default=None, help="YAML file over the defaults")
    parser.flag(
        "--log.level",
        dest="log_level",
        choices=("debug", "info", "warn", "error"),
        default="info",
        help="(default info)",
    )
    parser.flag(
        "--log.format",
        dest="log_format",
        choices=("logfmt", "json"),
        default="logfmt",
        help="(default logfmt)",
    )
    parser.add_argument("--version", action="version", version=f"gpu-exporter {VERSION}")


def build_serve_parser() -> _Parser:
    """Flags of the exporter proper."""
    parser = _Parser("gpu-exporter", "Who holds which GPU, is it used, and if not, why.", EPILOG)
    parser.flag(
        "--web.listen-address",
        dest="address",
        default=DEFAULT_PORT,
        help=f"[host]:port (default {DEFAULT_PORT})",
    )
    parser.flag(
        "--web.telemetry-path",
        dest="telemetry_path",
        default="/metrics",
        help="path of the metrics (default /metrics)",
    )
    parser.flag("--once", action="store_true", default=False, help="print one reading and exit")
    parser.flag(
        "--format",
        dest="format",
        choices=("prometheus", "json", "table"),
        default="prometheus",
        help="form of --once (default prometheus)",
    )
    parser.flag("--output", dest="output", type=Path, default=None, help="with --once: write here, by rename")
    parser.flag(
        "--timeout",
        dest="timeout",
        type=_duration,
        default="10s",
        help="with --once: longest wait (default 10s)",
    )
    parser.flag(
        "--textfile.output",
        dest="textfile",
        type=Path,
        default=None,
        help="stay resident without HTTP and keep this file fresh for node_exporter",
    )
    parser.flag(
        "--textfile.interval",
        dest="textfile_interval",
        type=_duration,
        default="60s",
        help="how often that file is written (default 60s)",
    )
    parser.flag(
        "--state.directory",
        dest="state_directory",
        default=DEFAULT_STATE,
        help=f"where counters survive a restart, empty for none (default {DEFAULT_STATE})",
    )
    for name in COLLECTORS:
        parser.flag(
            f"--collector.{name}",
            dest=f"collector_{name}",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="(default on)",
        )
    _add_sources(parser)
    parser.flag(
        "--devices.scenario",
        dest="scenario",
        type=Path,
        default=None,
        help="simulate the node that this scenario file describes",
    )
    parser.flag(
        "--devices.replay",
        dest="replay",
        action="append",
        type=Path,
        default=[],
        help="replay this nvidia-smi log as a GPU; once for each GPU",
    )
    _add_common(parser)
    return parser


def _add_sources(parser: _Parser) -> None:
    parser.flag(
        "--attribution.kubelet",
        dest="kubelet",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the kubelet who holds what (default: when its socket directory exists)",
    )
    parser.flag(
        "--attribution.kubelet.socket",
        dest="kubelet_socket",
        type=Path,
        default=Path(DEFAULT_SOCKET),
        help=f"(default {DEFAULT_SOCKET})",
    )
    parser.flag(
        "--attribution.kubelet.logs",
        dest="kubelet_logs",
        type=Path,
        default=Path(DEFAULT_LOGS),
        help=f"where the pods' log directories tell their UIDs (default {DEFAULT_LOGS})",
    )
    parser.flag(
        "--attribution.slurm",
        dest="slurm",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask Slurm who holds what (default: when squeue and scontrol are on PATH)",
    )
    parser.flag(
        "--attribution.slurm.node",
        dest="slurm_node",
        default="",
        help="this node's NodeName (default: short host name)",
    )
    parser.flag("--attribution.static", dest="static", type=Path, default=None, help="YAML list of who holds what")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"reconcile": _reconcile, "demo": _demo, "check-config": _check_config}
    if given and given[0] in commands:
        return commands[given[0]](given[1:])
    return _serve(given)


def _load(parser: _Parser, path: Path | None) -> Settings:
    from gpu_exporter.config import ConfigError, load_settings

    try:
        return load_settings(path)
    except ConfigError as exc:
        parser.error(str(exc))


def _build_node(
    parser: _Parser, options: argparse.Namespace, clock: Clock, settings: Settings
) -> tuple[Backend, list[Source]]:
    """The backend and the attribution sources that the flags ask for."""
    if options.scenario is not None and options.replay:
        parser.error("--devices.scenario and --devices.replay exclude each other")
    sources: list[Source] = []
    if options.static is not None:
        from gpu_exporter.attribution.static import StaticSource

        sources.append(StaticSource(options.static))
    attribution = settings.attribution
    socket = options.kubelet_socket
    if options.kubelet or (options.kubelet is None and socket.parent.is_dir()):
        from gpu_exporter.attribution.kubelet import KubeletSource

        kubelet = KubeletSource(
            clock,
            socket,
            options.kubelet_logs,
            timeout_s=attribution.timeout,
            empty_confirm_s=attribution.empty_confirm,
        )
        sources.append(kubelet)
    if options.slurm is not False:
        from gpu_exporter.attribution.slurm import SlurmSource

        if options.slurm or SlurmSource.is_present():
            sources.append(SlurmSource(options.slurm_node, attribution.timeout))
    if options.scenario is not None:
        from gpu_exporter.app.simulation import build_simulation
        from gpu_exporter.devices.scenario import ScenarioError, load_scenario

        try:
            backend, source = build_simulation(load_scenario(options.scenario), clock)
        except (ScenarioError, OSError) as exc:
            parser.error(str(exc))
        return backend, [*sources, source]
    if options.replay:
        from gpu_exporter.devices.replay import ReplayBackend

        return ReplayBackend(options.replay, clock), sources
    from gpu_exporter.devices.nvml.backend import NvmlBackend

    return NvmlBackend(), sources


def _enabled(options: argparse.Namespace) -> list[Collector]:
    from gpu_exporter import collectors

    return [c for c in collectors.ALL if getattr(options, f"collector_{c.name}")]


def _serve(given: list[str]) -> int:
    parser = build_serve_parser()
    options = parser.parse_args(given)
    settings = _load(parser, options.config_file)
    from gpu_exporter.clock import SystemClock

    clock = SystemClock()
    backend, sources = _build_node(parser, options, clock, settings)
    state_directory = Path(options.state_directory) if options.state_directory else None
    if options.once:
        from gpu_exporter.app.agent import take_one_view
        from gpu_exporter.app.once import exit_now, run_once

        socket_path = None
        if state_directory is not None and backend.name == "nvml":
            socket_path = state_directory / "gpu-exporter.sock"
        code = run_once(
            lambda: take_one_view(settings, backend, sources, clock, _enabled(options)),
            options.format,
            options.output,
            options.timeout,
            socket_path,
            backend.name,
        )
        exit_now(code)
    return _run_daemon(parser, options, settings, backend, sources, state_directory)


def _run_daemon(
    parser: _Parser,
    options: argparse.Namespace,
    settings: Settings,
    backend: Backend,
    sources: list[Source],
    state_directory: Path | None,
) -> int:
    import logging

    from gpu_exporter.app.agent import Agent, open_state
    from gpu_exporter.app.logs import set_up_logging
    from gpu_exporter.app.once import exit_now
    from gpu_exporter.app.serve import serve, write_textfiles
    from gpu_exporter.clock import SystemClock
    from gpu_exporter.ledger.state import StateInUse, read_boot_id

    set_up_logging(options.log_level, options.log_format)
    log = logging.getLogger("gpu_exporter")
    names = ", ".join(source.name for source in sources) or "none"
    log.info("gpu-exporter %s, backend %s, attribution %s", VERSION, backend.name, names)
    log.info("settings in force: %s", settings)
    try:
        state = open_state(state_directory, settings, read_boot_id())
        agent = Agent(settings, backend, sources, SystemClock(), state, _enabled(options))
        if options.textfile is not None:
            clean = write_textfiles(agent, options.textfile, options.textfile_interval)
        else:
            socket_directory = state_directory if state is not None else None
            clean = serve(agent, options.address, options.telemetry_path, socket_directory)
    except (StateInUse, ValueError, OSError) as exc:
        parser.error(str(exc))
    log.info("ended")
    if not clean:
        exit_now(0)
    return 0


def _reconcile(given: list[str]) -> int:
    parser = _Parser("gpu-exporter reconcile", "Decide which holders are underused. Dry run: nothing is written.")
    parser.flag("--source.prometheus", dest="prometheus", default="", help="URL of a PromQL API")
    parser.flag(
        "--source.exporter",
        dest="exporters",
        action="append",
        default=[],
        help="URL of an exporter's metrics; once for each",
    )
    parser.flag(
        "--source.matcher",
        dest="matcher",
        default='job="gpu-exporter"',
        help='matchers for every PromQL selector, so that no other target speaks for us (default job="gpu-exporter")',
    )
    parser.flag("--once", action="store_true", default=False, help="print the decision table and exit")
    parser.flag("--explain", default="", help="with --once: NAMESPACE/POD or job/ID, every number behind its stage")
    parser.flag(
        "--format",
        dest="format",
        choices=("table", "json"),
        default="table",
        help="form of --once (default table)",
    )
    parser.flag("--interval", type=_duration, default="30s", help="time between two cycles (default 30s)")
    _add_common(parser)
    options = parser.parse_args(given)
    settings = _load(parser, options.config_file)
    from gpu_exporter.app.logs import set_up_logging
    from gpu_exporter.app.reconcile import build_source, reconcile_forever, reconcile_once

    set_up_logging(options.log_level, options.log_format)
    try:
        source = build_source(options.prometheus, options.exporters, options.matcher, settings.policy)
    except ValueError as exc:
        parser.error(str(exc))
    if options.once or options.explain:
        return reconcile_once(source, settings.policy, options.format, options.explain)
    return reconcile_forever(source, settings.policy, options.interval)


def _demo(given: list[str]) -> int:
    parser = _Parser("gpu-exporter demo", "A simulated node on a compressed clock, with the reconciler's dry run.")
    parser.flag(
        "--web.listen-address",
        dest="address",
        default="127.0.0.1:0",
        help="[host]:port (default 127.0.0.1, free port)",
    )
    parser.flag(
        "--speed",
        type=float,
        default=180.0,
        help="seconds of the node's clock in a real second (default 180)",
    )
    parser.flag(
        "--duration",
        type=_duration,
        default=None,
        help="end after this time (default: 60s, never at a terminal)",
    )
    parser.add_argument("--version", action="version", version=f"gpu-exporter {VERSION}")
    options = parser.parse_args(given)
    from gpu_exporter.app.demo import run_demo

    duration: float | None = options.duration
    if duration is None and not sys.stdout.isatty():
        duration = 60.0
    try:
        return run_demo(options.address, options.speed, duration)
    except (ValueError, OSError) as exc:
        parser.error(str(exc))


def _check_config(given: list[str]) -> int:
    parser = _Parser("gpu-exporter check-config", "Read a configuration file and print what is in force.")
    parser.add_argument("file", type=Path, help="YAML file")
    options = parser.parse_args(given)
    settings = _load(parser, options.file)
    for section, values in settings._asdict().items():
        sys.stdout.write(f"{section}:\n")
        for name, value in values._asdict().items():
            sys.stdout.write(f"  {name}: {value!r}\n")
    return 0
