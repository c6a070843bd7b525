"""The rules in the oldest vmalert that docs/interfaces.md names.

-dryRun parses expressions and templates. It evaluates nothing, and does not know the names of functions.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.testbed.node import program

pytestmark = pytest.mark.servers
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "alerts" / "rules").rglob("*.yaml"))


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(program("vmalert")), "-dryRun", f"-rule={path}", "-loggerLevel=ERROR"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_vmalert_accepts_every_file(path: Path) -> None:
    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [(" by (", " by by ("), ("humanizeDuration", "humanizeFortnights"), ("keep_firing_for:", "keep_burning_for:")],
    ids=["expression", "template", "key"],
)
def test_it_would_refuse_what_it_does_not_know(before: str, after: str, tmp_path: Path) -> None:
    text = next(text for text in (path.read_text("utf-8") for path in FILES) if before in text)
    changed = tmp_path / "rules.yaml"
    changed.write_text(text.replace(before, after), "utf-8")
    done = check(changed)
    assert done.returncode != 0 and after.strip(":( ") in done.stdout + done.stderr
