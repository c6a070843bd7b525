"""`gpu-exporter version`: prints the version, as --version does."""

from __future__ import annotations

import sys

from gpu_exporter.cli.parser import Options, Parser, add_help
from gpu_exporter.common.version import VERSION


def build_parser() -> Parser:
    parser = Parser("version", "Print the version.", usage="gpu-exporter version")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    sys.stdout.write(f"gpu-exporter {VERSION}\n")
    return 0
