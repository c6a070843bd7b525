"""Makes the reference of the commands (docs/commands.md) and the completions for shells, from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import shtab

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.completion import SCRIPTS, SHELLS
from gpu_exporter.cli.parser import Parser
from gpu_exporter.common.exits import WORDS
from tools.files import ROOT

HEAD = """# Commands

<!-- Generated from the parsers by `make generate`. -->

`gpu-exporter COMMAND --help`, or `gpu-exporter help COMMAND`, prints the same for one command.
`gpu-exporter completion bash` and `gpu-exporter completion zsh` print the completion of a shell.

## Environment

A setting of a service can also come from a variable. The services are the exporter itself (prefix `GPU_EXPORTER_`),
`reconcile` (`GPU_EXPORTER_RECONCILE_`) and `slurm-collector` (`GPU_EXPORTER_SLURM_COLLECTOR_`). `gpu-exporter holders`
prints what the exporter reads, and takes the exporter's variables.

- A flag replaces its variable, also where the flag can be repeated: the lists are not joined.
- An empty variable counts as not set.
- A flag that can be repeated takes one item a line, so that an item may contain a comma. For hosts, resources, monitors
  and replayed files commas separate items too, if they are not within brackets: `vendor.com/gpu.{1,3}` is one item.
- A setting whose empty value has a meaning, such as `--state.directory=`, needs the flag for it.
- A flag that turns something on or off takes `true` or `false`.
- A flag that says what to do now (`--once`, `--apply`, `--remove-all`, `--format` and the like) has no variable, and a
  command that ends by itself has none either.

## Exit codes

| code | meaning |
| --- | --- |
"""


def render_commands() -> str:
    """The page."""
    rows = "".join(f"| {code:d} | {words} |\n" for code, words in WORDS.items())
    parts = [HEAD + rows]
    for name, command in {"": SERVE, **COMMANDS}.items():
        parser: Parser = command.load().build_parser()
        title = f"gpu-exporter {name}".rstrip()
        summary = command.summary[0].upper() + command.summary[1:]
        shared = {action.dest for action in SERVE.load().build_parser()._actions} if name == "holders" else set()
        note = "Of the flags above it takes all but those that serve." if shared else ""
        parts.append(
            "\n\n".join(
                text for text in (f"\n## {title}", f"{summary}. {note}".strip(), _table(parser, shared)) if text
            )
        )
        parts.append("" if parts[-1].endswith("\n") else "\n")
    return "".join(parts)


def _table(parser: Parser, shared: Collection[str]) -> str:
    variables = {action.dest: variable for variable, action in parser.settings.items()}
    lines = ["| flag | variable | what |\n| --- | --- | --- |\n"]
    shown = [action for action in _shown(parser) if action.dest not in shared]
    for action in shown:
        variable = f"`{variables[action.dest]}`" if action.dest in variables else ""
        what = f"{_collector(action) or action.help or ''}. {parser.more.get(action.dest, '')}".strip()
        lines.append(f"| `{_spell(action)}` | {variable} | {_escape(what)} |\n")
    return "".join(lines) if shown else ""


def _shown(parser: Parser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help")


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


def build_whole_parser() -> argparse.ArgumentParser:
    """Every command as a subparser of the exporter's own parser."""
    whole: Parser = SERVE.load().build_parser()
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.choices[name] = command.load().build_parser()
        commands._choices_actions.append(commands._ChoicesPseudoAction(name, (), command.summary))
    helper = Parser("help", "Print the help of a command.")
    helper.add_argument("command", choices=sorted(COMMANDS))
    commands.choices["help"] = helper
    commands._choices_actions.append(commands._ChoicesPseudoAction("help", (), "print the help of a command"))
    for parser in (whole, *commands.choices.values()):
        for action in parser._actions:
            if action.metavar in ("FILE", "PATH", "DIR"):
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return whole


def build_completion() -> Mapping[Path, str]:
    """The scripts, by path."""
    parser = build_whole_parser()
    return {SCRIPTS / name: shtab.complete(parser, shell).rstrip() + "\n" for shell, name in SHELLS.items()}


def build_all() -> Mapping[Path, str]:
    """The page and the scripts, by path."""
    return {ROOT / "docs" / "commands.md": render_commands(), **build_completion()}
