"""`gpu-exporter completion`: prints a shell's completion, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from shlex import quote

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.parser import Options, Parser, add_help

LISTED = {**{name: command.summary for name, command in COMMANDS.items()}, "help": "print the help of a command"}
# Where no word matches, as for the value of most flags, both shells complete the names of files.
BASH = """_gpu_exporter() {
    local command="${COMP_WORDS[1]}" before="${COMP_WORDS[COMP_CWORD - 1]}" word="${COMP_WORDS[COMP_CWORD]}" offered=
    [[ $COMP_CWORD -gt 1 && $command != -* ]] || command=
    [[ $before != = ]] || before="${COMP_WORDS[COMP_CWORD - 2]}"
    [[ $word != = ]] || word=
    case "$command $before" in
@CASES@    esac
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
}
complete -o default -F _gpu_exporter gpu-exporter
"""
ZSH = """#compdef gpu-exporter
local command=$words[2]
local -a commands=(@COMMANDS@)
if (( CURRENT == 2 )) || [[ $command == -* ]]; then
    command=
    (( CURRENT > 2 )) || _describe command commands
else
    shift words
    (( CURRENT-- ))
fi
case $command in
@CASES@esac
"""


def build_parser() -> Parser:
    parser = Parser(
        "completion",
        "Print the completion script for a shell.\n\n"
        "  bash: gpu-exporter completion bash > /etc/bash_completion.d/gpu-exporter\n"
        "  zsh:  gpu-exporter completion zsh > /usr/share/zsh/site-functions/_gpu-exporter",
        usage="gpu-exporter completion SHELL",
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    sys.stdout.write(render_bash() if options.shell == "bash" else render_zsh())
    return 0


def render_bash() -> str:
    """Returns a script that offers the flags of each command, and the choices of each flag."""
    cases = []
    for name, actions in list_actions():
        free = []
        for action in actions:
            patterns = [f'"{name} {flag}"' for flag in action.option_strings if action.nargs != 0]
            if patterns and action.choices:
                cases.append(f'    {"|".join(patterns)}) offered="{" ".join(_choices(action))}" ;;\n')
            else:
                free += patterns
        cases += [f"    {'|'.join(free)}) ;;\n"] if free else []
        words = [word for action in actions for word in action.option_strings or _choices(action)]
        cases.append(f'    "{name} "*) offered="{" ".join((*words, *([] if name else LISTED)))}" ;;\n')
    return BASH.replace("@CASES@", "".join(cases))


def render_zsh() -> str:
    """Returns a script that also shows the help of commands and flags."""
    cases = []
    for name, actions in list_actions():
        specs = [_describe(flag, action) for action in actions for flag in action.option_strings]
        for action in actions:
            if not action.option_strings:
                specs.append(f"*:{action.metavar or action.dest}:{_values(action)}")
        cases.append(f"{quote(name)}) _arguments {' '.join(map(quote, specs))} ;;\n")
    commands = " ".join(quote(f"{name}:{summary}") for name, summary in LISTED.items())
    return ZSH.replace("@COMMANDS@", commands).replace("@CASES@", "".join(cases))


def list_actions() -> Iterator[tuple[str, Sequence[argparse.Action]]]:
    """Yields each command with its flags and arguments. "" is the exporter itself, without a command."""
    for name, command in {"": SERVE, **COMMANDS}.items():
        yield name, command.load().build_parser()._actions
    yield "help", [argparse.Action([], "command", choices=list(COMMANDS))]


def _choices(action: argparse.Action) -> list[str]:
    return [str(choice) for choice in action.choices or ()]


def _describe(flag: str, action: argparse.Action) -> str:
    """Returns a flag with its help and its value, in the notation of zsh's _arguments."""
    about, metavar = (
        re.sub(r"([][:\\])", r"\\\1", text) for text in (action.help or "", str(action.metavar or "value"))
    )
    if action.nargs == 0:
        return f"*{flag}[{about}]"
    return f"*{flag}=[{about}]:{metavar}:{_values(action)}"


def _values(action: argparse.Action) -> str:
    return f"({' '.join(_choices(action))})" if action.choices else "_files"
