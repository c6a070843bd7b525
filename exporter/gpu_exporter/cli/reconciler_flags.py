"""Flags that several commands of the reconciler share, and the parts that they configure."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.parser import Parser, add_resources, optional_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_exporter.common.address import Address
    from gpu_exporter.common.promql.client import Client
    from gpu_exporter.reconciler.decision.rulebook import Rulebook
    from gpu_exporter.reconciler.evidence.records import ExplainingSource
    from gpu_exporter.reconciler.pause import PausePlace
    from gpu_exporter.reconciler.runtime.targets import Targets


LOGIN = "--source.basic-auth.username with --source.basic-auth.password-file"


def add_prometheus(parser: Parser, matcher: str = 'job="gpu-exporter"') -> None:
    """Adds the flags for the source of evidence, and for access to its server. `matcher`: the default of its flag."""
    parser.section("evidence")
    parser.address(
        "--source.prometheus",
        optional_address,
        LOGIN,
        dest="prometheus",
        metavar="URL",
        help="Prometheus, or another PromQL API",
    )
    parser.flag(
        "--source.matcher",
        dest="matcher",
        default=matcher,
        metavar="MATCHERS",
        help=f"matchers of every PromQL selector, to ignore series of other jobs (default {matcher or 'none'})",
    )
    for name, what in (
        ("ca", "certificate authorities of the source (default: the system's)"),
        ("cert", "client certificate for the source, with --source.tls.key"),
        ("key", "private key of the client certificate"),
    ):
        parser.flag(f"--source.tls.{name}", dest=f"tls_{name}", type=Path, default=None, help=what)
    parser.flag(
        "--source.bearer-token-file",
        dest="token_file",
        type=Path,
        help="file with the bearer token; read for each request",
    )
    parser.flag("--source.basic-auth.username", dest="auth_user", default="", metavar="NAME", help="user of the source")
    parser.flag(
        "--source.basic-auth.password-file",
        dest="password_file",
        type=Path,
        help="file with this user's password; read for each request",
    )
    parser.private(
        "--source.header",
        _check_header,
        _is_secret_header,
        "--source.header-file",
        dest="headers",
        action="append",
        metavar="HEADER",
        help="further header, as 'X-Scope-OrgID: team-a' for Mimir; can be repeated",
    )
    parser.flag(
        "--source.header-file",
        dest="header_file",
        type=Path,
        help="file with further, secret headers, one per line; read for each request",
    )


def add_exporters(parser: Parser) -> None:
    parser.addresses(
        "--source.exporter",
        _parse_exporter,
        LOGIN,
        dest="exporters",
        metavar="URL",
        help="metrics page of an exporter, in place of --source.prometheus; repeatable, or a list: http://gpu-[01-40]:9836",
    )


def add_targets(parser: Parser) -> None:
    """Adds the flags for the places where pods and jobs are read and marked."""
    parser.section("pods and jobs")
    parser.flag(
        "--kubernetes",
        action=argparse.BooleanOptionalAction,
        help="include pods (default: with a service account or --kubernetes.kubeconfig)",
    )
    add_kubeconfig(parser)
    add_resources(parser)
    parser.flag(
        "--slurm",
        action=argparse.BooleanOptionalAction,
        help="include Slurm jobs (default: if squeue and scontrol are on PATH)",
    )
    parser.flag(
        "--slurm.field",
        dest="field",
        choices=("auto", "AdminComment", "Extra", "Comment"),
        default="auto",
        metavar="FIELD",
        help="field of a job for the mark: AdminComment, Extra, Comment or auto (default). auto is AdminComment, or "
        "Extra (before Slurm 23.02: Comment) if AdminComment is taken or refused",
    )


def add_kubeconfig(parser: Parser) -> None:
    parser.flag(
        "--kubernetes.kubeconfig",
        dest="kubeconfig",
        default="",
        metavar="FILE",
        help="kubeconfig of the API server (default: the service account)",
    )


def add_pause_places(parser: Parser) -> None:
    parser.flag(
        "--kubernetes.lease",
        dest="lease",
        default="",
        metavar="NAMESPACE/NAME",
        help="Lease that lets one replica write, and that stores the pause (default: none)",
    )
    parser.flag(
        "--pause.file",
        type=Path,
        help="file that stores the pause if there is no Lease; give `pause` and `reconcile` the same file "
        "(default: none)",
    )


def _check_header(text: str) -> str:
    from gpu_exporter.common.promql.client import parse_header

    parse_header(text)
    return text


def _is_secret_header(text: str) -> bool:
    from gpu_exporter.common.promql.client import SECRET_HEADER

    return SECRET_HEADER.search(text.partition(":")[0]) is not None


def _parse_exporter(text: str) -> Address:
    from gpu_exporter.reconciler.evidence.exporters import parse_exporter

    return parse_exporter(text)


def build_client(options: argparse.Namespace, *addresses: Address | None) -> Client:
    """Builds the client for requests to Prometheus or the exporters at these addresses. Raises ValueError, OSError."""
    from gpu_exporter.common.promql.client import Client, Credentials

    credentials = Credentials(
        options.token_file, options.auth_user, options.password_file, options.headers, options.header_file
    )
    for address in filter(None, addresses):
        credentials.check_address(address)
    return Client(options.tls_ca, options.tls_cert, options.tls_key, credentials)


def build_evidence(
    options: argparse.Namespace, client: Client, book: Rulebook, at: float | None = None
) -> ExplainingSource:
    """Builds the source of evidence, for now or for a past time (Unix seconds). Raises ValueError."""
    from gpu_exporter.reconciler.runtime.targets import build_source, explain_monitors

    monitors = partial(explain_monitors, find_targets(options))
    return build_source(options.prometheus, options.exporters, options.matcher, book, client, at, monitors)


def find_targets(options: argparse.Namespace, *, condition: bool = False) -> Targets:
    """Returns the places where pods and jobs are read and marked. `condition`: also set a condition on pods."""
    from gpu_exporter.reconciler.runtime.targets import Targets

    return Targets(options.kubernetes, options.kubeconfig, options.slurm, options.resources, condition, options.field)


def list_pauses(options: argparse.Namespace, *, with_lease: bool) -> Sequence[PausePlace]:
    """Returns the places where a pause may be kept. `with_lease`: includes the Lease, whose pause no other part of this
    process reads.

    Raises ValueError, MarkError, ModuleNotFoundError.
    """
    from gpu_exporter.reconciler.runtime.targets import build_pause

    pauses = [build_pause("", "", options.pause_file)] if options.pause_file is not None else []
    if options.lease and with_lease:
        pauses.append(build_pause(options.kubeconfig, options.lease, None))
    return pauses
