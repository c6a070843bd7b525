"""Compiles the library, once per source, into the test bed's cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.testbed.nvml.layout import render_header
from tests.testbed.programs import cache_root

SOURCE = Path(__file__).resolve().parent / "libnvidia_ml.c"
NAME = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NAME}")


def build_library() -> Path:
    """The directory that holds libnvidia-ml.so.1: for LD_LIBRARY_PATH."""
    header = render_header()
    key = hashlib.sha256("\0".join((SOURCE.read_text("utf-8"), header, *FLAGS)).encode()).hexdigest()[:16]
    target = cache_root() / f"nvml-{key}"
    if (target / NAME).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        (work / "table.h").write_text(header, encoding="utf-8")
        subprocess.run(["gcc", *FLAGS, "-I", name, "-o", str(work / NAME), str(SOURCE)], check=True)
        finished = Path(tempfile.mkdtemp(dir=target.parent))
        shutil.move(str(work / NAME), str(finished / NAME))
        try:
            finished.rename(target)
        except OSError:  # somebody else was faster
            shutil.rmtree(finished)
    return target
