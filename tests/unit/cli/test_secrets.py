"""No secret in an argument: it is refused, and nothing repeats it. Every option is listed as secret or harmless."""

from __future__ import annotations

import pytest
from tests.testbed.secret_options import HARMLESS, HARMLESS_SETTINGS, IN_FILE, IN_TEXT, list_texts

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.main import run_command
from gpu_exporter.cli.parser import Parser, Private
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.config.values import PATTERNS, check_value

MARKER = "zq7Marker-S3cret"
ADDRESS = f"https://bob:{MARKER}@127.0.0.1:1"


def test_every_option_is_known_to_be_secret_or_harmless() -> None:
    """Add a new one to tests/testbed/secret_options.py; a secret one also to a case of tests/component/test_secrets.py."""
    names = {name for _, name, _ in list_texts()}
    assert sorted(names) == sorted(IN_TEXT | IN_FILE | HARMLESS)
    texts = {
        f"{section}.{key}"
        for section, values in Settings()._asdict().items()
        for key, value in values._asdict().items()
        if isinstance(value, str) and f"{section}.{key}" in PATTERNS
    }
    assert texts == HARMLESS_SETTINGS


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, name, _ in list_texts() if name in IN_TEXT])
def test_a_secret_in_an_argument_is_refused_and_not_repeated(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["ml/a"] if command == "explain" else []
    texts = [ADDRESS, ADDRESS.removeprefix("https://"), f"https://{MARKER}@host", f"https://bob:{MARKER}/x@host"]
    texts = [f"X-Api-Key: {MARKER}", f"authorization: Basic {MARKER}", MARKER] if name == "--source.header" else texts
    reasons = []
    for text in texts:
        with pytest.raises(SystemExit) as ended:
            run_command([command, *more, name, text] if command else [name, text])
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, "")
        assert f"argument {name}: " in said.err
        for part in (MARKER, "zq7", "S3cret", "bob"):
            assert part not in said.err
        reasons.append(said.err)
    assert "every user of this host can read arguments: use " in reasons[0]
    assert "-file" in reasons[0] or "variable GPU_EXPORTER_" in reasons[0] or "use GPU_EXPORTER_" in reasons[0]


def test_a_variable_may_have_an_address_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, module in {"": SERVE, **COMMANDS}.items():
        parser: Parser = module.load().build_parser()
        for variable, action in parser.settings.items():
            if not isinstance(action.type, Private):
                continue
            text = f"X-Api-Key: {MARKER}" if action.dest == "headers" else ADDRESS
            monkeypatch.setenv(variable, text)
            options = vars(module.load().build_parser().read(["ml/a"] if command == "explain" else []))
            monkeypatch.delenv(variable)
            (value,) = options[action.dest] if isinstance(options[action.dest], list) else (options[action.dest],)
            assert value == text if action.dest == "headers" else value.login == f"bob:{MARKER}"
            assert action.dest == "headers" or MARKER not in repr(options), "in no text of the options"


@pytest.mark.parametrize(
    "given",
    [
        ("reconcile", f"--source.basic-auth.password={MARKER}"),
        ("reconcile", "--source.basic-auth.password", MARKER),
        ("top", "--password", MARKER),
        ("--source.prometheus", ADDRESS),
        ("--web.password", MARKER),
    ],
)
def test_the_text_after_an_unknown_flag_is_not_repeated(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command(list(given))
    said = capsys.readouterr().err
    assert "unrecognized arguments: --" in said and MARKER not in said


@pytest.mark.parametrize("key", ["policy.help_url", "alerts.grafana"])
def test_an_address_that_everybody_reads_may_have_no_password(key: str) -> None:
    fault = check_value(*key.split("."), ADDRESS)
    assert fault.startswith("expected an address such as https://") and MARKER not in fault
    for text in ("", "https://docs.example.org", "https://docs.example.org/@team/gpu?a=b", "http://h:1/a"):
        assert check_value(*key.split("."), text) == ""
    assert check_value(*key.split("."), "https://docs.example.org/")
