"""`gpu-exporter check-config`: checks a configuration file and prints the effective configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_exporter.cli.parser import Options, Parser, add_format, add_help, read_config


def build_parser() -> Parser:
    parser = Parser(
        "check-config",
        "Check a configuration file and print the settings in force.",
        usage="gpu-exporter check-config FILE [FLAGS]",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML file")
    add_format(parser, "yaml")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    config = read_config(parser, options.file)
    from gpu_exporter.common.config.load import render_config, render_config_json

    sys.stdout.write(render_config_json(config) if options.format == "json" else render_config(config))
    return 0
