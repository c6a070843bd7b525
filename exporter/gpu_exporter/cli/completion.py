"""`gpu-exporter completion`: prints a shell's completion, generated from the parsers (`make generate`)."""

from __future__ import annotations

import sys

from gpu_exporter.cli.contrib import FOLDER
from gpu_exporter.cli.parser import Parser, add_help

SCRIPTS = FOLDER / "completion"
SHELLS = {"bash": "gpu-exporter.bash", "zsh": "_gpu-exporter"}


def build_parser() -> Parser:
    parser = Parser(
        "completion",
        "Print the completion script for a shell.\n\n"
        "  bash: gpu-exporter completion bash > /etc/bash_completion.d/gpu-exporter\n"
        "  zsh:  gpu-exporter completion zsh > /usr/share/zsh/site-functions/_gpu-exporter",
        usage="gpu-exporter completion SHELL",
    )
    parser.add_argument("shell", metavar="SHELL", choices=sorted(SHELLS), help="bash or zsh")
    add_help(parser)
    return parser


def run(given: list[str]) -> int:
    """Prints the script. Returns the exit code."""
    parser = build_parser()
    options = parser.read(given)
    try:
        text = (SCRIPTS / SHELLS[options.shell]).read_text("utf-8")
    except OSError as exc:
        parser.fail(str(exc))
    sys.stdout.write(text)
    return 0
