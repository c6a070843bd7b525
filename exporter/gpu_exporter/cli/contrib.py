"""`gpu-exporter contrib`: prints the folder with the files that a site installs."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_exporter.cli.parser import Options, Parser, add_help

FOLDER = Path(__file__).resolve().parents[1] / "contrib"


def build_parser() -> Parser:
    parser = Parser(
        "contrib",
        "Print the folder with the files that a site installs.\n\n"
        "  systemd/     units of the exporter, of the collector for Slurm, and of the weekly report\n"
        "  slurm/       prolog.sh, epilog.sh and health.sh\n"
        "  kubernetes/  kubectl's plugin gpu-idle, and a policy of the descheduler",
        usage="gpu-exporter contrib",
    )
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    sys.stdout.write(f"{FOLDER}\n")
    return 0
