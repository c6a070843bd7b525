"""A pod that runs a real slurmd, to which the kubelet gives every GPU and Slurm gives its jobs some."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.cgroups import ProcFiles
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import Processes, run_exporter
from tests.testbed.slurm import GPUS, Slurm, start_slurm

pytestmark = pytest.mark.slurm
UID = "2c9f8a79-5391-454b-88cb-86190881cb90"
POD = f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'c' * 64}.scope"
NODE = ("--attribution.slurm", "--attribution.slurm.node=n0")


class SlurmNode:
    """The report of an exporter on the Kubernetes node about the GPUs: name, state and evidence of every holder."""

    def __init__(self, slurm: Slurm, kubelet: Kubelet, environment: dict[str, str], path: Path) -> None:
        self.places = ProcFiles(path)
        self._environment = {**environment, "SLURM_CONF": slurm.environment["SLURM_CONF"]}
        self._config = path / "config.yaml"
        self._flags = (
            f"--config.file={self._config}", "--state.directory=", "--timeout=120s", "--attribution.kubelet",
            f"--attribution.kubelet.socket={kubelet.socket}", f"--attribution.kubelet.logs={path / 'logs'}",
            f"--path.procfs={self.places.procfs}",
        )  # fmt: skip

    def run(self, form: str, *flags: str, pods: str = "") -> str:
        self._config.write_text(f"attribution: {{timeout: 60s, slurm_pods: '{pods}'}}\n", "utf-8")
        done = run_exporter("--once", f"--format={form}", *self._flags, *flags, environment=self._environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self, *flags: str, pods: str = "") -> dict[str, Any]:
        return dict(json.loads(self.run("json", *flags, pods=pods)))

    def holders(self, *flags: str, pods: str = "") -> dict[str, tuple[str, str]]:
        answer = self.status(*flags, pods=pods)
        return {a["uuid"]: (a["job_id"] or a["pod"], a["evidence"]) for a in answer["allocations"]}

    def allocated(self, *flags: str, pods: str = "") -> list[str]:
        """ "1" for every held GPU, "0" for every free GPU."""
        return re.findall(r"^gpu_allocated{.*} (\d)", self.run("prometheus", *flags, pods=pods), re.MULTILINE)


def test_jobs_in_a_pod_that_runs_slurmd_hold_the_pods_gpus(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    scenario = parse_scenario({"gpus": [{"model": "H100"}] * GPUS})
    uuids = [gpu.uuid for gpu in scenario.gpus]
    feeder = ScenarioFeeder(scenario, nvml_table)
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.pods[("slurm", "gpu-worker-0")] = {"slurmd": {"nvidia.com/gpu": uuids}}
    begin_container(tmp_path / "logs", f"slurm_gpu-worker-0_{UID}", container="slurmd")
    kubelet.start()
    feeder.start()
    try:
        with start_slurm(processes) as slurm:
            node = SlurmNode(slurm, kubelet, nvml_environment, tmp_path)
            first, second = slurm.submit("--gres=gpu:1"), slurm.submit("--gres=gpu:2")
            jobs = dict(zip(uuids, (first, second, second), strict=False))

            both = node.holders(*NODE)
            says = "kubelet reports slurm/gpu-worker-0/slurmd, slurm reports job"
            assert both == {uuid: ("gpu-worker-0", f"{says} {jobs[uuid]}") for uuid in jobs} | {
                uuids[3]: ("gpu-worker-0", both[uuids[3]][1])
            }
            named = node.status(*NODE, pods="slurm/*-worker-*")
            assert {a["uuid"]: a["job_id"] for a in named["allocations"]} == jobs
            assert node.allocated(*NODE, pods="slurm/*-worker-*") == ["1", "1", "1", "0"]
            assert [source["error"] for source in named["attribution"]] == ["", ""]

            listed = slurm.run("scontrol", "listpids", first).splitlines()[1:]
            (pid,) = {int(line.split()[0]) for line in listed if line.split()[3] == "0"}
            node.places.put(pid, f"{POD}/system.slice/n0_slurmstepd.scope/job_{first}/step_batch/user/task_0")
            feeder.pids[0] = ((pid, ""),)
            feeder.feed()
            proven = node.status(*NODE, "--attribution.process")
            assert {a["uuid"]: a["job_id"] for a in proven["allocations"]} == jobs
            assert node.allocated(*NODE, "--attribution.process") == ["1", "1", "1", "0"]

            unasked = node.holders("--no-attribution.slurm", pods="slurm/*-worker-*")
            why = "the pod runs slurmd, and it is unknown which job has this GPU"
            assert unasked == dict.fromkeys(uuids, ("gpu-worker-0", why))
    finally:
        kubelet.stop()
        feeder.stop()
