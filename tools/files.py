"""Writes generated files, or checks that they are up to date."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(files: Mapping[Path, str], check: bool) -> int:
    """Writes generated files. With `check`, only lists the stale ones. Returns the exit code."""
    stale = 0
    for path, text in files.items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        else:
            print(f"{path} is stale: run `make generate`", file=sys.stderr)
            stale = 1
    return stale
