"""`gpu-exporter demo`: a simulated node on a fast clock, with the reconciler's dry run."""

from __future__ import annotations

import sys

from gpu_exporter.cli.arguments import duration
from gpu_exporter.cli.parser import Options, Parser, add_help

PIPED_S = 60.0  # how long the demo lasts without a terminal, where no user can press Ctrl-C


def build_parser() -> Parser:
    parser = Parser("demo", "Simulate a node on a fast clock, with the reconciler's dry run. Needs no GPU.")
    parser.flag(
        "--web.listen-address",
        dest="address",
        default="127.0.0.1:0",
        metavar="[HOST]:PORT",
        help="address of the status page (default 127.0.0.1, free port)",
    )
    parser.flag("--speed", type=float, default=180.0, help="simulated seconds in a real second (default 180)")
    parser.flag("--duration", type=duration, help="end after this time (default: 60s; in a terminal, no limit)")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Simulates until Ctrl-C or the end. Returns the exit code."""
    from gpu_exporter.cli.run_demo import run_demo

    lasts_s: float | None = options.duration
    if lasts_s is None and not sys.stdout.isatty():
        lasts_s = PIPED_S
    try:
        return run_demo(options.address, options.speed, lasts_s)
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
