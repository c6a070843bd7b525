"""A throw-away Slurm cluster: real slurmctld and slurmd from Debian packages, GPUs as device nodes without a driver.

The Slurm is of the machine's own release, or of another release in a chroot. Needs root (slurmd, mknod). Loopback only:
auth/none must never be used elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.testbed.chroots import debian_root
from tests.testbed.odd_host import OddHost
from tests.testbed.processes import Processes, Running, free_port, wait_for
from tests.testbed.servers import require
from tests.testbed.slurm_record import PACKAGES as RECORD_PACKAGES
from tests.testbed.slurm_record import PROGRAMS as RECORD_PROGRAMS
from tests.testbed.slurm_record import start_slurmdbd

GPUS = 4
USER = "nobody"
JWT_KEY = "jwt.key"
COMMANDS = ("sbatch", "scancel", "scontrol", "sdiag", "sinfo", "slurmctld", "slurmd", "slurmrestd", "squeue", "srun")
# In its own mount namespace, so that nothing remains mounted. /tmp has configuration and state.
IN_CHROOT = """#!/bin/sh
exec unshare --mount --propagation private sh -c '
root=$1; shift
for folder in proc dev sys tmp; do mount --rbind "/$folder" "$root/$folder"; done
exec chroot ${SLURM_LAB_USER:+--userspec="$SLURM_LAB_USER"} "$root" env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"' sh "{root}" {command} "$@"
"""
PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurmrestd",
    "slurm-wlm-jwt-plugin",
    "munge",
)
DEBIAN = {"24.11": "trixie", "26.05": "forky"}  # the Debian release with this Slurm
RECORDED = "24.11"  # the release that also has slurmdbd


def chroot_of(release: str) -> Path | None:
    """The chroot with Slurm of this release, built once into the cache (about 20 s); None for the machine's (22.05)."""
    if release not in DEBIAN:
        return None
    suite = DEBIAN[release]
    if release == RECORDED:
        return debian_root(f"slurm-{suite}-3", suite, (*PACKAGES, *RECORD_PACKAGES))
    return debian_root(f"slurm-{suite}-2", suite, PACKAGES)


class Layout(NamedTuple):
    """The nodes of a cluster and their GPUs. `{root}` is replaced by the cluster's directory in every text.

    `gres`: of each node in slurm.conf, unless the nodes differ (`gres_of`). `conf`: gres.conf. `files`: more files beside it, by name; slurmd reads
    fake_gpus.conf as the GPUs that NVML found. `settings`: lines of slurm.conf. `tracking`: its ProctrackType. `nodes`:
    number of nodes, all on this host. `devices`: more device files, by name. `ahead_s`: how many seconds the nodes'
    clock is ahead of slurmctld's clock. `configless`: slurmd gets its configuration from slurmctld; before that it
    supports only munge as authentication. Such a slurmd and munge need a chroot, for
    their files in /run. `recorded`: slurmdbd records the jobs, for sacct (only RECORDED has it).
    """

    gres: str = f"gpu:h100:{GPUS}"
    conf: str = f"AutoDetect=off\nName=gpu Type=h100 File={{root}}/dev/nvidia[0-{GPUS - 1}]\n"
    files: Mapping[str, str] = {}
    settings: str = ""
    tracking: str = "proctrack/linuxproc"
    nodes: int = 1
    devices: tuple[str, ...] = ()
    ahead_s: int = 0
    configless: bool = False
    gres_of: tuple[str, ...] = ()
    recorded: bool = False


