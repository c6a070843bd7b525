"""Converts the text of an environment variable to arguments of its flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
OPENING, CLOSING = "([{", ")]}"


class Items(argparse.Action):
    """A repeatable flag. Its first use replaces the default or the variable; each further use adds to the list. One use
    may contain several items.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        items = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, items if before is self.default else [*before, *items])


def as_arguments(action: argparse.Action, text: str, *, at_commas: bool = False) -> list[str]:
    """Converts the text of a variable to arguments with the same effect. Raises ValueError.

    `at_commas`: a text of one line is split at commas too.
    """
    flag = action.option_strings[0]
    if isinstance(action, Items):
        return [f"{flag}={item}" for item in split_items(text, at_commas=at_commas)]
    if not isinstance(action, argparse.BooleanOptionalAction) and action.nargs != 0:
        return [f"{flag}={text}"]
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError(f"{text!r} is not one of true, false")
    if word in TRUE:
        return [flag]
    return [f"--no-{flag.removeprefix('--')}"] if isinstance(action, argparse.BooleanOptionalAction) else []


def split_items(text: str, *, at_commas: bool) -> list[str]:
    """Returns the items of a text, one per line. `at_commas`: a text of one line is split at commas too, but not within
    brackets, so that `gpu.{1,3}` remains one item.
    """
    parts = [""]
    depth = 0
    for sign in text:
        depth += (sign in OPENING) - (sign in CLOSING)
        if sign == "\n" or (sign == "," and at_commas and depth <= 0 and "\n" not in text):
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def flags_of(given: Sequence[str]) -> list[str]:
    """Returns the flags among these arguments, without their values."""
    words = given[: given.index("--")] if "--" in given else given
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def is_given(action: argparse.Action, given: Sequence[str]) -> bool:
    """Returns whether a flag is among these arguments. If so, the flag's variable has no effect."""
    return not set(flags_of(given)).isdisjoint(action.option_strings)
