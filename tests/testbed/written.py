"""The commands in the docs, to be run as they are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Notes the program's name and its arguments as one line of JSON.
NOTE = """#!/usr/bin/env python3
import json, sys
with open({notes!r}, "a", encoding="utf-8") as notes:
    notes.write(json.dumps(sys.argv) + "\\n")
"""


def code_blocks(page: Path) -> list[str]:
    """The text of each code block of a page."""
    return re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def code_block(page: Path, text: str) -> str:
    """The only code block of a page that has this text."""
    (found,) = [block for block in code_blocks(page) if text in block]
    return found


def commands(block: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program at the start of a line, with or without a prompt."""
    joined = block.replace("\\\n", " ")
    lines = re.findall(rf"^(?:\$ )?{re.escape(program)}((?: .*)?)$", joined, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def checkout(folder: Path) -> Path:
    """A copy of what git tracks, as a clone has it, with changes that are not committed yet."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := ROOT / name).exists():  # not if it is being deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    return folder


def calls(
    script: str, programs: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Run a script in the checkout, with programs that only note how they are called; these calls, each with the
    program's name.
    """
    shims, notes = folder / "shims", folder / "calls"
    shims.mkdir()
    for name in programs:
        (shims / name).write_text(NOTE.format(notes=str(notes)), encoding="utf-8")
        (shims / name).chmod(0o755)
    own = dict(os.environ if environment is None else environment)
    own["PATH"] = f"{shims}:{own['PATH']}"
    done = subprocess.run(["sh", "-euc", script], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    read = [json.loads(line) for line in notes.read_text("utf-8").splitlines()]
    return [[Path(program).name, *arguments] for program, *arguments in read]
