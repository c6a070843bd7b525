"""A throw-away Slurm cluster: real slurmctld and slurmd from Debian packages, GPUs as device nodes without a driver.

Needs root (slurmd, mknod). Loopback only: auth/none must never be used elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.servers import require

GPUS = 4
USER = "nobody"


class Slurm:
    """One running cluster of one node, `n0`, with GPUS GPUs."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self.environment = environment
        self._jobs: list[str] = []

    def run(self, *command: str, user: str = "") -> str:
        prefix = ["runuser", "-u", user, "--", "env", f"SLURM_CONF={self.environment['SLURM_CONF']}"] if user else []
        done = subprocess.run(
            [*prefix, *command], env=self.environment, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *flags: str) -> str:
        """A job that only sleeps; its id, once it runs."""
        script = str(self.root / "job.sh")
        job = self.run(
            "sbatch", "--parsable", "-D", "/tmp", "-o", "/dev/null", "-n1", *flags, script, user=USER
        ).strip()
        self._jobs.append(job)
        wait_for(lambda: self.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", f"job {job} to run")
        return job

    def cancel_all(self) -> None:
        for job in self._jobs:
            subprocess.run(["scancel", job], env=self.environment, check=False, timeout=30)
        wait_for(lambda: not self.run("squeue", "-h", "-t", "RUNNING,COMPLETING").strip(), "the jobs to end")


@contextmanager
def start_slurm(processes: Processes) -> Iterator[Slurm]:
    """Start controller and node, wait until the node is idle; end them with everything they started."""
    require("slurmctld", "slurmd", "scontrol", "squeue", "sbatch")
    if os.geteuid() != 0:
        assert not os.environ.get("CI"), "CI runs the Slurm tests as root"
        pytest.skip("slurmd and mknod need root")
    root = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
    root.chmod(0o755)
    try:
        environment = _configure(root)
        controller = processes.start(["slurmctld", "-D"], environment)
        slurm = Slurm(root, environment)
        ping = ["scontrol", "ping"]
        wait_for(
            lambda: b"UP" in subprocess.run(ping, env=environment, capture_output=True, check=False).stdout,
            "slurmctld to answer",
        )
        node = processes.start(["slurmd", "-D", "-N", "n0"], environment)
        wait_for(lambda: slurm.run("sinfo", "-h", "-N", "-o", "%t").strip() == "idle", "the node to be idle", 30)
        try:
            yield slurm
        finally:
            slurm.cancel_all()
            node.stop()
            controller.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path) -> dict[str, str]:
    for name in ("etc", "state", "spool", "log", "run", "dev"):
        (root / name).mkdir()
    for name in ("state", "log", "run"):
        shutil.chown(root / name, "slurm")
    for minor in range(GPUS):
        os.mknod(root / "dev" / f"nvidia{minor}", 0o666 | 0o020000, os.makedev(195, minor))
    (root / "job.sh").write_text("#!/bin/sh\nsleep 600\n", encoding="utf-8")
    (root / "job.sh").chmod(0o755)
    host = os.uname().nodename.partition(".")[0]
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "slurm",
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmctldPort": free_port(),
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": root / "run" / "slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/slurmd-%n.pid",
        "SlurmctldLogFile": root / "log" / "slurmctld.log",
        "SlurmdLogFile": f"{root}/log/slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "ReturnToService": 2,
        "MpiDefault": "none",
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
        "SlurmdParameters": "config_overrides",
        "NodeName": f"n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=2000 "
        f"Gres=gpu:h100:{GPUS} State=UNKNOWN",
        "PartitionName": "gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    }
    lines = "".join(f"{key}={value}\n" for key, value in settings.items())
    (root / "etc" / "slurm.conf").write_text(lines, encoding="utf-8")
    gres = f"AutoDetect=off\nName=gpu Type=h100 File={root}/dev/nvidia[0-{GPUS - 1}]\n"
    (root / "etc" / "gres.conf").write_text(gres, encoding="utf-8")
    cgroup = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
    (root / "etc" / "cgroup.conf").write_text(cgroup, encoding="utf-8")
    return {**os.environ, "SLURM_CONF": str(root / "etc" / "slurm.conf")}
