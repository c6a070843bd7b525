"""A real Slurm job that holds GPUs without a process, as `--once` and the daemon tell it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.attribution.cgroup import parse_cgroup
from gpu_exporter.devices.scenario import parse_scenario
from tests.testbed.cgroups import ROOT, Places, ProcFiles
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, wait_for
from tests.testbed.slurm import GPUS, USER, Slurm, start_slurm

pytestmark = pytest.mark.slurm


def test_real_jobs_by_id_user_account_partition_and_the_right_uuids(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable
) -> None:
    scenario = parse_scenario({"gpus": [{"model": "H100"}] * GPUS})
    ScenarioFeeder(scenario, nvml_table)
    uuid_of_minor = {}
    for index, gpu in enumerate(scenario.gpus):  # NVML's order is not the order of the device files
        with nvml_table.writing(index) as out:
            out.minor = GPUS - 1 - index
        uuid_of_minor[GPUS - 1 - index] = gpu.uuid
    with start_slurm(processes) as slurm:
        environment = {**nvml_environment, "SLURM_CONF": slurm.environment["SLURM_CONF"]}
        flags = ("--state.directory=", "--attribution.slurm", "--attribution.slurm.node=n0", "--no-attribution.kubelet")

        def once() -> dict:
            command = [*GPU_EXPORTER, "--once", "--format=json", *flags]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr + done.stdout
            return json.loads(done.stdout)

        first = slurm.submit(
            "--gres=gpu:1", "--account=chem", "-J", "x\n   UserId=root(0) GroupId=root(0) Account=root"
        )
        held = slurm.submit("--gres=gpu:2", "--account=phys", "-p", "gpu")
        by_job: dict[str, list[dict]] = {}
        for allocation in once()["allocations"]:
            by_job.setdefault(allocation["job_id"], []).append(allocation)
        assert set(by_job) == {first, held}
        assert {a["uuid"] for a in by_job[first]} == {uuid_of_minor[0]}
        assert {a["uuid"] for a in by_job[held]} == {uuid_of_minor[1], uuid_of_minor[2]}
        for job, account in ((first, "chem"), (held, "phys")):
            for allocation in by_job[job]:
                assert allocation["user"] == USER
                assert allocation["account"] == account
                assert allocation["partition"] == "gpu"
                assert allocation["cluster"] == "lab"
                assert allocation["scheduler"] == "slurm"
                assert allocation["start_timestamp_seconds"] > 1.7e9

        config = nvml_table.path.with_name("fast.yaml")
        config.write_text("attribution: {interval: 500ms}\n", encoding="utf-8")
        _, url = processes.start_exporter(*flags, f"--config.file={config}", environment=environment)

        def metrics() -> str:
            return fetch(f"{url}/metrics") or ""

        wait_for(lambda: f'gpu_allocated{{gpu="0",uuid="{uuid_of_minor[3]}"}} 0' in metrics(), "the free GPU")
        assert f'job_id="{held}"' in metrics()
        assert metrics().count("gpu_allocation_holder_units{") == 3
        slurm.run("scontrol", "suspend", held)
        wait_for(lambda: "SUSPENDED" in slurm.run("squeue", "-h", "-j", held, "-o", "%T"), "the job to be suspended")
        assert f'job_id="{held}"' in metrics()
        slurm.run("scontrol", "resume", held)
        slurm.run("scancel", held)
        wait_for(lambda: f'job_id="{held}"' not in metrics(), "the job's series to go")
        assert f'job_id="{first}"' in metrics()


FREEZER = ROOT / "freezer"
SLURM_GROUP = FREEZER / "slurm_n0"


@contextlib.contextmanager
def start_tracking(processes: Processes, path: Path) -> Iterator[tuple[Slurm, Path]]:
    """Slurm and a /proc in which its jobs' processes have their cgroups: the real one where cgroup v1 is there.

    On a machine with v2 alone Slurm 22.05 cannot make them without systemd: there the /proc is made of files.
    """
    if not FREEZER.is_dir():
        with start_slurm(processes) as slurm:
            yield slurm, path / "proc"
        return
    try:
        with start_slurm(processes, more={"ProctrackType": "proctrack/cgroup"}) as slurm:
            yield slurm, Path("/proc")
    finally:
        deadline = time.monotonic() + 10
        while SLURM_GROUP.exists():  # Slurm leaves the root of its tree
            for folder in sorted((SLURM_GROUP, *SLURM_GROUP.rglob("*/")), key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            assert time.monotonic() < deadline, f"{SLURM_GROUP} could not be removed"


def pids_of(slurm: Slurm, job: str) -> list[int]:
    """Of the job's processes, as slurmstepd lists them."""
    listed = (line.split() for line in slurm.run("scontrol", "listpids", job).splitlines()[1:])
    return [int(cells[0]) for cells in listed if int(cells[0]) > 0]


def test_the_processes_of_real_jobs_contradict_a_mapping_to_the_wrong_gpu(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """The driver lists two jobs' processes the other way round than Slurm says, as after a renumbering."""
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
                mine: ("unknown", f"processes of job {other} run here, slurm says job {mine}")
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

            wait_for(confirmed, "both jobs to be confirmed by their own processes", 20)
    finally:
        feeder.stop()
