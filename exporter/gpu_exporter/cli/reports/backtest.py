"""`gpu-exporter backtest`: replays policies on the history that a site already has."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.parser import Options, Parser, add_general, read_config
from gpu_exporter.cli.reconciler_flags import add_prometheus
from gpu_exporter.cli.reports.flags import add_history, add_period, add_prices, build_wish

FORMS = ("text", "json", "csv")
POLICIES_MAX = 2


def build_parser() -> Parser:
    parser = Parser(
        "backtest",
        "Replay the reconciler's policy on the history in a Prometheus: which holders it would have called underused, "
        "and which of them worked again. Reads gpu-exporter's series, or those of dcgm-exporter or jobstats' exporter. "
        "Writes nothing to pods, jobs or the reconciler's record.",
    )
    add_period(parser, "30d")
    parser.flag(
        "--policy",
        dest="policies",
        type=Path,
        action="append",
        metavar="FILE",
        help="configuration file with the sections `policy` and `policies`; twice to compare (default: the defaults)",
    )
    parser.flag("--format", choices=FORMS, default="text", metavar="FORM", help="text, json or csv (default text)")
    parser.flag("--output", type=Path, help="file to replace, in place of standard output")
    add_prices(parser)
    add_history(parser)
    add_prometheus(parser, matcher="")
    add_general(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    files = options.policies or [options.config_file]
    if len(files) > POLICIES_MAX:
        parser.error(f"--policy: {len(files)} files: compare two of them")
    if options.prometheus is None:
        parser.error("--source.prometheus is needed: a PromQL API with the history")
    from gpu_exporter.reconciler.decision.rulebook import Rulebook
    from gpu_exporter.reports.backtest.run import run_backtest

    settings = read_config(parser, options.config_file).settings
    configs = [(str(path or "(defaults)"), read_config(parser, path)) for path in files]
    books = [(name, Rulebook(config.settings.policy, config.rules)) for name, config in configs]
    client, wish = build_wish(parser, options, settings.alerts)
    return run_backtest(options.prometheus, client, wish, books, options.format, options.output)
