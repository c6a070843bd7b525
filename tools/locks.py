"""Writes exporter/locks: the packages of the images and of the release tools, with hashes (`make locks`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.files import ROOT

LOCKS = ROOT / "exporter" / "locks"
HEAD = "# make locks: every dependency with the hashes of its files, for each Python and platform.\n"
EXTRAS = {"agent": ("web-auth",), "reconciler": ("web-auth", "reconciler")}
BUILD = "setuptools==80.9.0"  # builds the package itself; removed from the image afterwards
RELEASE = f"{BUILD}\nbuild==1.6.1\ncyclonedx-bom==7.5.0\n"


def compile_lock(source: str, extras: tuple[str, ...] = (), text: str | None = None) -> str:
    """Writes a lock for every supported Python and platform. Raises CalledProcessError."""
    options = ["--universal", "--python-version=3.10", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    given = [f"--extra={each}" for each in extras]
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", source, *options, "--no-emit-index-url"]
    done = subprocess.run([*command, *given], input=text, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return HEAD + done.stdout


def main() -> int:
    LOCKS.mkdir(exist_ok=True)
    for name, text in (("build", BUILD), ("release", RELEASE)):
        (LOCKS / f"{name}.txt").write_text(compile_lock("-", text=text), encoding="ascii")
    for part, extras in EXTRAS.items():
        (LOCKS / f"{part}.txt").write_text(compile_lock("pyproject.toml", extras), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
