"""What `make packages INTERPRETER=1` says on a host that cannot build an interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools import interpreter, node_package


def test_without_its_programs_the_packages_to_install_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_package.main([str(tmp_path / "out"), "--interpreter"]) == 1
    said = "packages: this needs Debian or Ubuntu with apt-get install dpkg-dev mmdebstrap\n"
    assert capsys.readouterr() == ("", said)
    assert not (tmp_path / "out").exists()


def test_another_kind_of_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="ppc64le"))
    with pytest.raises(interpreter.InterpreterError, match="on ppc64le, only on x86_64 and aarch64"):
        interpreter.build(tmp_path / "interpreter")


def test_a_step_that_fails_leaves_nothing_and_shows_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mirror that does not answer, for example."""
    for name in interpreter.NEEDED:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'E: no mirror' >&2\nexit 25\n", "utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(interpreter, "MACHINES", {os.uname().machine: ("", "", "", "")})
    with pytest.raises(interpreter.InterpreterError, match="mmdebstrap .* in sources: E: no mirror"):
        interpreter.build(tmp_path / "made" / "interpreter")
    assert list((tmp_path / "made").iterdir()) == []
