"""The audit log on a disk that is full: what counts as written is there, whole. Needs root for a file system of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Two processes write until the disk is full, free a little, and write again.
WRITER = """
import os, sys
from pathlib import Path
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName

path, filler = Path(sys.argv[1]) / "audit.jsonl", Path(sys.argv[1]) / "filler"
log = AuditLog(path, Rulebook(Policy()), SYSTEM_CLOCK, lambda: None)
for number in range(200):
    if sys.argv[2] == "a" and number == 100:
        filler.unlink()
    key = f"{sys.argv[2]}-{number}"
    if log._write("action", HolderName("kubernetes", "ml", "a"), {"act": key, "note": "x" * (number * 7 % 300)}):
        print(key)
"""


def test_what_counts_as_written_is_whole_on_a_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        assert not os.environ.get("CI"), "CI runs these tests as root"
        pytest.skip("a file system of its own needs root")
    (tmp_path / "writer.py").write_text(WRITER, "utf-8")
    script = f"""set -e
mount -t tmpfs -o size=32k tmpfs {tmp_path}/disk
head -c 8192 /dev/zero >{tmp_path}/disk/filler
{sys.executable} {tmp_path}/writer.py {tmp_path}/disk b >{tmp_path}/b & other=$!
{sys.executable} {tmp_path}/writer.py {tmp_path}/disk a >{tmp_path}/a
wait $other
cp {tmp_path}/disk/audit.jsonl {tmp_path}/kept
"""
    (tmp_path / "disk").mkdir()
    subprocess.run(["unshare", "--mount", "sh", "-c", script], check=True, timeout=60)
    written = [*(tmp_path / "a").read_text().split(), *(tmp_path / "b").read_text().split()]
    found, torn = [], 0
    for line in (tmp_path / "kept").read_bytes().split(b"\n"):
        try:
            found += [json.loads(line)["act"]] if line else []
        except ValueError:
            torn += 1
    assert len(written) < 400, "the disk was never full"
    assert set(written) <= set(found) and len(written) > 30
    assert torn > 0, "no line was cut, so this test has shown nothing"
