"""Jobs by Slurm's own commands.

Two questions, since job names and comments may hold anything, line breaks and whole imitations of scontrol's output
included (measured on 22.05):
- who: `squeue` with columns that only Slurm and its administrators fill, restricted to this node;
- which devices: `scontrol -o show job -d ID`, once per incarnation of a job, refused when it is ambiguous.
So the controller is not asked for the whole cluster's jobs by every node.

`GRES=gpu:h100:2(IDX:0,2-3)`: IDX is the position in the node's gres.conf device list, which is /dev/nvidiaN when
`File=` names them (so N, the minor number) and PCI order, NVML's order, with AutoDetect=nvml.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.model import Claim, Holder, HolderKey

# Column widths only pad: Slurm cuts at the width, so they are far above any real value.
COLUMNS = ("JobID", "UserName", "Account", "Partition", "QOS", "State", "StartTime", "RestartCnt")
SQUEUE_FORMAT = ",".join(f"{column}:256|" for column in COLUMNS)
HOLDING = ("RUNNING", "SUSPENDED", "STOPPED")
RECORD = re.compile(r"\n(?=JobId=\d+ )")
NODE_GRES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)")
GPU_INDEXES = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:\d+\(IDX:([0-9,-]+)\)")


class Job(NamedTuple):
    """One row of squeue. `start` is Unix seconds, None while unknown."""

    job_id: str
    user: str
    account: str
    partition: str
    qos: str
    state: str
    start: float | None
    restarts: str


def parse_squeue(text: str) -> list[Job]:
    """Rows of `squeue -h -O SQUEUE_FORMAT` under SLURM_TIME_FORMAT=%s. Raises SourceError on any other shape."""
    jobs: list[Job] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")][:-1]
        if len(cells) != len(COLUMNS) or not cells[0].isdigit():
            raise SourceError(f"squeue printed a line that is not understood: {line.strip()[:80]!r}")
        known = ["" if cell in ("(null)", "N/A") else cell for cell in cells]
        start = float(known[6]) if known[6].isdigit() else None
        job_id, user, account, partition, qos, state = known[:6]
        jobs.append(Job(job_id, user, account, partition, qos, state, start, known[7] or "0"))
    return jobs


def parse_ranges(text: str) -> list[int]:
    """`0,2-3` to [0, 2, 3]. Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def parse_names(text: str) -> list[str]:
    """`n[0-1,7],login` to the names in order; zero padding is kept. Raises ValueError."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?[^,\[]*", text):
        match = re.fullmatch(r"([^\[]+)\[([^\]]+)\](.*)", part)
        if not match:
            names.append(part)
            continue
        for item in match[2].split(","):
            first, _, last = item.partition("-")
            names += [
                f"{match[1]}{number:0{len(first)}d}{match[3]}" for number in range(int(first), int(last or first) + 1)
            ]
    return names


class JobGpus(NamedTuple):
    """Indexes of a job's GPUs on one node, and how many it has on all its nodes together."""

    indexes: list[int]
    total: int


def parse_job_gpus(text: str, job_id: str, node: str) -> JobGpus:
    """The GPUs that `scontrol -o show job -d ID` gives the job on `node`.

    Raises SourceError when the text could have been shaped by the job's owner: then nothing in it is believed. A job
    array's id lists all of its tasks, one record each.
    """
    records = [record for record in RECORD.split(text) if record.startswith(f"JobId={job_id} ")]
    refusal = SourceError(f"job {job_id}: its name or comment imitates scontrol's output; not attributed")
    if len(records) != 1 or "MinCPUsNode=" not in records[0]:
        raise refusal
    before, marker, after = records[0].partition("JOB_GRES=")
    details, _, rest = after.partition(" MinCPUsNode=")
    if NODE_GRES.search(before) or NODE_GRES.search(rest):
        raise refusal
    if not marker:
        return JobGpus([], 0)
    gpus: list[int] = []
    total = 0
    for hosts_text, gres in NODE_GRES.findall(details):
        hosts = parse_names(hosts_text)
        for indexes in GPU_INDEXES.findall(gres):
            numbers = parse_ranges(indexes)
            total += len(numbers) * len(hosts)
            gpus += numbers if node in hosts else []
    return JobGpus(gpus, total)


