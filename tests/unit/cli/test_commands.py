"""Every command is listed, has its own help and its own parser, and can be completed by a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import advise

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.main import run_command
from gpu_exporter.cli.parser import Parser
from gpu_exporter.cli.top import SORTS
from gpu_exporter.reports.top.screen import ORDERS

FOLDER = Path(__file__).resolve().parents[3] / "exporter" / "gpu_exporter" / "cli"
SCREENS = 2 * 57  # lines of two screens on a laptop


def run(*given: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = run_command(list(given))
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_is_its_own_and_fits_on_two_screens(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(name, "--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: gpu-exporter {name}")
    advise(f"lines of the help of {name}", len(out.splitlines()), SCREENS, so="move texts into `more`")
    assert run("help", name, capsys=capsys) == (0, out, "")


def test_the_help_lists_every_command_and_fits_on_two_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert run("help", capsys=capsys) == (0, out, "")
    advise("lines of --help", len(out.splitlines()), SCREENS, so="move texts into `more`")
    for name, command in COMMANDS.items():
        assert f"  {name:16} {command.summary}\n" in out
    found = (path for path in FOLDER.rglob("*.py") if "def run(parser: Parser" in path.read_text("utf-8"))
    files = {".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in found}
    assert files == {command.module for command in (SERVE, *COMMANDS.values())}


def test_holders_takes_the_flags_of_the_node_and_none_that_serve() -> None:
    parser: Parser = COMMANDS["holders"].load().build_parser()
    assert parser.read(["--no-attribution.slurm", "--timeout=3s"]).once
    with pytest.raises(SystemExit):
        parser.read(["--web.listen-address=:1"])


@pytest.mark.parametrize("stream", ["/dev/full", "-"])
def test_a_closed_or_full_output_is_no_traceback(stream: str) -> None:
    script = f"{sys.executable} -m gpu_exporter version >{'&-' if stream == '-' else stream}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=20)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if stream == "/dev/full" else 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("reconsile",), "gpu-exporter: 'reconsile' is not a command; did you mean reconcile?; see gpu-exporter --help\n"),
        (("help", "xyz"), "gpu-exporter: 'xyz' is not a command; the commands are holders, top, "),
        (("--log.level=debug", "reconcile"), "the command comes first: gpu-exporter reconcile [FLAGS]"),
        (("TOP",), "'TOP' is not a command; did you mean top?"),
        (("top", "--fom=x", "--sotr", "gpu"), "top: unrecognized arguments: --fom --sotr; did you mean --from and --sort?"),
        (("record", "--hash-identifier"), "record: unrecognized arguments: --hash-identifier; did you mean --hash-identifiers?"),
        (("record",), "gpu-exporter record: the following arguments are required: FILE"),
        (("--log.levle=debug",), "unrecognized arguments: --log.levle; did you mean --log.level?; see"),
        (("--format=json",), "--output, --format and --check require --once"),
        (("explain",), "gpu-exporter explain: name a holder: NAMESPACE/POD, POD, job/ID, the UUID of its GPU, or NODE:INDEX"),
        (("explain", "ml/a", "--apply"), "gpu-exporter explain: unrecognized arguments: --apply"),
        (("top", "--from=gpu-[9-1]"), "argument --from: expected HOST, or a list of hosts such as gpu-[01-40]"),
        (("top", "--sort=size"), "argument --sort: invalid choice: 'size'"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_call_names_the_remedy(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*given, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_every_command_names_the_flag_that_was_probably_meant(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser: Parser = (COMMANDS | {"": SERVE})[name].load().build_parser()
    for action in parser._actions:
        for flag in action.option_strings:
            if len(flag) < len("--once") or f"{flag}x" in parser._option_string_actions:
                continue
            code, out, err = run(*filter(None, [name]), f"{flag}x", capsys=capsys)
            assert (code, out) == (2, "")
            assert f"unrecognized arguments: {flag}x; did you mean {flag}?; see" in err


def test_explain_accepts_its_holder_anywhere() -> None:
    parser: Parser = COMMANDS["explain"].load().build_parser()
    flags = ["--source.prometheus", "http://p", "--audit.file", "audit.jsonl", "--no-slurm"]
    before, after = parser.read(["ml/train-0", *flags]), parser.read([*flags, "ml/train-0"])
    assert vars(before) == vars(after)
    assert before.holder == ["ml/train-0"]


@pytest.mark.parametrize(("command", "flag"), [("top", "--from"), ("reconcile", "--source.exporter"), ("explain", "--source.exporter")])  # fmt: skip
def test_a_host_list_counts_as_a_repeated_flag(command: str, flag: str) -> None:
    parser: Parser = COMMANDS[command].load().build_parser()
    given = ["ml/a"] if command == "explain" else []
    each = [f"{flag}={host}:9837" for host in ("gpu-09", "gpu-10", "login")]
    assert vars(parser.read([*given, f"{flag}=gpu-[09-10]:9837,login:9837"])) == vars(parser.read([*given, *each]))


def test_the_sort_orders_of_top_are_those_of_its_screen() -> None:
    assert tuple(ORDERS) == SORTS


@pytest.mark.parametrize(
    ("line", "expected"),
    [("gpu-exporter re", {"reconcile", "record", "report"}), ("gpu-exporter he", {"help"}), ("gpu-exporter top --s", {"--sort"}), ("gpu-exporter reconcile --app", {"--apply"}), ("gpu-exporter --once --format t", {"table"}), ("gpu-exporter top --sort = h", {"held"}), ("gpu-exporter digest --output -", set()), ("gpu-exporter help j", {"job"})],
)  # fmt: skip
def test_bash_completes_commands_and_flags(
    line: str, expected: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, script, _ = run("completion", "bash", capsys=capsys)
    assert code == 0
    words = line.split()
    source = tmp_path / "completion.bash"
    source.write_text(script, "utf-8")
    asked = (
        f"source {source}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        "f=$(complete -p gpu-exporter | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f gpu-exporter; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "--norc", "-c", asked], capture_output=True, text=True, check=True, timeout=20)
    assert {word.strip() for word in done.stdout.split()} == expected


def test_zsh_gets_every_command_and_flag_with_its_help_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    _, script, _ = run("completion", "zsh", capsys=capsys)
    cases = dict(line.split(") _arguments ", 1) for line in script.splitlines() if ") _arguments " in line)
    assert set(cases) == {"''", *COMMANDS, "help"}
    for name, command in COMMANDS.items():
        for action in command.load().build_parser()._actions:
            assert all(f"'*{flag}" in cases[name] for flag in action.option_strings)
    assert "'*--sort=[order of rows\\: " in cases["top"] and "]:ORDER:(waste gpu " in cases["top"]
    assert "record:record the driver" in script


def test_the_version_is_printed_by_a_flag_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version", capsys=capsys) == run("--version", capsys=capsys)
    assert run("top", "--version", capsys=capsys)[0] == 0


def test_the_parser_of_one_command_loads_no_other_command() -> None:
    script = "import sys; from gpu_exporter.cli.main import run_command; run_command(['version']); print(sorted(m for m in sys.modules if m.startswith('gpu_exporter.')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    cli = ("", ".commands", ".environment", ".main", ".output", ".parser", ".print_version")
    loaded = {f"gpu_exporter.cli{name}" for name in cli} | {
        f"gpu_exporter.common{name}" for name in ("", ".exits", ".version")
    }
    assert done.stdout.splitlines()[1] == str(sorted(loaded))


@pytest.mark.parametrize(
    ("off", "message"),
    [
        ("stalls, interactive", ""),
        ("interactiv", "diagnosis.without: interactiv: no cause, did you mean interactive?"),
        ("interactive;stalls", "'interactive;stalls' is not a list of causes, or stalls"),
    ],
)
def test_a_cause_that_is_switched_off_exists(
    off: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"diagnosis: {{without: {json.dumps(off)}}}\n")
    code, _, err = run("check-config", str(file), capsys=capsys)
    assert (code, message in err) == (2 if message else 0, True), err
