"""A report of a training in a real pod, and in a real Slurm job: from the job's own folder to the metrics of its GPU."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.diagnosis.training.files import IN_POD, VOLUME, TrainingPlaces, TrainingReader
from tests.component.slurm_host import PROLOG
from tests.testbed.node import Node, start_node, static_pod
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.slurm import USER, Layout, chroot_of, start_slurm

SCENARIO = parse_scenario({"gpus": [{"model": "H100"}] * 2})
UUIDS = [gpu.uuid for gpu in SCENARIO.gpus]
REPORT = {
    "format": "gpu-exporter-training/1",
    "run": "a1",
    "steps": 500,
    "step_seconds": 2.5,  # less than the exporter has run, so that all of it counts
    "wait_seconds": 1.525,
    "facts": {"num_workers": 2},
}
TRAINING = "training=${GPU_EXPORTER_TRAINING_FILES:-}"


@pytest.fixture
def node(processes: Processes) -> Iterator[Node]:
    with start_node(processes, UUIDS) as started:
        yield started


def observed_pod(name: str) -> dict[str, Any]:
    """A pod with the volume that docs/torch.md asks for."""
    pod = static_pod(name, 1)
    pod["spec"]["volumes"] = [{"name": VOLUME, "emptyDir": {"sizeLimit": "16Mi"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": VOLUME, "mountPath": "/run/gpu-exporter/training"}]
    return pod


@pytest.mark.kubelet
def test_a_pods_report_becomes_series_with_the_labels_of_its_gpu(
    node: Node, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    for name in ("observed", "other"):
        (node.manifests / f"{name}.json").write_text(json.dumps(observed_pod(name)))
    ScenarioFeeder(SCENARIO, nvml_table)
    config = tmp_path / "config.yaml"
    config.write_text("attribution: {interval: 200ms}\ntraining: {files: read}\n", encoding="utf-8")
    _, url = processes.start_exporter(
        f"--config.file={config}",
        "--attribution.kubelet",
        f"--attribution.kubelet.socket={node.pod_resources}",
        f"--attribution.kubelet.logs={node.pod_logs}",
        "--no-attribution.slurm",
        environment=nvml_environment,
    )

    def allocations() -> dict[str, dict[str, Any]]:
        """By pod, as soon as its UID is known: the kubelet lists a pod a moment before its logs name its UID."""
        status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
        return {entry["pod"]: entry for entry in status.get("allocations", []) if entry["pod_uid"]}

    names = {"observed-node1", "other-node1"}
    held = wait_for(lambda: found if set(found := allocations()) == names else None, "both pods with their UIDs")
    mine, others = held["observed-node1"], held["other-node1"]
    folder = node.root.joinpath("pods", mine["pod_uid"], *IN_POD)
    wait_for(folder.is_dir, "the kubelet to make the emptyDir where the exporter looks for it")
    # One process writes of its own GPU, a second one of the other pod's: that one counts nowhere.
    (folder / "run-a1.json").write_text(json.dumps(REPORT | {"gpus": [mine["uuid"]]}))
    (folder / "run-b2.json").write_text(json.dumps(REPORT | {"run": "b2", "steps": 7, "gpus": [others["uuid"]]}))

    def training() -> Any:
        return allocations()["observed-node1"]["training"]

    found = wait_for(training, "the exporter to read the report")
    assert (found["steps"], found["wait_ratio"], found["facts"]) == (500, 0.61, {"num_workers": 2})
    assert allocations()["other-node1"]["training"] is None
    lines = [line for line in (fetch(f"{url}/metrics") or "").splitlines() if line.startswith("gpu_training_")]
    assert all(f'uuid="{mine["uuid"]}"' in line and 'pod="observed-node1"' in line for line in lines)
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "phase=" not in line}
    assert values == {"gpu_training_steps_total": 500.0, "gpu_training_step_seconds": 0.005}
    waits = [line for line in lines if 'phase="wait"' in line]
    assert [float(line.rpartition(" ")[2]) for line in waits] == [1.525]


@pytest.mark.slurm
def test_a_jobs_folder_is_made_by_the_prolog_belongs_to_its_user_and_goes_with_the_job(processes: Processes) -> None:
    places = {"/run/gpu-exporter/jobs": "{root}/jobs", TRAINING: "training={root}/training"}

    def place(text: str) -> str:
        for old, new in places.items():
            assert old in text
            text = text.replace(old, new)
        return text

    layout = Layout(
        files={name: place(text) for name, text in PROLOG.items()},
        settings="PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n",
    )
    with start_slurm(processes, chroot_of("22.05"), layout) as slurm:
        job = slurm.submit("--gres=gpu:1")
        folder, owner = slurm.root / "training" / job, pwd.getpwnam(USER).pw_uid
        # Slurm calls a job RUNNING while its prolog still runs.
        wait_for(lambda: folder.exists() and folder.stat().st_uid == owner, "the prolog to make the folder of the job")
        reader = TrainingReader(TrainingPlaces(slurm.root / "pods", slurm.root / "training"), ManualClock())
        path = folder / "run-a1.json"
        path.write_text(json.dumps(REPORT))
        assert list(reader.read([("job", job)])) == [], "a file of root is not the job's"
        os.chown(path, owner, -1)
        reader = TrainingReader(TrainingPlaces(slurm.root / "pods", slurm.root / "training"), ManualClock())
        ((who, files),) = reader.read([("job", job)])
        assert (who, files.reports[0].steps, files.problem) == (("job", job), 500, "")
        slurm.run("scancel", job)
        wait_for(lambda: not folder.exists(), "the epilog to remove the folder of the job")
