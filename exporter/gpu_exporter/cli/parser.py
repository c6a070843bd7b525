"""Parses the flags of one command, in named groups. A service also has an environment variable for each setting.

A variable becomes an argument before the flags are parsed (docs/commands.md, Environment), so both have the same
conversions, choices and lists. A flag replaces its variable. An empty variable counts as not set. A list takes one item
a line, because an item may contain a comma.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from gpu_exporter.cli.environment import Items, as_arguments, flags_of, is_given
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.version import VERSION

if TYPE_CHECKING:
    from gpu_exporter.common.address import Address
    from gpu_exporter.common.config.load import Config

Options: TypeAlias = argparse.Namespace
FLAG_WIDTH = 40  # columns of the flags in --help


class Private:
    """Converts the text of a flag that may contain a secret. Accepts a secret only from the flag's variable, because
    `ps` shows the arguments of a process to every user of the host. `instead`: another safe place for the secret.
    """

    def __init__(
        self, parser: Parser, flag: str, convert: Callable[[str], Any], is_secret: Callable[[Any], bool], instead: str
    ) -> None:
        self._parser, self.convert, self._is_secret = parser, convert, is_secret
        variable = f"the variable {parser.prefix}{_as_variable(flag)}" if parser.prefix else ""
        self._instead = " or ".join(filter(None, (instead, variable)))

    def __call__(self, text: str) -> Any:
        """Converts the text. Raises argparse.ArgumentTypeError, whose text does not contain the secret."""
        try:
            value = self.convert(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc
        if self._is_secret(value) and not self._parser.reads_variable:
            raise argparse.ArgumentTypeError(
                f"it contains a secret, and every user of this host can read arguments: use {self._instead}"
            )
        return value


class Parser(argparse.ArgumentParser):
    """The flags of one command. `prefix`: start of the names of its environment variables, "" for no variables."""

    def __init__(self, command: str, description: str, epilog: str = "", usage: str = "", prefix: str = "") -> None:
        name = f"gpu-exporter {command}".rstrip()
        words = f"{_describe_environment(prefix)}\n{epilog}" if prefix else epilog
        super().__init__(
            prog=name,
            usage=usage or f"{name} [FLAGS]",
            description=description,
            epilog=words.strip("\n"),
            allow_abbrev=False,
            formatter_class=_Formatter,
            add_help=False,
        )
        self.prefix = prefix
        self.settings: dict[str, argparse.Action] = {}
        """Flags that have a variable, by the variable's name."""
        self.verbs: dict[str, argparse.Action] = {}
        """Flags without a variable, by the name that the variable would have."""
        self.more: dict[str, str] = {}
        """Text that the reference adds to the help, by destination."""
        self._group: argparse._ActionsContainer = self
        self._with_commas: set[str] = set()
        self._variable = ""  # the variable that is being parsed
        self.given: list[str] = []
        """The flags among the arguments that were parsed."""
        self._unknown_flags: list[str] = []  # of them

    def section(self, title: str, text: str | None = None) -> None:
        """Begins a group: the help lists the following flags under this title."""
        self._group = self.add_argument_group(title, text)

    def flag(
        self, name: str, *, is_verb: bool = False, more: str = "", at_commas: bool = False, **options: Any
    ) -> None:
        """Adds one flag. By default, its `dest` is its name with underscores. `is_verb`: the flag requests an action,
        so it has no variable. `more`: text that the reference adds to the help. `at_commas`: its variable may also
        separate items by commas, because no item contains one.
        """
        options = {"dest": _as_variable(name).lower(), **options}
        if options.get("action") == "append":
            options = {"metavar": "ITEM", "default": [], **options, "action": Items}
        elif "metavar" not in options and "action" not in options and "choices" not in options:
            options["metavar"] = "FILE" if options.get("type") is Path else "VALUE"
        action = self._group.add_argument(name, **options)
        # Set again, because Python 3.10 adds the default to the help of a flag that turns something on or off.
        action.help = options.get("help")
        self.more[action.dest] = more
        if at_commas:
            self._with_commas.add(action.dest)
        if self.prefix:
            (self.verbs if is_verb else self.settings)[self.prefix + _as_variable(name)] = action

    def private(
        self, name: str, convert: Callable[[str], Any], is_secret: Callable[[Any], bool], instead: str, **options: Any
    ) -> None:
        """Adds a flag whose text may contain a secret. The arguments are as in Private."""
        self.flag(name, type=Private(self, name, convert, is_secret, instead), **options)

    def address(self, name: str, convert: Callable[[str], Any], instead: str, **options: Any) -> None:
        """Adds a flag whose value is the address of a server. `instead`: the safe place for its user and password."""
        self.private(name, convert, lambda address: bool(getattr(address, "login", "")), instead, **options)

    def addresses(self, name: str, convert: Callable[[str], Address], instead: str, **options: Any) -> None:
        """Adds a repeatable flag for addresses, which also accepts host lists such as gpu-[01-40]. `instead`: the safe
        place for their users and passwords.
        """

        def convert_all(text: str) -> list[Address]:
            from gpu_exporter.common.address import expand_hosts

            return [convert(each) for each in expand_hosts(text)]

        self.private(
            name, convert_all, lambda found: any(each.login for each in found), instead, action="append", **options
        )

    @property
    def reads_variable(self) -> bool:
        """Whether the text that is being converted comes from a variable."""
        return bool(self._variable)

    def table(self, name: str, **options: Any) -> None:
        """Adds a flag that a table in its section's text explains."""
        self.flag(name, help="see the table", **options)
        self._actions[-1].in_table = True  # type: ignore[attr-defined]

    def read(self, given: Sequence[str]) -> Options:
        """Returns the options, each from its flag, otherwise its variable, otherwise its default. Ends the process if
        an option is invalid.
        """
        if not {"-h", "--help", "--version"} & set(given):  # a wrong variable must not prevent these
            self._read_environment(os.environ, given)
        self.given = flags_of(given)
        self._unknown_flags = [flag for flag in self.given if flag not in self._option_string_actions]
        options, unknown = super().parse_known_args(given)
        if unknown:
            self.refuse(unknown)
        return options

    def _read_environment(self, environment: Mapping[str, str], given: Sequence[str]) -> None:
        for variable, action in self.settings.items():
            if environment.get(variable) and not is_given(action, given):
                action.default = self._parse_variable(variable, action, environment[variable])
        for variable, action in self.verbs.items():
            if environment.get(variable) and not is_given(action, given):
                self.warn(f"{variable} is ignored: use the flag {action.option_strings[0]}")

    def _parse_variable(self, variable: str, action: argparse.Action, text: str) -> object:
        self._variable = variable
        try:
            arguments = as_arguments(action, text, at_commas=action.dest in self._with_commas)
            found, _ = super().parse_known_args(arguments)
        except ValueError as exc:
            self.error(str(exc))
        finally:
            self._variable = ""
        return getattr(found, action.dest)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process because of arguments that this command does not have. The text after an unknown flag is not
        printed, because it may be a secret.
        """
        from gpu_exporter.common.plain import nearest

        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        close = list(filter(None, [nearest(flag, self._option_string_actions) for flag in flags]))
        meant = f"; did you mean {' and '.join(close)}?" if close else ""
        self.error(f"unrecognized arguments: {' '.join(flags or unknown)}{meant}")

    def warn(self, message: str) -> None:
        """Prints a warning about a request that is ignored, and continues."""
        _complain(f"{self.prog}: warning: {message}")

    def fail(self, message: str) -> NoReturn:
        """Ends the process with an error message that does not print the usage."""
        _complain(f"{self.prog}: {message}")
        sys.exit(Exit.USAGE)

    def error(self, message: str) -> NoReturn:
        """Ends the process for an error of usage."""
        if message.startswith("the following arguments are required") and self._unknown_flags:
            self.refuse(self._unknown_flags)  # a flag may be written wrong in place of --help, or beside a missing FILE
        if self._variable:
            what = message.partition(": ")[2] if message.startswith("argument ") else message
            message = f"environment variable {self._variable}: {what}"
        _complain(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(Exit.USAGE)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Prints flags in one column, and omits flags that a table explains."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=FLAG_WIDTH)

    def add_argument(self, action: argparse.Action) -> None:
        if not getattr(action, "in_table", False):
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        if action.option_strings and action.metavar is not None:
            return f"{action.option_strings[-1]} {action.metavar}"
        return super()._format_action_invocation(action)


def _complain(text: str) -> None:
    """Writes to standard error. The lines of the text are safe for a terminal."""
    from gpu_exporter.common.plain import one_line

    sys.stderr.write("".join(f"{one_line(line)}\n" for line in text.split("\n")))


def optional_address(text: str) -> Address | None:
    """Parses an address; None for an empty text. Raises ValueError."""
    from gpu_exporter.common.address import parse_address

    return parse_address(text) if text else None


def _as_variable(flag: str) -> str:
    return flag.lstrip("-").replace(".", "_").replace("-", "_").upper()


def _describe_environment(prefix: str) -> str:
    return (
        f"environment:\n  --log.level is also the variable {prefix}LOG_LEVEL, and so on. A flag replaces its\n"
        "  variable. An empty variable counts as not set. A repeatable flag's variable has one item per line.\n"
    )


def add_format(parser: Parser, form: str = "table", more: str = "") -> None:
    """Adds the flag for the output format: `form`, the default, or json. `more`: text for the help."""
    parser.flag(
        "--format",
        choices=(form, "json"),
        default=form,
        is_verb=True,
        metavar="FORM",
        help=f"output format: {form} or json (default {form}){more}",
    )


def add_config(parser: Parser) -> None:
    parser.flag("--config.file", type=Path, help="YAML file of settings")


def add_general(parser: Parser) -> None:
    """Adds the last section: the configuration file, the log and the help."""
    parser.section("general")
    add_config(parser)
    add_logging(parser)


def add_logging(parser: Parser) -> None:
    levels = ("debug", "info", "warn", "error")
    parser.flag(
        "--log.level", choices=levels, default="info", metavar="LEVEL", help="debug, info, warn, error (default info)"
    )
    parser.flag(
        "--log.format",
        choices=("logfmt", "json"),
        default="logfmt",
        metavar="FORM",
        help="logfmt or json (default logfmt)",
    )
    add_help(parser)


def add_help(parser: Parser) -> None:
    group = parser._group
    group.add_argument("-h", "--help", action="help", help="print this help and exit")
    group.add_argument(
        "--version", action="version", version=f"gpu-exporter {VERSION}", help="print the version and exit"
    )


def add_web_config(parser: Parser) -> None:
    parser.flag("--web.config.file", dest="web_config", type=Path, help="TLS and passwords (form: exporter-toolkit)")


def add_resources(parser: Parser) -> None:
    """Adds --attribution.resource, for the agent (devices of the kubelet) and the reconciler (limits of pods)."""
    parser.flag(
        "--attribution.resource",
        dest="resources",
        action="append",
        metavar="REGEX",
        at_commas=True,
        help="another resource name of GPUs; can be repeated",
    )


def read_config(parser: Parser, path: Path | None) -> Config:
    """Reads the configuration of --config.file. Ends the process if it is invalid."""
    from gpu_exporter.common.config.load import ConfigError, load_config

    try:
        config = load_config(path)
    except ConfigError as exc:
        parser.fail(str(exc))
    if off := config.settings.diagnosis.without:
        from gpu_exporter.common.config.values import unknown_key
        from gpu_exporter.diagnosis.causes.rules import RULES

        known = ("stalls", *RULES)
        for name in off.replace(" ", "").split(","):
            if name not in known:
                parser.fail(
                    unknown_key(f"{path}: diagnosis.without: {name}", name, known).replace("unknown key", "no cause")
                )
    return config
