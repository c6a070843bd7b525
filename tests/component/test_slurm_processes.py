"""Processes of real Slurm jobs with a mapping that exchanges the GPUs of two jobs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.cgroup import parse_cgroup
from tests.testbed.cgroups import ROOT, Places, ProcFiles
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.slurm import GPUS, Layout, Slurm, start_slurm

pytestmark = pytest.mark.slurm
FREEZER = ROOT / "freezer"
SLURM_GROUP = FREEZER / "slurm_n0"


@contextlib.contextmanager
def start_tracking(processes: Processes, path: Path) -> Iterator[tuple[Slurm, Path]]:
    """Slurm, and a /proc in which the processes of its jobs have their cgroups. With cgroup v1 it is the real /proc.

    Slurm 22.05 cannot make cgroups on a machine with only v2 and without systemd. The /proc there is made of files.
    """
    if not FREEZER.is_dir():
        with start_slurm(processes) as slurm:
            yield slurm, path / "proc"
        return
    try:
        with start_slurm(processes, layout=Layout(tracking="proctrack/cgroup")) as slurm:
            yield slurm, Path("/proc")
    finally:
        deadline = time.monotonic() + 10
        while SLURM_GROUP.exists():  # Slurm does not remove the root of its tree
            for folder in sorted((SLURM_GROUP, *SLURM_GROUP.rglob("*/")), key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            assert time.monotonic() < deadline, f"{SLURM_GROUP} could not be removed"


def pids_of(slurm: Slurm, job: str) -> list[int]:
    """The pids of the job's processes, as slurmstepd lists them. A job has none in the moment before its first step."""
    done = slurm.attempt("scontrol", "listpids", job)
    assert done.returncode == 0 or "There are no steps" in done.stderr, done.stderr
    listed = (line.split() for line in done.stdout.splitlines()[1:])
    return [int(cells[0]) for cells in listed if int(cells[0]) > 0]


def test_processes_of_real_jobs_contradict_a_mapping_to_the_wrong_gpu(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """The driver lists the processes of two jobs on each other's GPU, as after a renumbering."""
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * GPUS}), nvml_table)
    feeder.start()

    def list_on(*gpus: list[int]) -> None:
        feeder.pids.update({index: tuple((pid, "") for pid in pids) for index, pids in enumerate(gpus)})

    try:
        with start_tracking(processes, tmp_path) as (slurm, procfs):
            jobs = [slurm.submit("--gres=gpu:1"), slurm.submit("--gres=gpu:1")]
            pids = [wait_for(lambda job=job: pids_of(slurm, job) or None, "the job's processes") for job in jobs]
            if procfs != Path("/proc"):
                places: Places = ProcFiles(tmp_path)
                for job, listed in zip(jobs, pids, strict=True):
                    for pid in listed:
                        places.put(pid, f"system.slice/n0_slurmstepd.scope/job_{job}/step_batch/user/task_0")
            for job, listed in zip(jobs, pids, strict=True):
                assert {parse_cgroup((procfs / str(pid) / "cgroup").read_text()).job for pid in listed} == {job}
            config = tmp_path / "fast.yaml"
            config.write_text("attribution: {interval: 500ms}\n", encoding="utf-8")
            list_on(pids[1], pids[0])
            feeder.feed()
            _, url = processes.start_exporter(
                "--attribution.slurm", "--attribution.slurm.node=n0", "--no-attribution.kubelet",
                f"--path.procfs={procfs}", f"--config.file={config}",
                environment={**nvml_environment, "SLURM_CONF": slurm.environment["SLURM_CONF"]},
            )  # fmt: skip

            def states() -> dict[str, tuple[str, str]]:
                status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
                return {a["job_id"]: (a["state"], a["evidence"]) for a in status.get("allocations", [])}

            swapped = {
                mine: ("unknown", f"processes of job {other} run here, but slurm reports job {mine}")
                for mine, other in (jobs, reversed(jobs))
            }
            wait_for(lambda: states() == swapped or None, "both jobs to be contradicted")
            body = fetch(f"{url}/metrics") or ""
            assert "gpu_allocation_idle_run_seconds{" not in body
            conflicts = next(
                line for line in body.splitlines() if line.startswith("gpu_exporter_attribution_conflicts")
            )
            assert float(conflicts.rpartition(" ")[2]) >= 2
            list_on(pids[0], pids[1])

            def confirmed() -> bool:
                return (fetch(f"{url}/metrics") or "").count("gpu_allocation_idle_run_seconds{") == 2

            wait_for(confirmed, "both jobs to be confirmed by their own processes")
    finally:
        feeder.stop()
