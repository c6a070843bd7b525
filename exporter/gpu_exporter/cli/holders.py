"""`gpu-exporter holders`: lists the holders of each GPU, with the evidence for each."""

from __future__ import annotations

from gpu_exporter.cli.agent_flags import add_agent_flags, add_waiting_flags
from gpu_exporter.cli.once import print_reading
from gpu_exporter.cli.parser import Options, Parser, add_format
from gpu_exporter.cli.serve import PREFIX, check_files


def build_parser() -> Parser:
    """Builds the parser for the flags of `holders`.

    The command reads the daemon's data, so it uses the daemon's environment variables.
    """
    parser = Parser(
        "holders",
        "List the holder of each GPU, with the evidence. Asks the exporter of this node, or reads the node itself if "
        "none runs.",
        prefix=PREFIX,
    )
    parser.section("one reading (no variables)")
    add_format(parser)
    add_waiting_flags(parser)
    add_agent_flags(parser)
    parser.set_defaults(once=True, check=None)
    return parser


def run(parser: Parser, options: Options) -> int:
    options.format = "json" if options.format == "json" else "holders"
    check_files(parser, options)
    return print_reading(parser, options)
