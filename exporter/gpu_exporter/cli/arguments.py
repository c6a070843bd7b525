"""Converts the text after a flag. Each function raises argparse.ArgumentTypeError with a remedy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any


def file_mode(text: str) -> int:
    """Converts `0660` to the permission bits of a file."""
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file mode such as 0660")
    return int(text, 8)


def duration(text: str) -> float:
    """Converts `90s` or `1h30m` to seconds, 0 or more."""
    from gpu_exporter.common.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def positive_duration(text: str) -> float:
    """Converts a duration above 0 to seconds."""
    seconds = duration(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return seconds


def moment(text: str) -> float:
    """Converts a time with its zone, or an age such as 2h, to Unix seconds."""
    from datetime import datetime

    from gpu_exporter.common.clock import SYSTEM_CLOCK

    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return SYSTEM_CLOCK.wall() - positive_duration(text)
    if when.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no zone: write {when.isoformat()}Z for UTC")
    if when.timestamp() > SYSTEM_CLOCK.wall():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future")
    return when.timestamp()


def checked(module: str, name: str) -> Callable[[str], Any]:
    """Converts text by a function that may raise ValueError. Its module is imported only if the flag is given."""

    def convert(text: str) -> Any:
        from importlib import import_module

        try:
            return getattr(import_module(module), name)(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return convert
