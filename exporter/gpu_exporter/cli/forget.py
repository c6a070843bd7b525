"""`gpu-exporter forget`: removes a GPU from the node's list of expected GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_exporter.cli.agent_flags import DEFAULT_STATE
from gpu_exporter.cli.parser import Options, Parser, add_help


def build_parser() -> Parser:
    parser = Parser(
        "forget", "Remove a GPU from the list of expected GPUs of this node.", usage="gpu-exporter forget UUID [FLAGS]"
    )
    parser.add_argument("uuid", metavar="UUID", help="GPU-..., as in the metric gpu_up")
    parser.flag(
        "--state.directory",
        type=Path,
        default=Path(DEFAULT_STATE),
        metavar="DIR",
        help=f"state directory of the exporter (default {DEFAULT_STATE})",
    )
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    from gpu_exporter.agent.inventory.expected import UnusableList, forget

    try:
        known = forget(options.state_directory, options.uuid)
    except (OSError, UnusableList) as exc:
        parser.fail(str(exc))
    if not known:
        parser.fail(
            f"{options.uuid}: this node does not expect such a GPU (see {options.state_directory}/devices.json)"
        )
    sys.stdout.write(f"{options.uuid} is no longer expected; if the GPU answers again, it will be expected again\n")
    return 0
