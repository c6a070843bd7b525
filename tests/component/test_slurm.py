"""A real Slurm job that holds GPUs without a process, as `--once` and the daemon tell it."""

from __future__ import annotations

import json
import subprocess

import pytest

from gpu_exporter.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, wait_for
from tests.testbed.slurm import GPUS, USER, start_slurm

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
                assert allocation["slurm_cluster"] == "lab"
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
