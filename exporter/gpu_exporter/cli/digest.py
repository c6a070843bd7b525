"""`gpu-exporter digest`: reports the usage of GPUs in a period, from Prometheus."""

from __future__ import annotations

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Parser, add_config, add_logging, read_config
from gpu_exporter.cli.reconciler_flags import add_prometheus, build_client


def build_parser() -> Parser:
    """Flags of `digest`."""
    parser = Parser("digest", "Report the usage of a period: by tenant, by holder, compared with the period before.")
    parser.flag("--since", type=positive_duration, default="7d", help="length of the period, up to now (default 7d)")
    parser.flag(
        "--format",
        dest="format",
        choices=("text", "html", "json"),
        default="text",
        metavar="FORM",
        help="output format: text, html or json (default text)",
    )
    add_prometheus(parser)
    parser.section("general")
    add_config(parser)
    add_logging(parser)
    return parser


def run(given: list[str]) -> int:
    """Prints the digest; the exit code."""
    parser = build_parser()
    options = parser.read(given)
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.reports.digest.run import print_digest

    if options.prometheus is None:
        parser.error("--source.prometheus is needed")
    try:
        client = build_client(options, options.prometheus)
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    return print_digest(options.prometheus, options.matcher, settings.alerts, client, options.since, options.format)
