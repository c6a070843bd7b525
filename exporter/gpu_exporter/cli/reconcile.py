"""`gpu-exporter reconcile`: decides which holders are underused, and with --apply marks them.

Modules that only some forms of the command need are imported inside functions: loading the kubernetes client takes half
a second.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import (
    Options,
    Parser,
    add_config,
    add_format,
    add_logging,
    add_web_config,
    optional_address,
    read_config,
)
from gpu_exporter.cli.reconciler_flags import (
    add_exporters,
    add_pause_places,
    add_prometheus,
    add_targets,
    build_client,
    build_evidence,
    find_targets,
    list_pauses,
)

if TYPE_CHECKING:
    from gpu_exporter.common.config.load import Config
    from gpu_exporter.common.promql.client import Client
    from gpu_exporter.reconciler.audit import AuditLog
    from gpu_exporter.reconciler.decision.rulebook import Rulebook
    from gpu_exporter.reconciler.evidence.records import ExplainingSource
    from gpu_exporter.reconciler.telemetry import Telemetry

# Python's collector runs after this many new objects instead of 700. A cycle keeps millions, and has hardly any cycles
# of references: at 100,000 allocations, collecting needed a quarter of its CPU time.
GARBAGE_EACH = 20_000


def build_parser() -> Parser:
    parser = Parser(
        "reconcile",
        "Decide from metrics which holders are underused. Without --apply, the reconciler writes nothing.",
        prefix="GPU_EXPORTER_RECONCILE_",
    )
    _add_verbs(parser)
    add_prometheus(parser)
    add_exporters(parser)
    add_targets(parser)
    parser.flag(
        "--kubernetes.condition",
        dest="condition",
        action="store_true",
        help="with --apply: set the pod condition gpu-exporter.io/Underused beside the label; needs patch on "
        "pods/status",
    )
    _add_actions(parser)
    parser.section("running")
    add_pause_places(parser)
    parser.flag("--interval", type=positive_duration, default="30s", help="time between two cycles (default 30s)")
    parser.flag(
        "--state.directory",
        type=Path,
        metavar="DIR",
        help="directory for the record and the journal, if --kubernetes.lease is not set",
    )
    parser.flag(
        "--audit.file",
        dest="audit",
        type=Path,
        help="with --apply: write a JSON line for each change of a mark; - is standard output",
    )
    parser.flag(
        "--web.listen-address",
        dest="address",
        default="",
        metavar="[HOST]:PORT",
        help="serve the reconciler's own metrics here (default: not served)",
    )
    add_web_config(parser)
    parser.flag(
        "--slurm.collector",
        dest="collector",
        action="store_true",
        help="also run the Slurm collector, at --web.listen-address",
    )
    add_config(parser)
    add_logging(parser)
    return parser


def _add_verbs(parser: Parser) -> None:
    parser.section("what to do (no environment variables)")
    parser.flag(
        "--apply",
        action="store_true",
        is_verb=True,
        help="mark pods (label) and Slurm jobs (see --slurm.field), and withdraw these marks",
    )
    parser.flag(
        "--remove-all",
        action="store_true",
        is_verb=True,
        help="list all existing marks and exit; with --apply, withdraw them",
    )
    parser.flag(
        "--once",
        action="store_true",
        is_verb=True,
        help="run one cycle, print the decisions and exit; with --apply, also write the marks",
    )
    add_format(parser, more="; for --once without --apply, and for --remove-all")


def _add_actions(parser: Parser) -> None:
    parser.section("actions")
    parser.address(
        "--alertmanager.url",
        optional_address,
        "",
        dest="alertmanager",
        metavar="URL",
        help="Alertmanager that sends the alerts to owners; every action needs such an alert",
    )
    parser.flag(
        "--alertmanager.filter",
        dest="alert_filters",
        action="append",
        metavar="MATCHER",
        help="matcher of alerts, e.g. 'cluster=\"a\"'; can be repeated",
    )


def run(parser: Parser, options: Options) -> int:
    """Decides once or until a signal, or lists marks. Returns the exit code."""
    _check_combinations(parser, options)
    config = read_config(parser, options.config_file)
    from gpu_exporter.common.logs import set_up_logging
    from gpu_exporter.reconciler.decision.rulebook import Rulebook
    from gpu_exporter.reconciler.marks import MarkError

    set_up_logging(options.log_level, options.log_format)
    gc.set_threshold(GARBAGE_EACH)
    book = Rulebook(config.settings.policy, config.rules)
    try:
        if options.remove_all:
            return _remove_all(options, book)
        if options.once:
            return _run_once(options, book)
        start = _prepare(options, config, book)
    except (ValueError, OSError, MarkError, ModuleNotFoundError) as exc:
        parser.fail(str(exc))
    return start()


def _check_combinations(parser: Parser, options: argparse.Namespace) -> None:
    """Ends the process if flags are combined in an invalid way."""
    if options.collector and (not options.address or options.once or options.remove_all):
        parser.error(
            "--slurm.collector requires --web.listen-address, and cannot be combined with --once or --remove-all"
        )
    if options.condition and not (options.apply or options.remove_all):
        parser.error("--kubernetes.condition requires --apply or --remove-all")
    if options.audit is not None and not options.apply:
        parser.error("--audit.file requires --apply, which writes the file; `explain --audit.file` reads it")
    if options.lease and options.apply and options.once:
        parser.error("--kubernetes.lease cannot be combined with --apply --once")
    if options.lease and options.remove_all and not options.apply:
        parser.error("--kubernetes.lease with --remove-all requires --apply")
    if options.remove_all and options.once:
        parser.error("--remove-all cannot be combined with --once")
    if options.format != "table" and not options.remove_all and (options.apply or not options.once):
        parser.error("--format requires --once without --apply, or --remove-all")


def _remove_all(options: argparse.Namespace, book: Rulebook) -> int:
    from gpu_exporter.reconciler.runtime.loops import remove_all
    from gpu_exporter.reconciler.runtime.targets import build_lease, build_markers

    markers = build_markers(book.site, find_targets(options, condition=options.condition))
    lease = build_lease(options.kubeconfig, options.lease) if options.lease else None
    return remove_all(markers, apply=options.apply, lease=lease, form=options.format)


def _build_evidence(options: argparse.Namespace, book: Rulebook) -> tuple[Client, ExplainingSource]:
    client = build_client(options, options.prometheus, *options.exporters)
    return client, build_evidence(options, client, book)


def _run_once(options: argparse.Namespace, book: Rulebook) -> int:
    from gpu_exporter.reconciler.runtime.loops import apply_once, reconcile_once
    from gpu_exporter.reconciler.runtime.targets import build_markers, build_preview
    from gpu_exporter.reconciler.telemetry import Telemetry

    targets = find_targets(options, condition=options.condition)
    if not options.apply:
        _, source = _build_evidence(options, book)
        pauses = list_pauses(options, with_lease=True)
        return reconcile_once(source, book, options.format, build_preview(book.site, targets), pauses)
    markers = build_markers(book.site, targets)
    _, source = _build_evidence(options, book)
    telemetry = Telemetry()
    audit = _open_audit(options, book, telemetry)
    return apply_once(source, markers, book, telemetry, audit, list_pauses(options, with_lease=False))


def _open_audit(options: argparse.Namespace, book: Rulebook, telemetry: Telemetry) -> AuditLog | None:
    from gpu_exporter.common.clock import SYSTEM_CLOCK
    from gpu_exporter.reconciler.audit import AuditLog

    if options.audit is None:
        return None
    return AuditLog(options.audit, book, SYSTEM_CLOCK, telemetry.count_audit_error)


def _prepare(options: argparse.Namespace, config: Config, book: Rulebook) -> Callable[[], int]:
    """Builds the function that runs until a signal. Raises ValueError, OSError, MarkError, ModuleNotFoundError."""
    from gpu_exporter.common.clock import SYSTEM_CLOCK
    from gpu_exporter.reconciler.actions.record import Record
    from gpu_exporter.reconciler.runtime import loops
    from gpu_exporter.reconciler.runtime.actions import ActionPlan, ProofPlaces, check_actions
    from gpu_exporter.reconciler.runtime.targets import (
        build_demand,
        build_lease,
        build_markers,
        build_preview,
        build_record_place,
    )
    from gpu_exporter.reconciler.telemetry import Telemetry

    places = ProofPlaces(options.prometheus, options.matcher, options.alertmanager, options.alert_filters)
    targets = find_targets(options, condition=options.condition)
    markers = []
    if options.apply:
        keeps = bool(options.lease or options.state_directory is not None)
        check_actions(config.settings, places, has_audit=options.audit is not None, keeps_texts=keeps)
        markers = build_markers(book.site, targets)
    client, source = _build_evidence(options, book)
    telemetry = Telemetry()
    audit = _open_audit(options, book, telemetry) if options.apply else None
    # with --apply, the reconciler reads the pause from its own Lease
    pauses = list_pauses(options, with_lease=not options.apply)
    clients = _find_clients(options, client)  # before anything is opened or served
    preview = None if options.apply else build_preview(book.site, targets)
    lease = build_lease(options.kubeconfig, options.lease) if options.lease and options.apply else None
    texts = build_record_place(options.kubeconfig, options.lease, options.state_directory)
    record = Record(texts, telemetry, SYSTEM_CLOCK, config.settings.actions.shadow_for)
    demand = build_demand(options.slurm, config.settings.alerts)
    parts = loops.Reconciler(source, book, pauses, telemetry, record, demand, options.interval)
    telemetry.note_mode(applies=options.apply)
    if options.address:
        _serve_telemetry(options, telemetry)
    if preview is not None:
        return partial(loops.reconcile_forever, parts, preview)
    plan = ActionPlan(config.settings, places, clients, lease or texts)
    return partial(loops.apply_forever, parts, loops.Writing(markers, lease, audit, plan))


def _serve_telemetry(options: argparse.Namespace, telemetry: Telemetry) -> None:
    """Serves metrics and probes, and the pages of the Slurm collector if it runs too. Raises OSError, ValueError."""
    from gpu_exporter.reconciler.site import ReconcilerSite

    site = ReconcilerSite(telemetry, options.interval)
    if options.collector:
        from gpu_exporter.agent.runtime.collect import collect_beside

        server, task = collect_beside(site, telemetry.registry, options.address, options.web_config)
        telemetry.own.tasks.add(task)
    else:
        from gpu_exporter.common.web.server import HttpServer

        server = HttpServer(options.address, site, web_config=options.web_config)
        server.start()
    telemetry.own.note_server(server)


def _find_clients(options: argparse.Namespace, client: Client) -> tuple[Client, Client]:
    """Returns the clients for the PromQL API and for Alertmanager. Alertmanager gets the credentials only if both
    addresses belong to the same server.
    """
    from gpu_exporter.common.promql.client import Client

    prometheus, alertmanager = options.prometheus, options.alertmanager
    shares = None not in (prometheus, alertmanager) and prometheus.is_same_server(alertmanager)
    return client, client if shares else Client(options.tls_ca)
