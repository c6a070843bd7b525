"""`--format json`: every command that prints a table or a report has it, and what it prints is JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.testbed.marker_book import UNDERUSED, A, B, Book

from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.main import run_command
from gpu_exporter.reconciler.runtime.loops import remove_all

WITHOUT = {
    "slurm-collector": "it prints nothing but its log",
    "demo": "it tells a story; its page serves JSON",
    "forget": "it prints one sentence; its exit code says whether it has done it",
    "contrib": "it prints one folder",
    "completion": "it prints a script",
    "version": "it prints one word",
}


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_a_command_can_print_json_or_has_a_reason_not_to(name: str) -> None:
    flags = (COMMANDS | {"": SERVE})[name].load().build_parser()._option_string_actions
    assert ("json" in flags["--format"].choices) if name not in WITHOUT else "--format" not in flags


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "node.yaml"
    gpus = [{"model": "H100"}, {"model": "H100"}]
    path.write_text(yaml.safe_dump({"gpus": gpus, "holders": [{"gpu": 0, "kind": "job", "name": "7", "user": "ada"}]}))
    return path


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> Any:
    assert run_command(list(given)) == 0
    return json.loads(capsys.readouterr().out)


def test_holders_are_the_allocations_of_the_status(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"--devices.scenario={node}", "--state.directory=", "--no-attribution.slurm", "--format=json")
    found = printed(capsys, "holders", *flags)
    (allocation,) = found["allocations"]
    assert (allocation["gpu"], allocation["job_id"], allocation["user"]) == (0, "7", "ada")
    assert (allocation["source"], allocation["doubt"]) == ("scenario", "")
    assert ([gpu["state"] for gpu in found["gpus"]], allocation["state"]) == (["held", "free"], "unknown")
    assert found.keys() == printed(capsys, "--once", *flags).keys()


def test_the_configuration_in_force_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("policy: {underused_after: 3h}\n")
    found = printed(capsys, "check-config", str(path), "--format=json")
    assert (found["policy"]["underused_after"], found["alerts"]["idle_for"]) == ("3h", "1h")


def test_a_pause_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"--pause.file={tmp_path / 'pause'}"
    assert printed(capsys, "pause", place, "--format=json")["paused"] is False
    assert printed(capsys, "pause", place, "--for=1w", "--reason=storage", "--format=json")["reason"] == "storage"


def test_removed_marks_are_one_line_of_json_each(capsys: pytest.CaptureFixture[str]) -> None:
    book = Book()
    book.marks = {A: UNDERUSED, B: UNDERUSED}
    assert remove_all([book], apply=True, form="json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["stage"], each["outcome"], each["done"]) for each in found] == [(UNDERUSED, "withdrawn", True)] * 2
    assert len({each["holder"] for each in found}) == 2


@pytest.mark.parametrize("given", [["--once", "--apply"], [], ["--apply"]])
def test_a_form_that_would_have_no_effect_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command(["reconcile", *given, "--format=json", "--source.prometheus=http://127.0.0.1:1"])
    assert "--format requires --once without --apply, or --remove-all" in capsys.readouterr().err