def parse_gres_conf(text: str, node: str) -> list[str]:
    """Device files of `Name=gpu` in order, e.g. ["/dev/nvidia0", ...]; empty under AutoDetect without files.

    Raises ValueError.
    """
    files: list[str] = []
    for line in text.splitlines():
        pairs = (pair.partition("=")[::2] for pair in line.partition("#")[0].split())
        options = {key.lower(): value for key, value in pairs}
        if options.get("name", "").lower() != "gpu" or "file" not in options:
            continue
        if "nodename" in options and node not in parse_names(options["nodename"]):
            continue
        files += parse_names(options["file"])
    return files


class SlurmSource:
    """Polls Slurm for the jobs of one node."""

    name = "slurm"

    def __init__(self, node: str = "", timeout_s: float = 5.0) -> None:
        self._node = node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self._timeout_s = timeout_s
        self._config = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
        self._cluster: str | None = None
        self._gpus: dict[str, JobGpus] = {}  # by incarnation: a running job keeps its devices

    @staticmethod
    def is_present() -> bool:
        """Whether this host has Slurm's client commands and a configuration (a file, or one fetched by slurmd)."""
        places = (os.environ.get("SLURM_CONF", ""), "/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
        commands = shutil.which("squeue") is not None and shutil.which("scontrol") is not None
        return commands and any(place and Path(place).is_file() for place in places)

    def poll(self) -> Answer:
        text = self._run("squeue", "-h", "-a", "-w", self._node, "-t", ",".join(HOLDING), "-O", SQUEUE_FORMAT)
        jobs = {self._incarnation(job): job for job in parse_squeue(text)}
        self._gpus = {key: gpus for key, gpus in self._gpus.items() if key in jobs}
        problems: list[str] = []
        for incarnation, job in jobs.items():
            if incarnation not in self._gpus:
                try:
                    self._gpus[incarnation] = self._read_gpus(job.job_id)
                except (SourceError, ValueError) as exc:  # one job's fault leaves the others attributed
                    problems.append(str(exc))
        return Answer(self._claims(jobs), "; ".join(problems[:3]))

    def _read_gpus(self, job_id: str) -> JobGpus:
        return parse_job_gpus(self._run("scontrol", "-o", "show", "job", "-d", job_id), job_id, self._node)

    def _incarnation(self, job: Job) -> str:
        """Cluster, job id, restart count and start: a requeued job is somebody else."""
        return f"{self._read_cluster()}/{job.job_id}/{job.restarts}/{'' if job.start is None else int(job.start)}"

    def _claims(self, jobs: dict[str, Job]) -> list[Claim]:
        files = self._read_device_files()
        claims: list[Claim] = []
        for incarnation, gpus in self._gpus.items():
            job = jobs[incarnation]
            holder = Holder(
                key=HolderKey("slurm", incarnation),
                job_id=job.job_id,
                cluster=self._read_cluster(),
                user=job.user,
                account=job.account,
                partition=job.partition,
                qos=job.qos,
                source=self.name,
                resource="gres/gpu",
                start_wall=job.start,
                units=gpus.total,
            )
            for index in gpus.indexes:
                kind: Literal["minor", "index"] = "index"
                device = str(index)
                if index < len(files) and (minor := re.search(r"nvidia(\d+)$", files[index])):
                    kind, device = "minor", minor[1]
                claims.append(Claim(kind, device, holder, running=job.state == "RUNNING"))
        return claims

    def _read_device_files(self) -> list[str]:
        try:
            return parse_gres_conf((self._config.parent / "gres.conf").read_text("utf-8"), self._node)
        except OSError:
            return []  # configless or unreadable: IDX is then taken in NVML's order
        except ValueError as exc:
            raise SourceError(f"{self._config.parent / 'gres.conf'}: not understood: {exc}") from exc

    def _read_cluster(self) -> str:
        if self._cluster is None:
            text = self._run("scontrol", "show", "config")
            match = re.search(r"^ClusterName\s*=\s*(\S+)", text, flags=re.MULTILINE)
            self._cluster = match[1] if match else ""
        return self._cluster

    def _run(self, *command: str) -> str:
        environment = {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise SourceError(f"{command[0]}: {exc}") from exc
        if done.returncode != 0:
            reason = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
            hint = "; name this node with --attribution.slurm.node" if "Invalid node name" in reason else ""
            raise SourceError(f"{command[0]} ended with status {done.returncode}: {reason[:200]}{hint}")
        return done.stdout.decode("utf-8", "replace")
