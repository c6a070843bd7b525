"""Generates the reference of the commands (docs/commands.md) from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.parser import Parser
from gpu_exporter.common.exits import WORDS
from tools.files import ROOT

HEAD = """# Commands

<!-- Generated from the parsers by `make generate`. -->

`gpu-exporter COMMAND --help`, or `gpu-exporter help COMMAND`, prints the usage and the flags of one command. Every
command also has `--version`. `gpu-exporter completion bash` prints the completion script for bash, and
`gpu-exporter completion zsh` the script for zsh.

## Environment

Three services also read their settings from environment variables:

| service | prefix of its variables |
| --- | --- |
| the exporter | `GPU_EXPORTER_` |
| `gpu-exporter reconcile` | `GPU_EXPORTER_RECONCILE_` |
| `gpu-exporter slurm-collector` | `GPU_EXPORTER_SLURM_COLLECTOR_` |

`gpu-exporter holders` reads the exporter's variables. Other commands read no variables. Flags of a single run, such as
`--once` and `--format`, have no variable either.

- If a flag and its variable are both set, only the flag counts. If the flag can be repeated, its items replace all
  items of the variable.
- An empty variable counts as not set. To set an empty value, use the flag: `--state.directory=`.
- For a switch such as `--[no-]collector.xid`, the variable is `true` or `false`.
- For a flag that can be repeated, the variable has one item on each line. For hosts, resources, monitors,
  reservations and replayed files, commas also separate items. Commas in brackets do not: `vendor.com/gpu.{1,3}` is one
  item.

## Exit codes

| code | meaning |
| --- | --- |
"""


# Commands that take flags of an earlier command. The page describes these flags once.
FAMILIES = ("attribution", "collector", "devices", "path")  # the first words of flags that `holders` shares
SHARING = {"holders": "", "explain": "reconcile", "pause": "reconcile", "digest": "reconcile", "report": "digest"}


def render_commands() -> str:
    rows = "".join(f"| {code:d} | {words} |\n" for code, words in WORDS.items())
    parts = [HEAD + rows]
    for name, command in {"": SERVE, **COMMANDS}.items():
        parser: Parser = command.load().build_parser()
        title = f"gpu-exporter {name}".rstrip()
        summary = command.summary[0].upper() + command.summary[1:]
        shared = _find_shared(name, parser)
        table = _table(parser, shared).rstrip()
        parts.append("\n\n".join(text for text in (f"\n## {title}", f"{summary}.", table, _note(name, shared)) if text))
        parts.append("" if parts[-1].endswith("\n") else "\n")
    return "".join(parts)


def _find_shared(name: str, parser: Parser) -> list[argparse.Action]:
    """Returns the flags that the page has already described with an earlier command."""
    if name not in SHARING:
        return []
    earlier: Parser = {"": SERVE, **COMMANDS}[SHARING[name]].load().build_parser()
    described = {(action.dest, action.help) for action in _shown(earlier)}
    return [action for action in _shown(parser) if (action.dest, action.help) in described]


def _note(name: str, shared: Sequence[argparse.Action]) -> str:
    flags = [_spell(action).split()[0] for action in shared]
    if name == "holders":  # it shares nearly all of them
        flags = [re.sub(rf"^--(\[no-\])?({'|'.join(FAMILIES)})\b.*", r"--\2.*", flag) for flag in flags]
    listed = ", ".join(f"`{flag}`" for flag in dict.fromkeys(flags))
    return f"It also takes these flags of `{f'gpu-exporter {SHARING[name]}'.rstrip()}`: {listed}." if shared else ""


def _table(parser: Parser, shared: Collection[argparse.Action]) -> str:
    variables = {action.dest: variable for variable, action in parser.settings.items()}
    lines = ["| flag | variable | meaning |\n| --- | --- | --- |\n"]
    shown = [action for action in _shown(parser) if action not in shared]
    for action in shown:
        variable = f"`{variables[action.dest]}`" if action.dest in variables else ""
        what = f"{_collector(action) or action.help or ''}. {parser.more.get(action.dest, '')}".strip()
        lines.append(f"| `{_spell(action)}` | {variable} | {_escape(what)} |\n")
    return "".join(lines) if shown else ""


def _shown(parser: Parser) -> Iterator[argparse.Action]:
    return (
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and action.dest not in ("help", "version")
    )


def _spell(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"--[no-]{action.option_strings[0].removeprefix('--')}"
    name = action.option_strings[-1] if action.option_strings else str(action.metavar)
    if not action.option_strings or action.nargs == 0:
        return name
    return f"{name} {action.metavar or '|'.join(map(str, action.choices or ()))}".rstrip()


def _collector(action: argparse.Action) -> str:
    from gpu_exporter.agent.collectors.names import COLLECTORS

    name = action.dest.removeprefix("collector_")
    if action.dest == name or name not in COLLECTORS:
        return ""
    on, what = COLLECTORS[name]
    return f"{what} (default {'on' if on else 'off'})"


def _escape(text: str) -> str:
    return re.sub(r"([|<>*])", r"\\\1", text)


def build_all() -> Mapping[Path, str]:
    return {ROOT / "docs" / "commands.md": render_commands()}
