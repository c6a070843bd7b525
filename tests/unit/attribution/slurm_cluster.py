"""What the tests of this subject share: the Slurm source: what it grants, and what it only knows to be held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.parse import COLUMNS, SINFO_FORMAT, SQUEUE_FORMAT
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import CommandFailed, SlowSource, SourceError
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA


class Cluster:
    """Answers the commands of one cluster. Its node `n0` has four typed GPUs, unless a test sets otherwise."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.jobs: dict[str, list[str]] = {}  # by job id: gres_detail
        self.states: dict[str, str] = {}
        self.columns: dict[str, str] = {}  # of squeue, for every job
        self.users: dict[str, tuple[str, str]] = {}  # by job id: name and uid
        self.nodes = "n0"
        self.size = "cpu=1"
        self.used: str | None = ""
        self.configured = "gpu:h100:4"
        self.slurmd_start: object = 4_000_000_000
        self.state, self.reason = "IDLE", "none"
        self.job_start = 4_000_000_500
        self.private = "none"
        self.flags = "(null)"
        self.hidden: set[str] = set()
        self.json = "all"  # which commands support JSON: all, squeue, none
        self.ambiguous = False  # whether a job's name makes the plain text ambiguous
        self.squeue_fault = ""  # error of `squeue --json`
        self.asked: list[str] = []
        self.limits: set[float] = set()  # time limits in seconds that commands got
        self.after_node: list[dict[str, object]] = []  # changes that take effect after the next question for the node
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.steps: dict[str, set[int]] | None = None  # processes by job id; without a value, one process of every job
        self.blind = ""  # error of listpids
        self.left: dict[str, set[int]] | None = None  # what listpids lists before it fails
        self.source = self.new_source(Pace(0.0))

    def new_source(self, pace: Pace) -> SlurmSource:
        return SlurmSource(
            SlurmOptions(node="n0", procfs=self.directory / "proc"),
            run=self.run,
            clock=self.clock,
            pace=pace,
            vendor=NVIDIA,
        )

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
        self.limits.add(timeout_s)
        if text == "scontrol listpids * n0":
            return self._list_steps()
        if self.squeue_fault and text.startswith("squeue --json"):
            raise SourceError(self.squeue_fault)
        if "--json" in command:
            if self.json == "none" or (self.json == "squeue" and command[0] == "scontrol"):
                raise SourceError(f"{command[0]} ended with status 1: {command[0]}: unrecognized option '--json'")
            wanted = [command[3]] if command[0] == "scontrol" else list(self.jobs)
            rows = [
                {"job_id": int(j), "nodes": self.nodes, "gres_detail": self.jobs[j]} for j in wanted if j in self.jobs
            ]
            return json.dumps({"jobs": rows})
        if command[0] == "squeue":
            is_ending = "COMPLETING" in command[command.index("-t") + 1]
            listed = [job for job in self.jobs if (self.states.get(job) == "COMPLETING") == is_ending]
            shown = [self._row(job) for job in listed if job not in self.hidden]
            if "-j" in command:
                asked = command[command.index("-j") + 1]
                if asked not in self.jobs or asked in self.hidden:
                    raise SourceError("squeue ended with status 1: slurm_load_jobs error: Invalid job id specified")
                shown = [self._row(asked)] if asked in listed else []
            return "".join(shown)
        if command[0] == "sinfo":
            used = "" if self.used is None else self.used or "(null)"
            self._change()
            return f"{used:8192}|{self.state.lower():256}|{self.reason:256}|\n" * 2  # a node in two partitions
        if text.startswith("scontrol show config"):
            return (
                f"ClusterName = lab\nPrivateData = {self.private}\nSLURM_CONF = {self.directory}/slurm.conf\n"
                f"SlurmdSpoolDir = {self.directory}/spool/%n\nPrologFlags = {self.flags}\n"
            )
        if text.startswith("scontrol show node"):
            used = "" if self.used is None else f"   GresUsed={self.used}\n"
            self._change()
            state = f"   State={self.state} ThreadsPerCore=1\n"
            start = f"   BootTime=1 SlurmdStartTime={self.slurmd_start}\n"
            return f"NodeName=n0\n   Gres={self.configured}\n{used}{state}{start}   Reason={self.reason} [root@1]\n"
        assert text.startswith("scontrol -o show job -d")
        gres = self.jobs[command[-1]][0]
        name = "MinCPUsNode=1" if self.ambiguous else "x"
        return f"JobId={command[-1]} JobName={name} JOB_GRES=gpu   Nodes=n0 CPU_IDs=0 Mem=0 GRES={gres} MinCPUsNode=1 Comment=y"

    def _change(self) -> None:
        for name, value in (self.after_node.pop(0) if self.after_node else {}).items():
            setattr(self, name, value)

    def _list_steps(self) -> str:
        steps = {job: {1000 + int(job)} for job in self.jobs} if self.steps is None else self.steps
        if self.blind or not steps:
            reason = self.blind or "No job steps exist on this node."
            out = self._print_steps(self.left) if self.left is not None else ""
            raise CommandFailed(f"scontrol ended with status 1: {reason}", out)
        return self._print_steps(steps)

    @staticmethod
    def _print_steps(steps: dict[str, set[int]]) -> str:
        lines = [f"{pid}\t {job} batch - -" for job, pids in steps.items() for pid in pids]
        return "\n".join(["PID JOBID STEPID LOCALID GLOBALID", *lines]) + "\n"

    def _row(self, job: str) -> str:
        name, uid = self.users.get(job, ("ada", "1000"))
        values = dict.fromkeys(COLUMNS, "N/A") | {
            "JobID": job,
            "UserName": name,
            "UserID": uid,
            "State": self.states.get(job, "RUNNING"),
            "StartTime": str(self.job_start),
            "RestartCnt": "0",
            "tres-alloc": self.size,
            **self.columns,
        }
        return "".join(f"{values[column]}|" for column in COLUMNS) + "\n"

    def grants(self) -> list[tuple[str, str, str]]:
        """(holder, kind, device) of each grant."""
        return [(grant.holder.label, grant.kind, grant.device) for grant in self.source.poll().grants]


SINFO = f"sinfo -h -N -n n0 -O {SINFO_FORMAT}"
COLUMNS_OF = f"-t RUNNING,CONFIGURING,SUSPENDED,STOPPED -O {SQUEUE_FORMAT}"
HELD: Mapping[str, object] = {"jobs": {"42": ["gpu:h100:1(IDX:0)"]}, "used": "gpu:h100:1(IDX:0)"}
REVERSED = "Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n"


def hold(cluster: Cluster, **more: object) -> str:
    """The basis of the only job's grant."""
    for name, value in {**HELD, **more}.items():
        setattr(cluster, name, value)
    (grant,) = cluster.source.poll().grants
    return grant.kind


def fail(cluster: Cluster, word: str, fault: str | SourceError, times: int = 10**9) -> list[Sequence[str]]:
    """Let commands that contain this word fail. Returns a list to which each failed command is added."""
    real, failed = cluster.run, list[Sequence[str]]()

    def run(command: Sequence[str], timeout_s: float) -> str:
        if word in command and len(failed) < times:
            failed.append(command)
            if isinstance(fault, SlowSource):
                cluster.clock.advance(timeout_s + 0.01)
            raise fault if isinstance(fault, SourceError) else SourceError(fault)
        return real(command, timeout_s)

    cluster.source._controller._run_command = run
    return failed


SLOW = SlowSource("scontrol did not answer within 5 s")
