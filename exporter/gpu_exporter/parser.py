"""A command line parser whose flags each have an environment form.

`--web.listen-address` is GPU_EXPORTER_WEB_LISTEN_ADDRESS in the environment; the flag wins.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpu_exporter.exits import Exit

if TYPE_CHECKING:
    from gpu_exporter.config.load import Config


class Parser(argparse.ArgumentParser):
    """Takes defaults from the environment and shows them."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._environment: list[argparse.Action] = []

    def flag(self, name: str, **options: object) -> None:
        """One flag; its value in the environment, where set, becomes the default."""
        action = self.add_argument(name, **options)  # type: ignore[arg-type]
        variable = environment_name(name)
        text = os.environ.get(variable)
        action.help = f"{action.help or ''} [{variable}]"
        if text is None:
            return
        if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
            if text.lower() not in ("true", "false", "1", "0"):
                self.error(f"environment variable {variable}: {text!r} is not one of true, false")
            action.default = text.lower() in ("true", "1")
        elif isinstance(action.default, list):
            convert = action.type if callable(action.type) else str
            action.default = [convert(item) for item in text.split(",") if item]
        else:
            if action.choices is not None and text not in action.choices:
                self.error(f"environment variable {variable}: {text!r} is not one of {', '.join(action.choices)}")
            action.default = text  # argparse converts text defaults by `type`

    def fail(self, message: str) -> NoReturn:
        """End: something other than the usage itself is wrong."""
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(Exit.USAGE)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}; see {self.prog} --help\n")
        sys.exit(Exit.USAGE)


def environment_name(flag: str) -> str:
    """`--web.listen-address` to GPU_EXPORTER_WEB_LISTEN_ADDRESS."""
    return "GPU_EXPORTER_" + flag.lstrip("-").replace(".", "_").replace("-", "_").upper()


def file_mode(text: str) -> int:
    """`0660` to the permission bits of a file."""
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file mode such as 0660")
    return int(text, 8)


def duration(text: str) -> float:
    from gpu_exporter.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def positive_duration(text: str) -> float:
    seconds = duration(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return seconds


def moment(text: str) -> float:
    """A time, or how long ago, as Unix seconds."""
    from datetime import datetime

    from gpu_exporter.clock import SYSTEM_CLOCK

    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return SYSTEM_CLOCK.wall() - positive_duration(text)
    if when.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no zone: write {when.isoformat()}Z for UTC")
    if when.timestamp() > SYSTEM_CLOCK.wall():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future")
    return when.timestamp()


def read_config(parser: Parser, path: Path | None) -> Config:
    """The configuration of --config.file; ends the process where it is wrong."""
    from gpu_exporter.config.load import ConfigError, load_config

    try:
        return load_config(path)
    except ConfigError as exc:
        parser.fail(str(exc))
