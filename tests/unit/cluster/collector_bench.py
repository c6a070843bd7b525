"""What the tests of this subject share: the collector's answers: jobs and nodes of a cluster, and what a node makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.testbed.memory_slurm import row_of_24_11

from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus, NodeRecord, SlurmConfig
from gpu_exporter.agent.attribution.slurm.picture import Picture
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.agent.slurm_collector.collector import CollectorRun, SlurmCollector
from gpu_exporter.agent.slurm_collector.command_line import CommandLine
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.slurm.gres import Gres
from gpu_exporter.common.vendor import NVIDIA

NODE = "NodeName={name} Arch=x86_64\n   Gres={gres}\n   GresUsed={used}\n   BootTime=1 SlurmdStartTime=4000000000\n\n"


class Cluster:
    """Two nodes with four GPUs each, and a third node without GPUs."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.directory = directory / "shared"
        self.directory.mkdir(mode=0o755)
        self.jobs: list[dict[str, Any]] = []
        self.used = {"n0": "gpu:h100:0(IDX:N/A)", "n1": "gpu:h100:0(IDX:N/A)"}
        self.private = "none"
        self.fault = ""
        self.asked: list[str] = []
        self.here: dict[str, int] = {}  # the jobs with a step on the node, and a process of each
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.round = CollectorRun(SlurmCollector(CommandLine(self.run), self.clock, 90.0), self.directory, self.clock)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
        if "listpids" in text:
            lines = [f"{pid} {job} batch - -" for job, pid in self.here.items()]
            return "\n".join(["PID JOBID STEPID LOCALID GLOBALID", *lines])
        if self.fault:
            raise SourceError(self.fault)
        if text == "scontrol show config":
            return f"ClusterName = lab\nPrivateData = {self.private}\nSLURM_CONF = /etc/slurm/slurm.conf\nPrologFlags = Contain\n"
        if text == "scontrol show node -d":
            nodes = [NODE.format(name=name, gres="gpu:h100:4", used=used) for name, used in self.used.items()]
            return "".join([*nodes, NODE.format(name="login", gres="(null)", used="gpu:0")])
        assert text.startswith("squeue --json -a --local -t RUNNING,"), text
        return json.dumps({"jobs": self.jobs, "errors": [], "meta": {"job_id": 1}})

    def source(
        self,
        node: str = "n0",
        each_s: float = 15.0,
        job_files: Path | None = None,
        procfs: Path = Path("/proc"),
    ) -> SlurmSource:
        return SlurmSource(
            SlurmOptions(
                node=node, gres_conf=self.gres_conf, job_files=job_files, procfs=procfs, collected=self.directory
            ),
            run=self.run,
            clock=self.clock,
            pace=Pace(each_s, lambda: 0.0),
            vendor=NVIDIA,
        )

    def begin(self, job: int, **fields: Any) -> None:
        """Start a job that runs for long; its GPUs are in use."""
        row = {"user_name": "ada", "user_id": 1000, "nodes": "n0", "gres_detail": ["gpu:h100:1(IDX:0)"], **fields}
        self.jobs.append(row_of_24_11(job_id=job, **{"start_time": 1_000, **row}))


def held(answer: Answer) -> list[tuple[str, str]]:
    return sorted((grant.holder.job_id, grant.device) for grant in answer.grants)


numbers = st.integers(0, 64)
words = st.text(max_size=12)
shared = st.lists(st.tuples(numbers, words), max_size=3).map(tuple)
indexes = st.lists(numbers, max_size=4).map(tuple)
times = st.none() | st.floats(0, 4e9)
jobs = st.builds(
    Job,
    **dict.fromkeys(set(Job._fields) - {"start", "size"}, words),
    start=times,
    size=st.lists(words, max_size=3).map(tuple),
)
gpus = st.builds(JobGpus, indexes, numbers, numbers, shared, words)
pictures = st.builds(
    Picture,
    st.floats(0, 4e9),
    st.floats(1, 600),
    st.builds(SlurmConfig, words, words, words, st.frozensets(words, max_size=3), st.frozensets(words, max_size=3)),
    st.builds(
        NodeRecord,
        st.lists(st.tuples(words, numbers), max_size=3).map(tuple),
        st.builds(Gres, indexes, numbers, shared, words),
        times,
    ),
    st.lists(st.tuples(jobs, gpus), max_size=3).map(lambda pairs: {job.job_id: (job, own) for job, own in pairs}),
)
