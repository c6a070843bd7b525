"""`gpu-exporter explain`: explains the stage of one holder, and prints the history of its marks."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.arguments import moment
from gpu_exporter.cli.parser import Options, Parser, add_format, add_general, read_config
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


def build_parser() -> Parser:
    parser = Parser(
        "explain",
        "Explain the decision about one holder, with every number behind it. Writes nothing.",
        usage="gpu-exporter explain HOLDER [FLAGS]",
    )
    parser.add_argument(
        "holder",
        metavar="HOLDER",
        nargs="*",
        help="NAMESPACE/POD, POD, job/ID (also job/ARRAY_TASK, job/LEADER+OFFSET), UUID of a GPU, or NODE:INDEX",
    )
    parser.flag(
        "--at",
        type=moment,
        is_verb=True,
        metavar="TIME",
        help="time of the decision: 2027-01-15T18:00:00Z, or 3h for three hours ago (default: now)",
    )
    add_format(parser)
    parser.flag(
        "--audit.file",
        dest="audit",
        type=Path,
        help="audit log of the reconciler: also print the changes of this holder's marks",
    )
    add_prometheus(parser)
    add_exporters(parser)
    add_targets(parser)
    add_pause_places(parser)
    add_general(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    holder = " ".join(options.holder)
    if not holder:
        parser.error("name a holder: NAMESPACE/POD, POD, job/ID, the UUID of its GPU, or NODE:INDEX")
    if options.at is not None and (options.pause_file is not None or options.lease):
        parser.error("--at cannot be combined with --pause.file or --kubernetes.lease: only the latest pause is stored")
    config = read_config(parser, options.config_file)
    from gpu_exporter.common.logs import set_up_logging
    from gpu_exporter.reconciler.decision.rulebook import Rulebook
    from gpu_exporter.reconciler.marks import MarkError
    from gpu_exporter.reconciler.runtime.explain import ExplainRequest, explain_once, explain_past
    from gpu_exporter.reconciler.runtime.targets import build_preview

    set_up_logging(options.log_level, options.log_format)
    book = Rulebook(config.settings.policy, config.rules)
    question = ExplainRequest(holder, options.format, options.audit)
    try:
        client = build_client(options, options.prometheus, *options.exporters)
        source = build_evidence(options, client, book, options.at)
        if options.at is not None:
            return explain_past(source, book, question, options.at)
        pauses = list_pauses(options, with_lease=True)
        preview = build_preview(book.site, find_targets(options))
        return explain_once(source, book, question, preview, pauses, actions=config.settings.actions)
    except (ValueError, OSError, MarkError, ModuleNotFoundError) as exc:
        parser.fail(str(exc))
