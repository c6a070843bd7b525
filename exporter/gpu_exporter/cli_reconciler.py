"""The commands that decide and that ask: what their flags ask for becomes a call into the app. No logic of its own.

What only some of them need is imported there: the client of Kubernetes alone takes half a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_exporter.flags_reconciler import build_digest_parser, build_pause_parser, build_reconcile_parser
from gpu_exporter.parser import read_config

if TYPE_CHECKING:
    from gpu_exporter.reconciler.actions.runner import ActionRunner
    from gpu_exporter.reconciler.fetch import Client
    from gpu_exporter.reconciler.judge import Judge


def _build_client(options: argparse.Namespace, *addresses: str) -> Client:
    """What asks the source of evidence at these addresses. Raises ValueError, OSError."""
    from gpu_exporter.reconciler.fetch import Client, Credentials

    credentials = Credentials(options.token_file, options.auth_user, options.password_file, options.headers)
    for address in addresses:
        credentials.check_address(address)
    return Client(options.tls_ca, options.tls_cert, options.tls_key, credentials)


def _reconcile(given: list[str]) -> int:
    parser = build_reconcile_parser()
    options = parser.parse_args(given)
    config = read_config(parser, options.config_file)
    from gpu_exporter.app.explain import explain_once
    from gpu_exporter.app.reconcile import (
        apply_forever,
        apply_once,
        reconcile_forever,
        reconcile_once,
        remove_all,
        serve_telemetry,
    )
    from gpu_exporter.app.takeback import ProofPlaces, build_runner, check_actions, is_same_server
    from gpu_exporter.app.ways import (
        Ways,
        build_demand,
        build_foresight,
        build_lease,
        build_markers,
        build_pause,
        build_record_place,
        build_source,
    )
    from gpu_exporter.clock import SYSTEM_CLOCK
    from gpu_exporter.logs import set_up_logging
    from gpu_exporter.reconciler.audit import AuditLog
    from gpu_exporter.reconciler.fetch import Client
    from gpu_exporter.reconciler.marks import MarkError
    from gpu_exporter.reconciler.record import Record
    from gpu_exporter.reconciler.rulebook import Rulebook
    from gpu_exporter.reconciler.telemetry import Telemetry

    set_up_logging(options.log_level, options.log_format)
    explains = bool(options.explain or options.gpu)
    if options.apply and explains:
        parser.error("--explain and --gpu write nothing: leave --apply out")
    if (options.explain and options.gpu) or (options.at is not None and not explains):
        parser.error("name either a holder (--explain) or a GPU (--gpu); --at is for them")
    if options.at is not None and (options.pause_file is not None or options.lease):
        parser.error("--at: of a pause only the last one is kept, so leave --pause.file and --kubernetes.lease out")
    if options.collector and (not options.address or options.once or options.remove_all):
        parser.error("--slurm.collector needs --web.listen-address, and is for neither --once nor --remove-all")
    if options.condition and not (options.apply or options.remove_all):
        parser.error("--kubernetes.condition is for --apply")
    if options.audit is not None and not (options.apply or explains):
        parser.error("--audit.file is written with --apply and read with --explain")
    if options.lease and (options.remove_all or (options.apply and options.once)):
        parser.error("--kubernetes.lease is for neither --apply --once nor --remove-all")
    if options.remove_all and (options.once or explains or options.format != "table"):
        parser.error("--remove-all takes neither --once nor --explain nor --format")
    book = Rulebook(config.settings.policy, config.rules)
    places = ProofPlaces(options.prometheus, options.matcher, options.alertmanager, options.alert_filters)
    try:
        if options.apply and not (options.once or options.remove_all):
            keeps = bool(options.lease or options.state_directory is not None)
            check_actions(config.settings, places, has_audit=options.audit is not None, keeps_texts=keeps)
        acts = options.apply or options.remove_all
        ways = Ways(
            options.kubernetes, options.kubeconfig, options.slurm, options.resources, options.condition, options.field
        )
        markers = build_markers(book.site, ways) if acts else []
        if options.remove_all:
            return remove_all(markers, options.apply)
        client = _build_client(options, options.prometheus, *options.exporters)
        source = build_source(options.prometheus, options.exporters, options.matcher, book, client, options.at)
        telemetry = Telemetry()
        audit = None
        if options.audit is not None and options.apply:
            audit = AuditLog(options.audit, book, SYSTEM_CLOCK, telemetry.count_audit_error)
        pauses = [build_pause("", "", options.pause_file)] if options.pause_file is not None else []
        if options.lease and not options.apply:
            pauses.append(build_pause(options.kubeconfig, options.lease, None))
        if options.once or explains:
            if options.apply:
                return apply_once(source, markers, book, telemetry, audit, pauses)
            if options.at is not None:
                from gpu_exporter.clock import ManualClock

                then = ManualClock(wall=options.at)
                asked = options.explain, options.gpu
                return explain_once(source, book, options.format, *asked, None, options.audit, clock=then)
            foresight = build_foresight(book.site, ways)
            if explains:
                asked = options.explain, options.gpu
                actions = config.settings.actions
                return explain_once(
                    source, book, options.format, *asked, foresight, options.audit, pauses, actions=actions
                )
            return reconcile_once(source, book, options.format, foresight, pauses)
        clients = client, client
        if not is_same_server(options.prometheus, options.alertmanager):  # which has no business with the credentials
            clients = client, Client(options.tls_ca)
        dry = None if options.apply else build_foresight(book.site, ways)
        lease = build_lease(options.kubeconfig, options.lease) if options.lease and options.apply else None
        texts = build_record_place(options.kubeconfig, options.lease, options.state_directory)
        record = Record(texts, telemetry, SYSTEM_CLOCK, config.settings.actions.shadow_for)
        demand = build_demand(options.slurm, config.settings.alerts)
        telemetry.note_mode(applies=options.apply)
        if options.address:
            serve_telemetry(
                options.address, telemetry, options.interval, options.web_config, collects=options.collector
            )
    except (ValueError, OSError, MarkError, ModuleNotFoundError) as exc:
        parser.fail(str(exc))
    if dry is None:

        def build_actions(judge: Judge, may_write: Callable[[], bool]) -> ActionRunner | None:
            parts = judge, record, lease or texts, telemetry, audit, may_write
            return build_runner(config.settings, places, clients, markers, *parts)

        return apply_forever(
            source, markers, book, options.interval, telemetry, demand, lease, audit, pauses, record, build_actions
        )
    return reconcile_forever(source, book, options.interval, telemetry, dry, demand, pauses, record)


def _explain(given: list[str]) -> int:
    """`explain HOLDER FLAGS` is `reconcile --once --explain=HOLDER FLAGS`; with --gpu=UUID no holder is named."""
    if given and not given[0].startswith("-"):
        return _reconcile(["--once", f"--explain={given[0]}", *given[1:]])
    parser = build_reconcile_parser()
    if given[:1] in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    if given and given[0].partition("=")[0] == "--gpu":
        return _reconcile(["--once", *given])
    parser.error("explain: name a holder first, NAMESPACE/POD or job/ID, or --gpu UUID, then the flags of reconcile")


def _digest(given: list[str]) -> int:
    parser = build_digest_parser()
    options = parser.parse_args(given)
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.app.digest import print_digest

    if not options.prometheus:
        parser.error("--source.prometheus is needed")
    try:
        client = _build_client(options, options.prometheus)
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    return print_digest(
        options.prometheus, options.matcher, settings.alerts.interval, client, options.since, options.format
    )


def _pause(given: list[str]) -> int:
    parser = build_pause_parser()
    options = parser.parse_args(given)
    if bool(options.lease) == (options.pause_file is not None):
        parser.error("exactly one of --kubernetes.lease and --pause.file is needed: the one that reconcile has")
    if options.end and options.lasts is not None:
        parser.error("--for begins or prolongs a pause, --end ends it: give one of them")
    from gpu_exporter.app.pause import end_pause, show_pause, start_pause
    from gpu_exporter.app.ways import build_pause
    from gpu_exporter.reconciler.marks import MarkError

    try:
        place = build_pause(options.kubeconfig, options.lease, options.pause_file)
        if options.end:
            return end_pause(place)
        return show_pause(place) if options.lasts is None else start_pause(place, options.lasts, options.reason)
    except (ValueError, OSError, MarkError, ModuleNotFoundError) as exc:
        parser.fail(str(exc))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "reconcile": _reconcile,
    "explain": _explain,
    "pause": _pause,
    "digest": _digest,
}
