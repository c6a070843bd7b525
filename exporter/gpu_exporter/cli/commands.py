"""All commands by name. To add a command, add a line here and a file with `build_parser()` and `run()`."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    """One command. `module`: in this folder, loaded when it runs. `summary`: its text in the list of commands."""

    module: str
    summary: str

    def load(self) -> ModuleType:
        """Imports the module, which has `build_parser() -> Parser` and `run(Parser, Options) -> exit code`."""
        from importlib import import_module

        return import_module(f"gpu_exporter.cli.{self.module}")

    def run(self, given: list[str]) -> int:
        """Parses the arguments and runs the command. Returns the exit code."""
        module = self.load()
        parser = module.build_parser()
        code: int = module.run(parser, parser.read(given))
        return code


SERVE = Command("serve", "serve metrics and the status page; with --once print one reading")
COMMANDS = {
    "holders": Command("holders", "list the holder of each GPU, with the evidence"),
    "top": Command("top", "show the GPUs of one or several nodes on the terminal"),
    "reconcile": Command("reconcile", "decide which holders are underused; with --apply, mark them"),
    "explain": Command("explain", "explain the decision about one pod, job or GPU"),
    "pause": Command("pause", "pause marking, e.g. for maintenance"),
    "report": Command(
        "reports.report", "report the GPU-hours of a period and their cost, from the history in Prometheus"
    ),
    "backtest": Command("reports.backtest", "replay a policy on the history in Prometheus, before you trust it"),
    "digest": Command("reports.digest", "report the usage of a period, by tenant and holder"),
    "job": Command("reports.job", "report the use of one job's or pod's GPUs, running or ended"),
    "slurm-collector": Command("slurm_collector", "ask slurmctld in place of all nodes"),
    "demo": Command("demo", "simulate a node on a fast clock"),
    "check-config": Command("check_config", "check a configuration file and print the settings in force"),
    "check-monitors": Command("check_monitors", "check that a Prometheus selects the monitors and rules"),
    "record": Command("record", "record the driver's answers, for a replay on another host"),
    "forget": Command("forget", "remove a GPU from the list of expected GPUs"),
    "contrib": Command("contrib", "print the folder with units, prolog, epilog and health check"),
    "completion": Command("completion", "print the completion script for a shell"),
    "version": Command("print_version", "print the version"),
}


def list_commands() -> str:
    rows = [("(none)", SERVE.summary), *((name, command.summary) for name, command in COMMANDS.items())]
    rows.append(("help COMMAND", "print the help of a command"))
    return "".join(f"  {name:16} {summary}\n" for name, summary in rows)
