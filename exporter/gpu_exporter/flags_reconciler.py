"""The flags of the commands that ask a source of evidence. No logic beyond naming them."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_exporter.flags import add_common, add_resources, add_web_config
from gpu_exporter.parser import Parser, moment, positive_duration


def _add_prometheus(parser: Parser) -> None:
    parser.flag("--source.prometheus", dest="prometheus", default="", help="URL of a PromQL API")
    parser.flag(
        "--source.matcher",
        dest="matcher",
        default='job="gpu-exporter"',
        help='matchers for every PromQL selector, so that no other target speaks for us (default job="gpu-exporter")',
    )
    for name, what in (
        ("ca", "certificate authorities of the source (default: the system's)"),
        ("cert", "client certificate for the source, with --source.tls.key"),
        ("key", "its private key"),
    ):
        parser.flag(f"--source.tls.{name}", dest=f"tls_{name}", type=Path, default=None, help=what)
    parser.flag(
        "--source.bearer-token-file",
        dest="token_file",
        type=Path,
        default=None,
        help="token for the source, read for each request",
    )
    parser.flag("--source.basic-auth.username", dest="auth_user", default="", help="user of the source")
    parser.flag(
        "--source.basic-auth.password-file",
        dest="password_file",
        type=Path,
        default=None,
        help="its password, read for each request",
    )
    parser.flag(
        "--source.header",
        dest="headers",
        action="append",
        default=[],
        help="one more header for the source, as 'X-Scope-OrgID: team-a' for Mimir; once for each",
    )


def build_digest_parser() -> Parser:
    """Flags of `digest`."""
    parser = Parser("gpu-exporter digest", "What the GPUs of some days came to: by tenant, by holder, against before.")
    _add_prometheus(parser)
    parser.flag("--since", type=positive_duration, default="7d", help="length of time, up to now (default 7d)")
    parser.flag(
        "--format", dest="format", choices=("text", "html", "json"), default="text", help="output (default text)"
    )
    add_common(parser)
    return parser


def build_reconcile_parser() -> Parser:
    """Flags of `reconcile`."""
    parser = Parser("gpu-exporter reconcile", "Decide which holders are underused. Without --apply nothing is written.")
    _add_prometheus(parser)
    parser.flag(
        "--source.exporter",
        dest="exporters",
        action="append",
        default=[],
        help="URL of an exporter's metrics; once for each",
    )
    parser.flag(
        "--alertmanager.url",
        dest="alertmanager",
        default="",
        help="Alertmanager that sends the owners' alerts, for actions: who was not warned keeps the GPUs",
    )
    parser.flag(
        "--alertmanager.filter",
        dest="alert_filters",
        action="append",
        default=[],
        help="matcher of its alerts, as 'cluster=\"a\"' where it has those of several clusters; once for each",
    )
    parser.flag(
        "--apply",
        action="store_true",
        default=False,
        help="mark pods (label) and Slurm jobs (AdminComment, see --slurm.field), and withdraw the marks",
    )
    parser.flag(
        "--remove-all",
        dest="remove_all",
        action="store_true",
        default=False,
        help="list every mark that stands and exit; with --apply, withdraw them",
    )
    parser.flag(
        "--kubernetes",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="mark pods (default: with a service account or --kubernetes.kubeconfig)",
    )
    _add_kubeconfig(parser)
    parser.flag(
        "--kubernetes.condition",
        dest="condition",
        action="store_true",
        default=False,
        help="set the pod condition gpu-exporter.io/Underused beside the label; needs patch on pods/status",
    )
    _add_lease(
        parser,
        "NAMESPACE/NAME of a Lease: of several reconcilers with it, one writes; a dry run only reads its pause",
    )
    _add_pause_file(parser)
    parser.flag(
        "--state.directory",
        dest="state_directory",
        type=Path,
        default=None,
        help="directory for the record of decisions and the journal of acts, where there is no --kubernetes.lease",
    )
    add_resources(parser)
    parser.flag(
        "--slurm",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="mark Slurm jobs (default: when squeue and scontrol are on PATH)",
    )
    parser.flag(
        "--slurm.field",
        dest="field",
        choices=("auto", "AdminComment", "Extra", "Comment"),
        default="auto",
        help="field of jobs that carries marks (default: AdminComment, where taken or refused Extra, on 22.05 Comment)",
    )
    parser.flag(
        "--slurm.collector",
        dest="collector",
        action="store_true",
        default=False,
        help="be the slurm-collector too: serve its answers at --web.listen-address",
    )
    parser.flag(
        "--web.listen-address",
        dest="address",
        default="",
        help="[host]:port of the reconciler's own metrics (default: none)",
    )
    add_web_config(parser)
    parser.flag(
        "--once",
        action="store_true",
        default=False,
        help="print the decision table and exit; with --apply after one cycle",
    )
    parser.flag(
        "--explain",
        default="",
        help="with --once: NAMESPACE/POD or job/ID (also ARRAY_TASK, LEADER+OFFSET), every number behind its stage",
    )
    parser.flag("--gpu", default="", help="in place of --explain: UUID of a GPU or MIG instance, whoever holds it")
    parser.flag(
        "--at",
        type=moment,
        default=None,
        help="with --explain or --gpu: at that time, 2027-01-15T18:00:00Z or 3h for three hours ago",
    )
    parser.flag(
        "--format",
        dest="format",
        choices=("table", "json"),
        default="table",
        help="form of --once (default table)",
    )
    parser.flag("--interval", type=positive_duration, default="30s", help="time between two cycles (default 30s)")
    parser.flag(
        "--audit.file",
        dest="audit",
        type=Path,
        default=None,
        help="with --apply: a JSON line for each mark set or withdrawn, - for standard output; with --explain: read it",
    )
    add_common(parser)
    return parser


def build_pause_parser() -> Parser:
    """Flags of `pause`."""
    parser = Parser(
        "gpu-exporter pause",
        "Mark nothing for a while: what is idle now could not work. Marks that stand go after policy.unsupported_max, "
        "and no idle time before the end counts. Without --for and --end: say whether there is a pause.",
    )
    parser.flag("--for", dest="lasts", type=positive_duration, default=None, help="length of the pause, e.g. 4h")
    parser.flag("--reason", default="", help="why, for whoever wonders; it is shown")
    parser.flag("--end", action="store_true", default=False, help="end the pause now")
    _add_pause_file(parser)
    _add_kubeconfig(parser)
    _add_lease(parser, "NAMESPACE/NAME of the reconciler's Lease, which keeps the pause")
    return parser


def _add_pause_file(parser: Parser) -> None:
    parser.flag(
        "--pause.file",
        dest="pause_file",
        type=Path,
        default=None,
        help="file that keeps the pause of `gpu-exporter pause`, the same for it and for reconcile (default: none)",
    )


def _add_kubeconfig(parser: Parser) -> None:
    parser.flag(
        "--kubernetes.kubeconfig",
        dest="kubeconfig",
        default="",
        help="way to the API server (default: the service account)",
    )


def _add_lease(parser: Parser, what: str) -> None:
    parser.flag("--kubernetes.lease", dest="lease", default="", help=f"{what} (default: none)")
