"""The flags that several reports share: grouping, period, prices, and delivery."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.arguments import checked, moment, positive_duration
from gpu_exporter.cli.parser import Parser
from gpu_exporter.cli.reconciler_flags import build_client

if TYPE_CHECKING:
    from gpu_exporter.common.config.defaults import Alerts
    from gpu_exporter.common.promql.client import Client
    from gpu_exporter.reports.usage.deliver import Mail
    from gpu_exporter.reports.usage.run import Wish

FORMS = ("text", "html", "mail", "json", "csv", "tsv")
FLOORS = (0.0, 0.001, 0.01)
REST_MAX = 100.0


def add_view(parser: Parser, by: tuple[str, ...]) -> None:
    parser.flag(
        "--by",
        choices=by,
        default="tenant",
        metavar="GROUP",
        help=f"rows of the table of hours: {', '.join(by)} (default tenant: namespace, or account with its users)",
    )
    parser.flag("--top", type=_positive, default=15, help="rows of each table (default 15)")
    parser.flag(
        "--format",
        choices=FORMS,
        default="text",
        metavar="FORM",
        help=f"output format: {', '.join(FORMS)} (default text); mail is HTML without plots",
    )


def add_period(parser: Parser, since: str) -> None:
    """Adds the flags for the period. `since`: its default length."""
    parser.flag("--since", type=positive_duration, default=since, help=f"length of the period (default {since})")
    parser.flag(
        "--until",
        type=moment,
        metavar="TIME",
        help="end of the period, as 2026-11-29T00:00Z or an age such as 2h (default: the last full hour)",
    )


def add_prices(parser: Parser) -> None:
    """Adds the flags for prices, and for the engine activity that counts as zero."""
    parser.flag(
        "--price",
        dest="prices",
        type=checked("gpu_exporter.reports.usage.prices", "parse_price"),
        action="append",
        metavar="[MODEL=]PRICE",
        help="price of a GPU-hour, for one model or all others; repeatable (default: model:gpu_price:per_hour)",
    )
    parser.flag("--currency", default="", metavar="TEXT", help="currency of the prices, e.g. EUR")
    parser.flag(
        "--floor",
        type=float,
        choices=FLOORS,
        default=0.001,
        metavar="RATIO",
        help="highest engine activity of dcgm-exporter that counts as zero: 0, 0.001 or 0.01 (default 0.001)",
    )


def add_history(parser: Parser) -> None:
    parser.flag(
        "--keep",
        dest="kept",
        type=Path,
        metavar="FOLDER",
        help="keep the answers in this folder; after an interruption, the same command continues with them",
    )
    parser.flag(
        "--rest",
        type=_parse_rest,
        default=0.1,
        metavar="RATIO",
        help="pause after each query, at most 5s, as a share of the time that the query took (default 0.1)",
    )


def add_delivery(parser: Parser) -> None:
    parser.flag("--output", type=Path, help="file to replace, in place of standard output")
    parser.flag(
        "--mail.smtp",
        type=checked("gpu_exporter.reports.usage.deliver", "parse_relay"),
        metavar="HOST:PORT",
        help="mail the report through this relay, without a login; with TLS if the relay offers TLS (default port 25)",
    )
    parser.flag(
        "--mail.from",
        type=checked("gpu_exporter.reports.usage.deliver", "parse_mailbox"),
        metavar="ADDRESS",
        help="sender of the mail",
    )
    parser.flag(
        "--mail.to",
        action="append",
        type=checked("gpu_exporter.reports.usage.deliver", "parse_mailbox"),
        metavar="ADDRESS",
        help="receiver; can be repeated",
    )


def read_mail(parser: Parser, options: argparse.Namespace) -> Mail | None:
    """Returns the route of the mail, None if no mail is requested. Ends the process if the route is incomplete."""
    given = [options.mail_smtp, options.mail_from, options.mail_to]
    if not any(given):
        return None
    if not all(given):
        parser.error("--mail.smtp, --mail.from and --mail.to are needed together")
    from gpu_exporter.reports.usage.deliver import Mail

    host, port = options.mail_smtp
    return Mail(host, port, options.mail_from, tuple(options.mail_to))


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999,999")
    return int(text)


def build_wish(
    parser: Parser, options: argparse.Namespace, alerts: Alerts, *, has_trend: bool = False
) -> tuple[Client, Wish]:
    """Builds client and request of a report from a history. Ends the process if flags are invalid."""
    from gpu_exporter.common.clock import SYSTEM_CLOCK
    from gpu_exporter.reports.history.kept import Folder
    from gpu_exporter.reports.usage.prices import refuse_twice
    from gpu_exporter.reports.usage.run import Wish

    try:
        refuse_twice(options.prices)
    except ValueError as exc:
        parser.error(f"--price: {exc}")
    try:
        client = build_client(options, options.prometheus)
        kept = Folder(options.kept, client.tenant(options.prometheus)) if options.kept is not None else None
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    until = SYSTEM_CLOCK.wall() if options.until is None else options.until
    wish = Wish(
        options.since, until, options.matcher, options.floor, options.prices, options.currency, alerts, options.rest,
        has_trend, kept,
    )  # fmt: skip
    return client, wish


def _parse_rest(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= REST_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio from 0 to {REST_MAX:g}")
    return value