class Slurm:
    """One running cluster with the node `n0`, or more nodes, each with GPUS GPUs."""

    def __init__(
        self, root: Path, environment: dict[str, str], in_chroot: bool, start_controller: Callable[[], Running]
    ) -> None:
        """Start the controller, but no node yet: `node` follows."""
        self.root = root
        self._in_chroot = in_chroot
        self.environment = environment
        self._start_controller = start_controller
        self.controller: Running
        self.node: Running
        self.start_controller()
        self._jobs: list[str] = []

    def run(self, *command: str, user: str = "", environment: Mapping[str, str] | None = None) -> str:
        """The output of a command, run as root or `user`, with `environment` added; it must not fail."""
        is_question = command[0] in ("squeue", "sinfo", "sacct") or command[:2] == ("scontrol", "show")
        for _ in range(4 if is_question else 1):  # Slurm's own limit of 10 s passes on a busy machine
            done = self.attempt(*command, user=user, environment=environment)
            if "timed out" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        return done.stdout

    def attempt(
        self, *command: str, user: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that may fail, for example because something does not exist yet."""
        environment, prefix = {**self.environment, **(environment or {})}, []
        if user and self._in_chroot:
            environment = {**environment, "SLURM_LAB_USER": user}
        elif user:
            prefix = ["runuser", "-u", user, "--", "env", f"SLURM_CONF={environment['SLURM_CONF']}"]
        return subprocess.run(
            [*prefix, *command], env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def start_rest(self, processes: Processes) -> str:
        """Start a slurmrestd that requires tokens; returns its address. The cluster's layout has a key for tokens."""
        place = f"127.0.0.1:{free_port()}"
        environment = {**self.environment, "SLURM_JWT": "daemon", "SLURM_LAB_USER": USER}
        prefix = [] if self._in_chroot else ["runuser", "-u", USER, "--"]
        pages = (
            "openapi/slurmctld" if self._in_chroot else "openapi/v0.0.38"
        )  # without the pages of slurmdbd, which does not run here
        processes.start([*prefix, "slurmrestd", "-s", pages, "-a", "rest_auth/jwt", place], environment)
        return f"http://{place}"

    def submit(
        self, *flags: str, runs: bool = True, user: str = USER, environment: Mapping[str, str] | None = None
    ) -> str:
        """Submit a job that only sleeps, and wait until it runs unless told otherwise; returns its id."""
        job = self.submit_script(self.root / "job.sh", "-n1", *flags, user=user, environment=environment)
        if runs:
            self.wait_until_runs(job)
        return job

    def submit_script(
        self, script: Path, *flags: str, user: str = USER, environment: Mapping[str, str] | None = None
    ) -> str:
        """Submit a job with that script and `environment` as its owner; returns its id."""
        command = ("sbatch", "--parsable", "-D", "/tmp", "-o", "/dev/null", *flags, str(script))
        job = self.run(*command, user=user, environment=environment).strip()
        self._jobs.append(job)
        return job

    def minors(self) -> list[int]:
        """Minor numbers of the device files in the order of IDX, from slurmd's log."""
        pattern = r"gpu device number \d+\(\S*/nvidia(\d+)\):"
        return [int(minor) for minor in re.findall(pattern, self.node.log())][:GPUS]

    def wait_until_runs(self, job: str) -> None:
        """Wait for a job, or for all tasks of an array."""
        states = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_for(lambda: set(self.run(*states).split()) == {"RUNNING"}, f"job {job} to run")

    @property
    def port(self) -> int:
        """The port of slurmctld."""
        found = re.search(r"^SlurmctldPort=(\d+)$", (self.root / "etc" / "slurm.conf").read_text("utf-8"), re.MULTILINE)
        assert found is not None
        return int(found[1])

    def start_controller(self) -> None:
        """Start slurmctld, also after `controller.stop()`, and wait until it answers."""
        self.controller = self._start_controller()
        wait_for(lambda: "UP" in self.attempt("scontrol", "ping").stdout, "slurmctld to answer")

    def wait_until_registered(self, node: str = "n0") -> None:
        """Wait until a node has registered with the new slurmctld, which reports no GPU of the node before that."""
        text = ("scontrol", "show", "node", node)
        found = re.compile(r"SlurmdStartTime=\d")  # the value is "None" before
        wait_for(lambda: found.search(self.run(*text)), "the node to be registered")

    def restart_slurmd(self, processes: Processes) -> None:
        """Restart slurmd of node n0, which reads its configuration again and registers; steps keep running."""
        self.node.stop()
        before = self.started()
        self.node = processes.start(["slurmd", "-D", "-N", "n0"], self.environment)
        wait_for(lambda: self.started() > before, "the new slurmd to be registered")

    def started(self) -> int:
        """Start time of slurmd of node n0, in Unix seconds."""
        text = self.run("scontrol", "show", "node", "n0", environment={"SLURM_TIME_FORMAT": "%s"})
        found = re.search(r"SlurmdStartTime=(\d+)", text)
        assert found is not None, text
        return int(found[1])

    def requeue(self, job: str) -> None:
        """End this run of a job; the job waits until `run_again`."""
        done = self.attempt("scontrol", "requeuehold", job)
        if done.returncode:  # on a busy machine, the answer may be lost after slurmctld has done it
            state = ("squeue", "-h", "-j", job, "-o", "%T")
            wait_for(lambda: self.run(*state).strip() not in ("", "RUNNING", "COMPLETING"), done.stderr)

    def run_again(self, job: str) -> None:
        """Let a requeued job run. It may begin once the credential of its last run has expired (`AuthInfo`)."""
        self.run("scontrol", "release", job)
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_for(lambda: self.run(*state).strip() == "RUNNING", f"job {job} to run again", each_s=0.5)

    def cancel_all(self) -> None:
        for job in self._jobs:
            subprocess.run(["scancel", job], env=self.environment, check=False, timeout=60)
        self._jobs.clear()
        wait_for(lambda: not self.run("squeue", "-h", "-t", "RUNNING,COMPLETING").strip(), "the jobs to end")


@contextmanager
def start_slurm(processes: Processes, chroot: Path | None = None, layout: Layout | None = None) -> Iterator[Slurm]:
    """Start controller and nodes, and wait until they are idle; afterwards end them with all their processes.

    With a chroot, `environment` has a PATH on which Slurm's commands are those of the chroot.
    """
    layout = layout or Layout()
    if chroot is None:
        require(*COMMANDS)
    if os.geteuid() != 0:
        assert not os.environ.get("CI"), "CI runs the Slurm tests as root"
        pytest.skip("slurmd and mknod need root")
    root = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
    root.chmod(0o755)
    state = tempfile.mkdtemp(prefix="slurm-lab-", dir="/dev/shm")  # a slow disk delays each order by seconds
    try:
        (root / "state").symlink_to(state)
        environment = _configure(root, chroot, layout)
        host = _host_of_controller(root, layout.ahead_s)
        if layout.configless:
            _start_munge(processes, chroot, environment)
        if layout.recorded:
            start_slurmdbd(processes, root, environment)
        slurm = Slurm(
            root, environment, chroot is not None, lambda: processes.start(["slurmctld", "-D"], {**environment, **host})
        )
        own, command = environment, ["slurmd", "-D"]
        if layout.configless:
            own = {name: value for name, value in environment.items() if name != "SLURM_CONF"}
            command += ["--conf-server", f"127.0.0.1:{slurm.port}"]
        nodes = [processes.start([*command, "-N", f"n{i}"], own) for i in range(layout.nodes)]
        slurm.node = nodes[0]
        idle = ["idle"] * layout.nodes
        wait_for(lambda: slurm.run("sinfo", "-h", "-N", "-o", "%t").split() == idle, "the nodes to be idle")
        try:
            yield slurm
        finally:
            try:
                slurm.cancel_all()
            finally:
                for node in (slurm.node, *nodes):
                    node.stop()
                slurm.controller.stop()
    finally:
        for folder in (root, state):
            shutil.rmtree(folder, ignore_errors=True)


def _host_of_controller(root: Path, ahead_s: int) -> dict[str, str]:
    """Environment that sets slurmctld's clock this many seconds behind the nodes' clock."""
    if not ahead_s:
        return {}
    host = OddHost(root / "clock")
    host.step(-ahead_s)
    return host.environment


def _start_munge(processes: Processes, chroot: Path | None, environment: dict[str, str]) -> None:
    assert chroot is not None
    socket = chroot / "run" / "munge" / "munge.socket.2"
    socket.parent.mkdir(exist_ok=True)
    socket.unlink(missing_ok=True)
    processes.start(["munged", "--foreground", "--force"], environment)
    wait_for(socket.is_socket, "munged")


def _configure(root: Path, chroot: Path | None, layout: Layout) -> dict[str, str]:
    for name in ("etc", "spool", "log", "run", "dev"):
        (root / name).mkdir()
    path = os.environ["PATH"]
    owner: int | str = "slurm"
    if chroot is not None:
        (root / "bin").mkdir()
        for command in (*COMMANDS, *RECORD_PROGRAMS, "munged"):
            wrapper = root / "bin" / command
            wrapper.write_text(IN_CHROOT.replace("{root}", str(chroot)).replace("{command}", command), encoding="utf-8")
            wrapper.chmod(0o755)
        path = f"{root / 'bin'}:{path}"
        owner = next(
            int(line.split(":")[2])
            for line in (chroot / "etc" / "passwd").read_text("utf-8").splitlines()
            if line.startswith("slurm:")
        )
    for name in ("state", "log", "run"):
        shutil.chown(root / name, owner)
    for minor in range(GPUS):
        os.mknod(root / "dev" / f"nvidia{minor}", 0o666 | 0o020000, os.makedev(195, minor))
    for minor, name in enumerate(layout.devices):
        os.mknod(root / "dev" / name, 0o666 | 0o020000, os.makedev(240, minor))
    (root / "job.sh").write_text("#!/bin/sh\nsleep 600\n", encoding="utf-8")
    (root / "job.sh").chmod(0o755)
    host = os.uname().nodename.partition(".")[0]
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "slurm",
        "AuthType": "auth/none",
        "AuthInfo": "cred_expire=5",  # how long a requeued job waits; two minutes by default
        "CredType": "cred/none",
        "SlurmctldPort": free_port(),
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": root / "run" / "slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/slurmd-%n.pid",
        "SlurmctldLogFile": root / "log" / "slurmctld.log",
        "SlurmdLogFile": f"{root}/log/slurmd-%n.log",
        "ProctrackType": layout.tracking,
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # The scheduler runs every two seconds; a new begin time takes effect only then.
        "SchedulerParameters": "bf_interval=2,sched_interval=2",
        "ReturnToService": 2,
        "MpiDefault": "none",
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
        "SlurmdParameters": "config_overrides",
        "DebugFlags": "Gres",
        "SlurmdDebug": "debug",  # slurmd then logs its list of device files
        "PartitionName": "gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    }
    lines = "".join(f"{key}={value}\n" for key, value in settings.items())
    for index in range(layout.nodes):
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=2000"
        gres = layout.gres_of[index] if layout.gres_of else layout.gres
        lines += f"NodeName=n{index} {place} Gres={gres} State=UNKNOWN\n"
    if layout.configless:
        lines += "SlurmctldParameters=enable_configless\nAuthType=auth/munge\nCredType=cred/munge\n"
    lines += layout.settings.replace("{root}", str(root))
    (root / "etc" / "slurm.conf").write_text(lines, encoding="utf-8")
    for name, text in {"gres.conf": layout.conf, **layout.files}.items():
        (root / "etc" / name).write_text(text.replace("{root}", str(root)), encoding="utf-8")
        if name.endswith(".sh"):
            (root / "etc" / name).chmod(0o755)
        elif name == JWT_KEY:  # accepted only if no other user may read it
            shutil.chown(root / "etc" / name, owner)
            (root / "etc" / name).chmod(0o600)
    own = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
    cgroup = own if chroot is None else "CgroupPlugin=disabled\n"  # 22.05 does not support "disabled"
    (root / "etc" / "cgroup.conf").write_text(cgroup, encoding="utf-8")
    return {**os.environ, "PATH": path, "SLURM_CONF": str(root / "etc" / "slurm.conf")}
