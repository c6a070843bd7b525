"""`gpu-exporter digest`: reports the usage of GPUs in a period, from Prometheus."""

from __future__ import annotations

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Options, Parser, add_general, read_config
from gpu_exporter.cli.reconciler_flags import add_prometheus, build_client
from gpu_exporter.cli.reports.flags import add_delivery, add_view, read_mail

BY = ("tenant", "namespace", "account", "user")  # of the groups in reports/usage/render/view.py, those of tenants


def build_parser() -> Parser:
    parser = Parser("digest", "Report the usage of a period: by tenant, by holder, compared with the period before.")
    parser.flag("--since", type=positive_duration, default="7d", help="length of the period, up to now (default 7d)")
    add_view(parser, BY)
    add_delivery(parser)
    add_prometheus(parser)
    add_general(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.reports.usage.render.view import ReportView
    from gpu_exporter.reports.usage.run import run_digest
    from gpu_exporter.reports.usage.tenants.read import TenantReader

    if options.prometheus is None:
        parser.error("--source.prometheus is needed")
    mail = read_mail(parser, options)
    try:
        client = build_client(options, options.prometheus)
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    reader = TenantReader(options.prometheus, options.matcher, settings.alerts, client)
    return run_digest(reader, options.since, ReportView(options.by, options.top), options.format, options.output, mail)
