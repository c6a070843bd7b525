"""Variables of the services: each setting alone, beside its flag, and empty. Verbs and short-lived commands have no
variables.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence

import pytest

from gpu_exporter.cli.arguments import duration, file_mode, positive_duration
from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.environment import is_given, split_items
from gpu_exporter.cli.parser import Parser, Private
from gpu_exporter.reconciler.evidence.exporters import parse_exporter
from gpu_exporter.reports.top.nodes import parse_node

SERVICES = {"": SERVE, "reconcile": COMMANDS["reconcile"], "slurm-collector": COMMANDS["slurm-collector"]}
DAEMON = {"holders"}  # this command prints the daemon's data, with the daemon's variables
SHORT = sorted(COMMANDS.keys() - SERVICES.keys() - DAEMON)
# Two values for each type of flag, as text of the command line.
TEXTS = {
    duration: ("7s", "11s"),
    positive_duration: ("7s", "11s"),
    file_mode: ("0600", "0640"),
}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("GPU_EXPORTER_")]:
        monkeypatch.delenv(name)


def read(
    command: str, environment: Mapping[str, str], given: Sequence[str], patch: pytest.MonkeyPatch
) -> dict[str, object]:
    for name, value in environment.items():
        patch.setenv(name, value)
    parser: Parser = (SERVICES | COMMANDS)[command].load().build_parser()
    return vars(parser.read(given))


def settings() -> Iterator[tuple[str, str, str]]:
    """Service, variable and flag of every setting."""
    for command, service in SERVICES.items():
        for variable, action in service.load().build_parser().settings.items():
            yield command, variable, action.option_strings[0]


def texts_of(action: argparse.Action) -> tuple[str, str]:
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ("false", "true") if action.default else ("true", "false")
    if action.choices is not None:
        one, other, *_ = sorted(action.choices, key=lambda choice: choice == action.default)
        return str(one), str(other)
    if action.dest == "headers":
        return "X-One: 1", "X-Other: 2"
    if isinstance(action.type, Private):  # every other one is an address
        return "http://one:1", "http://other:2"
    return TEXTS.get(action.type, ("/one{1,2}", "/other{3,4}"))  # type: ignore[arg-type]


def as_arguments(action: argparse.Action, text: str) -> list[str]:
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if text == "true" else f"--no-{flag.removeprefix('--')}"]
    if action.nargs == 0:
        return [flag] if text == "true" else []
    return [f"{flag}={text}"]


@pytest.mark.parametrize(("command", "variable", "flag"), list(settings()))
def test_a_variable_sets_what_its_flag_sets_and_a_flag_replaces_it(
    command: str, variable: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser: Parser = SERVICES[command].load().build_parser()
    action = parser.settings[variable]
    one, other = texts_of(action)
    default = vars(parser.read([]))
    by_flag = vars(parser.read(as_arguments(action, one)))
    assert by_flag[action.dest] != default[action.dest]
    other_by_flag = vars(parser.read(as_arguments(action, other)))

    assert read(command, {variable: one}, [], monkeypatch) == by_flag
    if action.nargs != 0 or isinstance(action, argparse.BooleanOptionalAction):  # otherwise no flag means "off"
        assert read(command, {variable: one}, as_arguments(action, other), monkeypatch) == other_by_flag
    assert read(command, {variable: other}, as_arguments(action, one), monkeypatch) == by_flag
    assert read(command, {variable: other}, [], monkeypatch) == other_by_flag
    assert read(command, {variable: ""}, [], monkeypatch) == default


@pytest.mark.parametrize(
    ("command", "variable", "given", "dest", "expected"),
    [
        ("", "GPU_EXPORTER_ATTRIBUTION_RESOURCE", [], "resources", ["vendor\\.com/gpu.{1,3}", "b"]),
        ("", "GPU_EXPORTER_ATTRIBUTION_RESOURCE", ["--attribution.resource=c"], "resources", ["c"]),
        ("", "GPU_EXPORTER_ATTRIBUTION_RESOURCE", ["--attribution.resource=c", "--attribution.resource=d"], "resources", ["c", "d"]),
        ("reconcile", "GPU_EXPORTER_RECONCILE_ALERTMANAGER_FILTER", [], "alert_filters", ["vendor\\.com/gpu.{1,3}", "b"]),
        ("reconcile", "GPU_EXPORTER_RECONCILE_SOURCE_EXPORTER", ["--source.exporter=c"], "exporters", [parse_exporter("c")]),
    ],
)  # fmt: skip
def test_a_list_has_one_item_a_line_and_is_replaced_and_never_joined(
    command: str, variable: str, given: list[str], dest: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n vendor\\.com/gpu.{1,3}\n\nb\n"
    assert read(command, {variable: text}, given, monkeypatch)[dest] == expected


@pytest.mark.parametrize(
    ("text", "at_commas", "items"),
    [
        ("a,b", True, ["a", "b"]),
        ("a,b", False, ["a,b"]),
        ("a.com/gpu.{1,3},b.com/(x|y),[c,d]", True, ["a.com/gpu.{1,3}", "b.com/(x|y)", "[c,d]"]),
        ("a,b\n", True, ["a,b"]),
        ("a,b\n\n c \n", True, ["a,b", "c"]),
        (" , ,", True, []),
        ("a},b", True, ["a}", "b"]),
    ],
)
def test_items_are_lines_and_for_some_flags_also_separated_by_commas(
    text: str, at_commas: bool, items: list[str]
) -> None:
    assert split_items(text, at_commas=at_commas) == items


@pytest.mark.parametrize(
    ("command", "environment", "dest", "expected"),
    [
        ("", {"GPU_EXPORTER_WEB_HOSTS": "a.b,c.d"}, "hosts", ["a.b", "c.d"]),
        ("", {"GPU_EXPORTER_ATTRIBUTION_RESOURCE": "a.com/gpu,b.com/gpu.{1,3}"}, "resources", ["a.com/gpu", "b.com/gpu.{1,3}"]),
        ("", {"GPU_EXPORTER_ATTRIBUTION_MONITOR": "a/b,c/d"}, "monitors", ["a/b", "c/d"]),
        ("reconcile", {"GPU_EXPORTER_RECONCILE_SOURCE_HEADER": "X-List: a,b"}, "headers", ["X-List: a,b"]),
    ],
)  # fmt: skip
def test_lists_whose_items_have_no_comma_may_be_separated_by_commas(
    command: str, environment: dict[str, str], dest: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(command, environment, [], monkeypatch)[dest] == expected


def test_a_variable_that_a_flag_replaces_may_be_invalid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"GPU_EXPORTER_TEXTFILE_INTERVAL": "5", "GPU_EXPORTER_COLLECTOR_GPM": "perhaps"}
    options = read("", wrong, ["--textfile.interval=9s", "--no-collector.gpm"], monkeypatch)
    assert (options["textfile_interval"], options["collector_gpm"]) == (9.0, False)
    assert read("reconcile", {"GPU_EXPORTER_INTERVAL": "5"}, ["--interval", "9s"], monkeypatch)["interval"] == 9.0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        ("", {"GPU_EXPORTER_LOG_LEVEL": "loud"}, "gpu-exporter: environment variable GPU_EXPORTER_LOG_LEVEL: invalid choice: 'loud'"),
        ("", {"GPU_EXPORTER_COLLECTOR_GPM": "perhaps"}, "variable GPU_EXPORTER_COLLECTOR_GPM: 'perhaps' is not one of true, false"),
        ("reconcile", {"GPU_EXPORTER_RECONCILE_INTERVAL": "5"}, "variable GPU_EXPORTER_RECONCILE_INTERVAL: '5'"),
    ],
)  # fmt: skip
def test_an_invalid_variable_is_named_but_does_not_break_the_help(
    command: str, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        read(command, environment, [], monkeypatch)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        read(command, environment, ["--help"], monkeypatch)
    assert ended.value.code == 0


@pytest.mark.parametrize("command", ["", "holders", "reconcile", "slurm-collector"])
def test_no_variable_sets_a_verb(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser: Parser = (SERVICES | COMMANDS)[command].load().build_parser()
    assert parser.verbs
    environment = dict.fromkeys(parser.verbs, "json")
    assert read(command, environment, [], monkeypatch) == vars(parser.read([]))
    said = capsys.readouterr().err
    for name in parser.verbs:
        assert f"warning: {name} is ignored: use the flag --" in said


def test_flags_that_say_what_to_do_are_verbs() -> None:
    """A variable that is left over must not turn a dry run into a run that writes."""
    verbs = {flag for name in SERVICES.values() for flag in name.load().build_parser().verbs}
    ends = {"APPLY", "REMOVE_ALL", "ONCE", "FORMAT", "CHECK", "OUTPUT", "TIMEOUT"}
    assert {re.sub("GPU_EXPORTER_(RECONCILE_|SLURM_COLLECTOR_)?", "", name) for name in verbs} == ends


@pytest.mark.parametrize("command", SHORT)
def test_a_command_that_ends_by_itself_has_no_variables(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser: Parser = COMMANDS[command].load().build_parser()
    needed = [action.choices[0] if action.choices else "x" for action in parser._actions if not action.option_strings]  # type: ignore[index]
    plain = vars(parser.read(needed))
    everything = {
        f"{prefix}{name}": "true"
        for prefix in ("GPU_EXPORTER_", f"GPU_EXPORTER_{command.upper().replace('-', '_')}_")
        for action in parser._actions
        for name in [
            action.dest.upper(),
            *(flag.lstrip("-").replace(".", "_").upper() for flag in action.option_strings),
        ]
    }
    assert len(everything) > 3
    assert read(command, everything, needed, monkeypatch) == plain


def test_the_host_of_top_is_not_read_as_a_list_of_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("top", {"GPU_EXPORTER_FROM": "gpu-1"}, [], monkeypatch)["nodes"] == []
    assert read("top", {"GPU_EXPORTER_FROM": "gpu-1"}, ["--from", "gpu-2"], monkeypatch)["nodes"] == [
        parse_node("gpu-2")
    ]


@pytest.mark.parametrize("command", ["reconcile", "slurm-collector"])
def test_the_daemons_variables_set_nothing_of_another_service(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = read(command, {}, [], monkeypatch)
    daemons = {"GPU_EXPORTER_WEB_LISTEN_ADDRESS": "127.0.0.1:9836", "GPU_EXPORTER_INTERVAL": "7s"}
    assert read(command, daemons, [], monkeypatch) == default
    assert capsys.readouterr().err == ""


def test_no_two_services_share_a_variable() -> None:
    """No setting has a name that Kubernetes sets for a Service: GPU_EXPORTER_PORT, GPU_EXPORTER_SERVICE_HOST."""
    names = [variable for _, variable, _ in settings()]
    assert len(names) == len(set(names))
    assert [name for name in names if re.search(r"_PORT(_|$)|_SERVICE_(HOST|PORT)", name)] == []
    daemon = {name for name in names if name in SERVE.load().build_parser().settings}
    assert [
        name for name in daemon if name.startswith(("GPU_EXPORTER_RECONCILE_", "GPU_EXPORTER_SLURM_COLLECTOR_"))
    ] == []


def test_a_word_after_two_dashes_is_no_flag_and_leaves_the_variable_in_force() -> None:
    """`gpu-exporter -- --web.listen-address=x` names an argument, not a flag."""
    action = next(iter(SERVE.load().build_parser().settings.values()))
    flag = action.option_strings[0]
    assert is_given(action, [f"{flag}=1"])
    assert is_given(action, [flag, "1", "--", "other"])
    assert not is_given(action, ["other", "--", f"{flag}=1"])
