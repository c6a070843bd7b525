"""All commands by name. To add a command, add a line here and a file with `build_parser()` and `run(given)`."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    """One command. `module`: of this folder, loaded when the command runs. `summary`: for the list of commands."""

    module: str
    summary: str

    def load(self) -> ModuleType:
        """The module, which has `build_parser() -> Parser` and `run(list of arguments) -> exit code`."""
        from importlib import import_module

        return import_module(f"gpu_exporter.cli.{self.module}")


SERVE = Command("serve", "serve metrics and the status page; with --once print one reading")
COMMANDS = {
    "holders": Command("holders", "list who holds what, and by which evidence"),
    "top": Command("top", "show the GPUs of one or several nodes on the terminal"),
    "reconcile": Command("reconcile", "decide which holders are underused; with --apply, mark them"),
    "explain": Command("explain", "explain the decision about one pod, job or GPU"),
    "pause": Command("pause", "pause marking, e.g. for maintenance"),
    "digest": Command("digest", "report the usage of a period, by tenant and holder"),
    "slurm-collector": Command("slurm_collector", "ask slurmctld for all nodes, in place of each node"),
    "demo": Command("demo", "simulate a node on a fast clock"),
    "check-config": Command("check_config", "check a configuration file and print what is in force"),
    "record": Command("record", "record what the driver answers, to be replayed elsewhere"),
    "forget": Command("forget", "remove a GPU from the list of expected GPUs"),
    "completion": Command("completion", "print the completion of a shell"),
    "version": Command("print_version", "print the version"),
}


def list_commands() -> str:
    """One line for each command."""
    rows = [("(none)", SERVE.summary), *((name, command.summary) for name, command in COMMANDS.items())]
    rows.append(("help COMMAND", "print the help of a command"))
    return "".join(f"  {name:16} {summary}\n" for name, summary in rows)
