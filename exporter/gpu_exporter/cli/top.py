"""`gpu-exporter top`: shows the GPUs of one or several nodes on the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.cli.arguments import duration
from gpu_exporter.cli.parser import Options, Parser, add_format, add_help

if TYPE_CHECKING:
    from gpu_exporter.common.address import Address

LOGIN = "--from.basic-auth.username with --from.basic-auth.password-file"
SORTS = ("waste", "gpu", "util", "memory", "power", "temp", "held")  # a test compares with top.screen.ORDERS


def build_parser() -> Parser:
    parser = Parser("top", "Show the GPUs of one or several nodes, and their holders.")
    parser.addresses(
        "--from",
        _parse_node,
        LOGIN,
        dest="nodes",
        metavar="HOST:PORT",
        help="exporter of a node, as HOST, HOST:PORT or URL; repeatable, or a list: gpu-[01-40] (default "
        "127.0.0.1:9836)",
    )
    parser.flag(
        "--from.basic-auth.username", dest="auth_user", default="", metavar="NAME", help="user of all these exporters"
    )
    parser.flag(
        "--from.basic-auth.password-file",
        dest="password_file",
        type=Path,
        help="file with this user's password; read for each request",
    )
    parser.flag("--interval", type=duration, default=2.0, help="time between two readings (default 2s)")
    parser.flag(
        "--sort",
        choices=SORTS,
        default="waste",
        metavar="ORDER",
        help=f"order of rows: {', '.join(SORTS)} (default waste)",
    )
    parser.flag("--filter", dest="words", default="", metavar="WORDS", help="only rows that contain all of these words")
    parser.flag(
        "--once", action="store_true", help="print the table and exit (default if the output is not a terminal)"
    )
    add_format(parser, more="; json prints once")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Shows the GPUs until q is pressed, or prints them once. Returns the exit code."""
    from gpu_exporter.common.promql.client import Client, Credentials
    from gpu_exporter.reports.top.screen import ViewOptions
    from gpu_exporter.reports.top.terminal import find_obstacle, print_once, run_top

    try:
        credentials = Credentials(None, options.auth_user, options.password_file, flags="--from")
        nodes = list(dict.fromkeys(options.nodes or [_parse_node("127.0.0.1")]))
        for node in nodes:
            credentials.check_address(node)
    except ValueError as exc:
        parser.fail(str(exc))
    fetch = Client(credentials=credentials)
    wish = ViewOptions(options.sort, options.words)
    is_live = sys.stdout.isatty() and sys.stdin.isatty() and options.format == "table" and not options.once
    if is_live and (obstacle := find_obstacle(os.environ)):
        parser.warn(f"{obstacle}: this is one reading. Set TERM for a live table, e.g. TERM=xterm-256color")
        is_live = False
    if not is_live:
        return print_once(nodes, wish, fetch, options.format)
    return run_top(nodes, wish, options.interval, fetch)


def _parse_node(text: str) -> Address:
    from gpu_exporter.reports.top.nodes import parse_node

    return parse_node(text)
