"""The exporter on a node of a Slurm cluster, on boards whose minor numbers are not NVML's indexes."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_exporter
from gpu_exporter.agent.attribution.slurm.controller import Run
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import CommandFailed
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.vendor import NVIDIA
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER
from tests.testbed.slurm import GPUS, Slurm

MINORS = (3, 1, 0, 2)  # minor numbers in NVML's order, which is the bus order
SCENARIO = parse_scenario({"gpus": [{"model": "H100"}] * GPUS})
FLAGS = ("--attribution.slurm", "--attribution.slurm.node=n0", "--no-attribution.kubelet")


class Host:
    """The exporter on the node `n0` of a cluster."""

    def __init__(self, slurm: Slurm, nvml: dict[str, str], table: NvmlTable) -> None:
        self.environment = {**nvml, "SLURM_CONF": slurm.environment["SLURM_CONF"], "PATH": slurm.environment["PATH"]}
        self.uuid_of_minor = plug(table, range(GPUS))
        self._config = table.path.with_name("config.yaml")

    def run(self, form: str, identity: str = "name") -> str:
        """The output of `--once`. The time limits are long, because commands are slow on a busy machine."""
        self._config.write_text(f"attribution: {{timeout: 60s}}\nidentity: {{user: {identity}}}\n", "utf-8")
        flags = (f"--config.file={self._config}", "--state.directory=", "--timeout=120s", *FLAGS)
        done = subprocess.run(
            [*GPU_EXPORTER, "--once", f"--format={form}", *flags],
            env=self.environment, capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def once(self, identity: str = "name") -> dict[str, Any]:
        return dict(json.loads(self.run("json", identity)))

    def held(self) -> dict[str, set[str]]:
        """The UUIDs of held GPUs by job id."""
        jobs: dict[str, set[str]] = {}
        for allocation in self.once()["allocations"]:
            jobs.setdefault(allocation["job_id"], set()).add(allocation["uuid"])
        return jobs


def plug(table: NvmlTable, positions: Sequence[int]) -> dict[int, str]:
    """Let NVML list the GPUs at these positions of SCENARIO only; their UUIDs by minor number."""
    ScenarioFeeder(SCENARIO._replace(gpus=tuple(SCENARIO.gpus[i] for i in positions)), table)
    for index, position in enumerate(positions):
        with table.writing(index) as out:
            out.minor = MINORS[position]
    return {MINORS[position]: SCENARIO.gpus[position].uuid for position in positions}


def idx_of(slurm: Slurm, job: str) -> int:
    rows = json.loads(slurm.run("squeue", "--json"))["jobs"]
    (detail,) = next(row["gres_detail"] for row in rows if row["job_id"] == int(job))
    return int(detail.partition("IDX:")[2].rstrip(")"))


def options_of(slurm: Slurm, **more: Any) -> SlurmOptions:
    """Options of node n0, without the processes of the host: the slurmd of another test is no restart of this one."""
    etc = slurm.root / "etc"
    return SlurmOptions(**{"node": "n0", "timeout_s": 60.0, "gres_conf": etc / "gres.conf", "procfs": etc} | more)


def source_of(
    slurm: Slurm, run: Run | None = None, clock: Clock = SYSTEM_CLOCK, pace: Pace | None = None, **options: Any
) -> SlurmSource:
    """The source of jobs, with these options."""
    return SlurmSource(options_of(slurm, **options), run or run_as(slurm), clock, vendor=NVIDIA, pace=pace)


def run_as(slurm: Slurm, user: str = "") -> Callable[[Sequence[str], float], str]:
    """A runner for the source's commands on this cluster, as the given user."""

    def run(command: Sequence[str], timeout_s: float) -> str:
        done = slurm.attempt(*command, user=user, environment={"SLURM_TIME_FORMAT": "%s"})
        if done.returncode != 0:
            reason = (done.stderr.splitlines() or [""])[0]
            raise CommandFailed(f"{command[0]} ended with status {done.returncode}: {reason}", done.stdout)
        return done.stdout

    return run


def requests(slurm: Slurm) -> Counter[str]:
    """The number of requests to the controller so far, by message type, without the request of this function."""
    _, _, table = slurm.run("sdiag").partition("statistics by message type")
    rows = re.findall(
        r"^\s+(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", table.partition("statistics by user")[0], re.MULTILINE
    )
    return Counter({name: int(count) for name, count in rows if name != "REQUEST_STATS_INFO"})


CONTRIB = Path(gpu_exporter.__file__).parent / "contrib" / "slurm"
PROLOG = {f"{name}.sh": (CONTRIB / f"{name}.sh").read_text("utf-8") for name in ("prolog", "epilog")}
