"""Generates the reference of the commands (docs/commands.md) from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.parser import Parser
from gpu_exporter.common.exits import WORDS
from tools.files import ROOT

HEAD = """# Commands

<!-- Generated from the parsers by `make generate`. -->

`gpu-exporter COMMAND --help` prints the usage and the flags of one command. Every command also has `--version`.
`gpu-exporter completion bash` (or `zsh`) prints a completion script.

## Environment

Three services also read their flags from environment variables:

| service | prefix of its variables |
| --- | --- |
| the exporter, and `gpu-exporter holders` | `GPU_EXPORTER_` |
| `gpu-exporter reconcile` | `GPU_EXPORTER_RECONCILE_` |
| `gpu-exporter slurm-collector` | `GPU_EXPORTER_SLURM_COLLECTOR_` |

A variable has the name of its flag in capitals after the prefix, with `_` in place of `.` and `-`: for
`--web.listen-address`, the exporter reads `GPU_EXPORTER_WEB_LISTEN_ADDRESS`.

- A flag replaces its variable. If the flag can be repeated, it replaces all items of the variable.
- An empty variable counts as not set. To set an empty value, use the flag: `--state.directory=`.
- For a switch such as `--[no-]collector.xid`, the variable is `true` or `false`.
- For a flag that can be repeated, the variable has one item on each line. Commas also separate hosts, resources,
  monitors, reservations and replayed files, except in brackets: `vendor.com/gpu.{1,3}` is one item.

## Exit codes

| code | meaning |
| --- | --- |
"""


def render_commands() -> str:
    """Returns the page. It describes flags that commands share at the first of these commands."""
    rows = "".join(f"| {code:d} | {words} |\n" for code, words in WORDS.items())
    parts = [HEAD + rows]
    described: dict[tuple[str, str | None], str] = {}  # titles, by name and help of a flag
    flags: dict[str, list[str]] = {}  # described below each title
    for name, command in {"": SERVE, **COMMANDS}.items():
        parser: Parser = command.load().build_parser()
        title = f"gpu-exporter {name}".rstrip()
        summary = command.summary[0].upper() + command.summary[1:]
        places = [described.setdefault((_name(action), action.help), title) for action in _shown(parser)]
        own: list[argparse.Action] = []
        shared: dict[str, list[str]] = {}
        for action, where in zip(_shown(parser), places, strict=True):
            if where == title or places.count(where) == 1:  # a reader need not follow a link for one flag
                own.append(action)
            else:
                shared.setdefault(where, []).append(_name(action))
        flags[title] = [_name(action) for action in own]
        verbs = [_code(_name(action)) for action in _shown(parser) if action in parser.verbs.values()]
        texts = [f"{summary}.", _table(parser, own).rstrip()]
        texts += [
            f"Flags as in [{where}](#{where.replace(' ', '-')}): {', '.join(map(_code, _join(names, flags[where])))}."
            for where, names in shared.items()
        ]
        texts.append(f"Without a variable: {', '.join(verbs)}." if verbs else "")
        parts.append("\n\n".join(filter(None, (f"\n## {title}", *texts))))
        parts.append("\n")
    return "".join(parts)


def _join(names: Sequence[str], described: Sequence[str]) -> list[str]:
    """Writes `--source.*` in place of several flags, if they are all flags of this kind at their command."""
    joined: dict[str, None] = {}
    for name in names:
        words = name.replace("[no-]", "").split(".")
        for length in range(1, len(words) + 1):
            start = ".".join(words[:length])
            kind = [each for each in described if f"{each.replace('[no-]', '')}.".startswith(f"{start}.")]
            if len(kind) > 1 and set(kind) <= set(names):
                joined[f"{start}.*"] = None
                break
        else:
            joined[name] = None
    return list(joined)


def _code(text: str) -> str:
    return f"`{text}`"


def _table(parser: Parser, shown: Sequence[argparse.Action]) -> str:
    lines = ["| flag | meaning |\n| --- | --- |\n"]
    for action in shown:
        what = f"{_collector(action) or action.help or ''}. {parser.more.get(action.dest, '')}".strip()
        lines.append(f"| `{_spell(action)}` | {_escape(what)} |\n")
    return "".join(lines) if shown else ""


def _shown(parser: Parser) -> Iterator[argparse.Action]:
    return (
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and action.dest not in ("help", "version")
    )


def _name(action: argparse.Action) -> str:
    return _spell(action).split()[0]


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
