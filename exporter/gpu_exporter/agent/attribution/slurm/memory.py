"""Saves Slurm's last report about this node, to use it after a restart of the exporter until slurmctld answers.

A saved job counts only with proof that it is the same run: one of its saved processes still runs, or its prolog's file
has the same date. The job number proves nothing, because a requeued job keeps its number and gets other GPUs. Without
proof, a GPU in use has an unknown holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.attribution.remembered import Remembered
from gpu_exporter.agent.attribution.slurm.controller import KnownJob, SlurmSnapshot
from gpu_exporter.agent.attribution.slurm.on_node.presence import Present
from gpu_exporter.agent.attribution.slurm.picture import Picture, parse_picture, render_picture
from gpu_exporter.common.files import PRIVATE
from gpu_exporter.common.outside import need_real, need_whole
from gpu_exporter.common.procfs import Procfs

FILE = "slurm-jobs.json"
SAVE_EACH_S = 60.0  # how often to save, because processes of a job come and go
PIDS_MAX = 16  # oldest processes of one job; its batch script and the longest steps are among them
BOOT_MAX_S = 60.0  # changes of the clock move the boot time by less; another boot moves it by more


class Run(NamedTuple):
    """Identifies one run of a job: its processes with start times (seconds after boot), and the date of the prolog's
    file.
    """

    processes: Mapping[int, float]
    filed_wall: float | None


class SlurmMemory:
    """Keeps the last snapshot in a file of the state directory. Not thread-safe."""

    def __init__(self, directory: Path | None, node: str, procfs: Procfs, *, writes: bool = True) -> None:
        """`directory`: None to remember nothing. `writes`: whether to write the file."""
        self._file = Remembered(directory, FILE, node, "the holders of GPUs", writes=writes)
        self._procfs = procfs
        self._saved_at = 0.0
        self._saved_look = 0.0

    def keep(self, look: SlurmSnapshot, present: Present, now: float, wall: float) -> None:
        """Saves this snapshot. `now` (monotonic seconds) and `wall` (Unix seconds) are the same moment."""
        is_new = look.asked != self._saved_look
        if not self._file.is_kept or not (is_new or now - self._saved_at >= SAVE_EACH_S):
            return
        self._saved_at, self._saved_look = now, look.asked
        jobs = {job: (known.job, known.gpus) for job, known in look.jobs.items() if known.gpus is not None}
        picture = Picture(wall - (now - look.asked), look.each_s, look.config, look.node, jobs)
        runs = {job: self._see(job, present) for job in jobs}
        seen = {job: {"processes": sorted(run.processes.items()), "filed": run.filed_wall} for job, run in runs.items()}
        body = {"boot": self._procfs.boot_wall(), "picture": render_picture(picture), "runs": seen}
        self._file.write(body, PRIVATE)  # it names users

    def recall(self, present: Present, now: float, wall: float) -> SlurmSnapshot | None:
        """Returns the saved snapshot, with only the jobs that are provably the same runs. None without a valid
        snapshot.
        """
        data = self._file.read()
        if data is None:
            return None
        try:
            boot, seen = self._procfs.boot_wall(), data["boot"]
            is_this_boot = boot is not None and seen is not None and abs(boot - need_real(seen)) < BOOT_MAX_S
            picture = parse_picture(data["picture"])
            runs = {job: _run(row) for job, row in data["runs"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            self._file.refuse(exc)
            return None
        asked = now - max(0.0, wall - picture.asked_wall)
        same = {job for job, run in runs.items() if is_this_boot and _is_same(run, self._see(job, present))}
        jobs = {
            job.job_id: KnownJob(job, asked, gpus, asked) for job, gpus in picture.jobs.values() if job.job_id in same
        }
        return SlurmSnapshot(asked, picture.config, picture.node, jobs, each_s=picture.each_s)

    def _see(self, job: str, present: Present) -> Run:
        stats = {}
        if self._procfs.is_host():  # otherwise these pids mean other processes here
            stats = {pid: self._procfs.stat(pid) for pid in sorted(present.steps.pids.get(job, ()))}
        found = sorted((stat.start_s, pid) for pid, stat in stats.items() if stat is not None)
        file = present.files.get(job)
        return Run({pid: start_s for start_s, pid in found[:PIDS_MAX]}, file.written_wall if file is not None else None)


def _is_same(before: Run, now: Run) -> bool:
    """Returns whether a process or the file of that run still exists."""
    if before.processes.items() & now.processes.items():
        return True
    return before.filed_wall is not None and before.filed_wall == now.filed_wall


def _run(row: Any) -> Run:
    filed = row["filed"]
    return Run(
        {need_whole(pid): need_real(start_s) for pid, start_s in row["processes"]},
        None if filed is None else need_real(filed),
    )
