"""`gpu-exporter report`: reports the usage of GPUs from the history that a site already has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.parser import Options, Parser, add_general, read_config
from gpu_exporter.cli.reconciler_flags import add_prometheus
from gpu_exporter.cli.reports.flags import (
    add_delivery,
    add_history,
    add_period,
    add_prices,
    add_view,
    build_wish,
    read_mail,
)

if TYPE_CHECKING:
    from gpu_exporter.common.config.defaults import Settings
    from gpu_exporter.common.promql.client import Client
    from gpu_exporter.reports.usage.run import Wish

GROUPS = ("tenant", "team", "namespace", "account", "user", "workload", "model")
OF_REPORTS = ("--by", "--top", "--price", "--currency", "--floor", "--no-trend")
OF_SERVERS = ("--against", "--since", "--until", "--floor", "--no-trend", "--keep", "--rest")


def build_parser() -> Parser:
    parser = Parser(
        "report",
        "Report the GPU-hours of a period and their cost, by team, namespace, account, user, workload or model. Reads "
        "files, or a Prometheus that scrapes dcgm-exporter, nvidia_gpu_exporter or the exporter of jobstats. The nodes "
        "need no gpu-exporter.",
    )
    add_period(parser, "7d")
    add_view(parser, GROUPS)
    add_prices(parser)
    parser.flag("--no-trend", dest="has_trend", action="store_false", help="do not read the period before")
    add_history(parser)
    add_delivery(parser)
    add_prometheus(parser, matcher="")
    parser.flag(
        "--source.file",
        dest="files",
        type=Path,
        action="append",
        metavar="FILE",
        help="CSV log of nvidia-smi, recording of `gpu-exporter record`, or a folder of them, in place of a server; "
        "repeatable",
    )
    parser.flag(
        "--against",
        choices=("sacct",),
        metavar="SOURCE",
        help="sacct: compare the hours held of each Slurm account with sacct on this host, and show the reasons for "
        "the difference; the formats are text and json",
    )
    add_general(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    settings = read_config(parser, options.config_file).settings
    if options.files:
        return _report_files(parser, options, settings)
    from gpu_exporter.reports.usage.render.view import ReportView
    from gpu_exporter.reports.usage.run import run_report

    if options.prometheus is None:
        parser.error("--source.prometheus or --source.file is needed: a PromQL API with the history, or files")
    mail = read_mail(parser, options)
    client, wish = build_wish(parser, options, settings.alerts, has_trend=options.has_trend)
    if options.against is not None:
        return _compare(parser, options, client, wish)
    view = ReportView(options.by, options.top)
    return run_report(options.prometheus, client, wish, view, options.format, options.output, mail)


def _compare(parser: Parser, options: Options, client: Client, wish: Wish) -> int:
    """Delivers the comparison with Slurm's record. Returns the exit code."""
    from gpu_exporter.reports.accounting.render import FORMS
    from gpu_exporter.reports.accounting.run import run_comparison

    if wrong := [flag for flag in parser.given if flag in OF_REPORTS or flag.startswith("--mail.")]:
        parser.error(f"--against cannot be combined with {', '.join(wrong)}: it compares the hours of accounts only")
    if options.format not in FORMS:
        parser.error(f"--against has the formats {' and '.join(FORMS)}, not {options.format}")
    return run_comparison(options.prometheus, client, wish, options.format, options.output)


def _report_files(parser: Parser, options: Options, settings: Settings) -> int:
    """Delivers the report of files. Returns the exit code, which is PARTIAL if some of them cannot be read."""
    from gpu_exporter.cli.reports.report_files import FileTimes
    from gpu_exporter.common.errors import AnswerError
    from gpu_exporter.common.exits import Exit
    from gpu_exporter.reports.usage.deliver import deliver
    from gpu_exporter.reports.usage.files import report_time
    from gpu_exporter.reports.usage.prices import given_prices
    from gpu_exporter.reports.usage.render.view import ReportView

    of_server = [flag for flag in parser.given if flag in OF_SERVERS or flag.startswith("--source.")]
    if wrong := [flag for flag in of_server if flag != "--source.file"]:
        parser.error(
            f"--source.file cannot be combined with {', '.join(wrong)}: files have their own period, and no server"
        )
    mail = read_mail(parser, options)
    files = FileTimes(settings)
    files.read(options.files)
    for text in files.failures:
        parser.warn(text)
    prices = given_prices(options.prices, options.currency)
    try:
        report = report_time(files.time, files.sources, [*files.failures, *files.notes], prices)
        deliver(report, ReportView(options.by, options.top), options.format, options.output, mail)
    except AnswerError as exc:
        parser.warn(str(exc))
        return Exit.NO_DATA
    except OSError as exc:  # of the file or of the mail
        parser.fail(str(exc))
    return Exit.PARTIAL if files.failures else Exit.DONE
