"""`gpu-exporter job`: reports the use of one job's or pod's GPUs, while it runs or after its end."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Options, Parser, add_help
from gpu_exporter.cli.reconciler_flags import add_exporters, add_prometheus, build_client

FORMS = ("text", "json", "line")
RECORDS = "/var/lib/gpu-exporter/jobs"


def build_parser() -> Parser:
    parser = Parser(
        "job",
        "Report the use of the GPUs of one job or pod, running or ended: how much was used, idle, stalled and not "
        "measured, of what it held, and what to change. Reads Prometheus, sacct, and the records of ended jobs on this "
        "node, as far as the user may read them. Writes nothing.",
        usage="gpu-exporter job NAME [FLAGS]",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="*", help="ID, ARRAY_TASK, LEADER+OFFSET, NAMESPACE/POD or NAMESPACE/OWNER"
    )
    parser.flag("--since", type=positive_duration, default="7d", help="how far to look back for the job (default 7d)")
    parser.flag(
        "--format",
        choices=FORMS,
        default="text",
        is_verb=True,
        metavar="FORM",
        help="output format: text, json, or line for one line (default text)",
    )
    parser.flag(
        "--records",
        type=Path,
        default=Path(RECORDS),
        metavar="FOLDER",
        help=f"records of ended jobs on this node (default {RECORDS})",
    )
    add_prometheus(parser)
    add_exporters(parser)
    parser.section("general")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    from gpu_exporter.reports.jobs.names import FORMS as NAMES
    from gpu_exporter.reports.jobs.names import parse_name
    from gpu_exporter.reports.jobs.run import JobSources, report_job
    from gpu_exporter.reports.top.nodes import PATH, parse_node

    text = " ".join(options.name)
    asked = parse_name(text)
    if asked is None:
        parser.error(f"{text!r} names no job: {NAMES}" if text else f"name a job: {NAMES}")
    exporters = [address.at(PATH) for address in options.exporters]
    if exporters and options.prometheus is not None:
        parser.error("--source.exporter cannot be combined with --source.prometheus, which has the same series")
    is_local = not exporters and options.prometheus is None
    try:
        client = build_client(options, options.prometheus, *exporters)
        exporters = [parse_node("127.0.0.1")] if is_local else exporters
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
    sources = JobSources(options.prometheus, options.matcher, client, exporters, options.records, is_local)
    return report_job(asked, options.since, sources, options.format)
