"""What the tests of this subject share: how rarely the Slurm source asks the controller, and what it knows in between."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.attribution.slurm_cluster import Cluster

from gpu_exporter.agent.attribution.slurm.on_node.ends import Recall
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.common.vendor import NVIDIA

ONE = "gpu:h100:1(IDX:0)"
KTHREADD = "2 (kthreadd) S 0 0 0 0 -1 2129984 " + "0 " * 40


class Node(Cluster):
    """A node that asks every minute, and whose /proc is the host's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.source = self.new_source(Pace(60.0, lambda: 0.0))
        self.put(2, KTHREADD)

    def put(self, pid: int, stat: str) -> None:
        folder = self.directory / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat, "utf-8")

    def run_job(self, pid: int, state: str) -> None:
        self.put(pid, f"{pid} (python) {state} 1 1 1 0 -1 64 " + "0 " * 30)

    def begin(self, **jobs: str) -> None:
        """Start jobs j1, j2 ... with these GPUs, each with one process."""
        self.jobs = {name[1:]: [gres] for name, gres in jobs.items()}
        self.used = ",".join(jobs.values())

    def questions(self, seconds: float) -> list[str]:
        """The questions to the controller in this time, with polls every 5 s."""
        self.asked.clear()
        for _ in range(int(seconds / 5)):
            self.clock.advance(5.0)
            self.source.poll()
        return [text for text in self.asked if "listpids" not in text]


class Filing(Node):
    """A node whose prolog writes files, in a cluster with PrologFlags=Contain."""

    def __init__(self, directory: Path, flags: str = "Alloc,Contain") -> None:
        super().__init__(directory)
        self.flags = flags
        self.files = directory / "jobs"
        self.files.mkdir(mode=0o755)
        self.recall: Recall | None = None
        self.restart()

    def restart(self) -> None:
        """An exporter that has just started."""
        self.source = SlurmSource(
            SlurmOptions(node="n0", procfs=self.directory / "proc", job_files=self.files, recall=self.recall),
            run=self.run,
            clock=self.clock,
            pace=Pace(60.0, lambda: 0.0),
            vendor=NVIDIA,
        )

    def file(self, job: str, text: str, written_s_ago: float = 0.0) -> None:
        path = self.files / job
        path.write_text(text, "utf-8")
        path.chmod(0o644)
        when = self.clock.wall() - written_s_ago
        os.utime(path, (when, when))

    def settle(self) -> None:
        """Get the first answer, which also contains the PrologFlags."""
        self.source.poll()
        self.questions(60)


MIXED = """Name=gpu Type=h100 File=/dev/nvidia[0-3]
Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30,/dev/nvidia-caps/nvidia-cap31
Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap39,/dev/nvidia-caps/nvidia-cap40
"""


def start_slurmd(node: Node, pid: int, start_wall: float) -> None:
    """A slurmd that started at this time, on a host that was booted at 1,700,000,000."""
    (node.directory / "proc" / "stat").write_text("cpu 1 2\nbtime 1700000000\n", "utf-8")
    ticks = round((start_wall - 1_700_000_000) * os.sysconf("SC_CLK_TCK"))
    node.put(pid, f"{pid} (slurmd) S 1 1 1 0 -1 64 " + "0 " * 12 + f"{ticks} " + "0 " * 17)
