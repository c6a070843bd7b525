"""`gpu-exporter report --against sacct` on a real Prometheus: what Slurm counts in another way than the nodes.

sacct is a script with the lines of a real one, because these need MIG, shards and nodes without an exporter.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.common.exits import Exit
from tests.testbed.processes import Processes, run_exporter
from tests.testbed.servers import Prometheus, write_history

pytestmark = pytest.mark.servers
HOUR, MINUTE = 3600, 60
TENANT = 'scheduler="slurm",account="{account}",user="erin"'
UNIT = 'uuid="GPU-1",mig_uuid="{mig}",scheduler="slurm",job_id="{job}"'
HOLDERS = (("mig", "mig", 1 / 7), ("shard", "shard", 0.25), ("whole", "none", 1.0))  # account, kind of share, share
SACCT = """#!/bin/sh
case "$*" in *--truncate*--allusers*) ;; *) exit 1 ;; esac
cat <<'END'
{lines}
END
"""


def ask(processes: Processes, path: Path, lines: list[str], *flags: str, nodes: str = "n1.example.org") -> Any:
    """The comparison of two hours. In the history, since one hour ago, account mig has a seventh of a GPU, account
    shard a quarter, and account whole a GPU.
    """
    end = int(time.time()) - 30
    history = []
    for at in range(end - HOUR, end + 1, MINUTE):
        target = f'job="gpu-exporter",node="{nodes}",instance="n1:1"'
        history += [f"gpu_exporter_build_info{{{target}}} 1 {at}", f'gpu_up{{{target},uuid="GPU-1"}} 1 {at}']
        for job, (account, kind, share) in enumerate(HOLDERS):
            tenant = TENANT.format(account=account)
            held = share * (at - end + HOUR)
            for name in ("held", "known", "busy", "idle"):
                history.append(f"gpu_tenant_{name}_gpu_seconds_total{{{target},{tenant}}} {held:.3f} {at}")
            unit = UNIT.format(job=job, mig="MIG-1" if kind == "mig" else "")
            history.append(f'gpu_allocation_info{{{target},{unit},account="{account}",share="{kind}"}} 1 {at}')
            history.append(f"gpu_allocation_share_ratio{{{target},{unit}}} {share:.6f} {at}")
    (path / "history").mkdir(parents=True)
    write_history(path / "history", history)
    prometheus = Prometheus(processes, path / "history", {})
    (path / "bin").mkdir()
    text = "\n".join(line.format(start=end - HOUR, end=end) for line in lines)
    (path / "bin" / "sacct").write_text(SACCT.format(lines=text), encoding="utf-8")
    (path / "bin" / "sacct").chmod(0o755)
    environment = {**os.environ, "PATH": f"{path / 'bin'}:{os.environ['PATH']}"}
    given = (f"--source.prometheus={prometheus.url}", "--since=2h", "--format=json")
    done = run_exporter("report", "--against=sacct", *given, *flags, environment=environment)
    return json.loads(done.stdout) if done.returncode == 0 else (done.returncode, done.stderr)


def run(job: int, account: str, tres: str, nodes: str = "n1", user: str = "erin") -> str:
    return f"{job}|{job}|{user}|{account}|gpu||COMPLETED|0:0|{{start}}|{{end}}|{HOUR}|60|cpu=1,{tres}|{nodes}"


RUNS = [
    run(0, "mig", "gres/gpu:1g.10gb=1,gres/gpu=1"),
    run(1, "shard", "gres/shard=1"),
    run(2, "whole", "gres/gpu=1"),
    run(3, "whole", "gres/gpu=4", "n2", "bob"),
    run(4, "other", "node=1"),
]


def test_a_comparison_that_cannot_be_right_is_refused(processes: Processes, tmp_path: Path) -> None:
    def refused(name: str, lines: list[str]) -> str:
        code, text = ask(processes, tmp_path / name, lines)
        assert code == Exit.NO_DATA
        return str(text)

    assert "shows this user 1 runs in this period, but none with GPUs: set AccountingStorageTRES" in refused(
        "tres", RUNS[-1:]
    )
    assert "shows this user 0 runs in this period" in refused("none", [])


def test_names_of_other_nodes_are_no_reason_and_a_single_user_is_named(processes: Processes, tmp_path: Path) -> None:
    found = ask(processes, tmp_path, RUNS[:1], nodes="10.0.0.7")
    assert all(each["reasons_gpu_seconds"]["unseen"] == 0.0 for each in found["accounts"])
    notes = " ".join(found["notes"])
    assert "no node has the same name in Slurm and in the label `node`" in notes
    assert "sacct shows only runs of erin: if PrivateData is set" in notes


def test_parts_of_gpus_and_nodes_without_an_exporter_explain_the_difference(
    processes: Processes, tmp_path: Path
) -> None:
    found = ask(processes, tmp_path, RUNS)
    accounts = {each["account"]: each for each in found["accounts"]}
    reasons = {account: each["reasons_gpu_seconds"] for account, each in accounts.items()}
    assert {account: each["sacct_gpu_seconds"] for account, each in accounts.items()} == {
        "mig": HOUR, "shard": 0.0, "whole": 5.0 * HOUR,
    }  # fmt: skip
    held = {account: each["held_gpu_seconds"] for account, each in accounts.items()}
    assert held == {account: pytest.approx(share * HOUR, rel=0.02) for account, _, share in HOLDERS}
    assert reasons["mig"]["parts"] == pytest.approx(-6 / 7 * HOUR, rel=0.03)
    assert reasons["shard"]["parts"] == pytest.approx(0.25 * HOUR, rel=0.03)
    assert reasons["whole"]["unseen"] == pytest.approx(-4.0 * HOUR)
    assert all(abs(each["rest"]) < 0.03 * HOUR for each in reasons.values())
    assert [note[:5] for note in found["notes"]] == ["Seen:"]
