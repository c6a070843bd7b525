"""Real processes in real cgroups under the running exporter: a wrong mapping makes a holder unknown, never idle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testbed.cgroups import Places
from tests.testbed.process_node import QUIET, Node, job, read, states
from tests.testbed.processes import fetch, wait_for

UID = "2c9f8a79-5391-454b-88cb-86190881cb96"
POD = f"kubepods/burstable/pod{UID}/{'f' * 64}"
DOCKER = f"system.slice/docker-{'d' * 64}.scope"
RUN = "gpu_allocation_idle_run_seconds"
PID = 4_194_303  # the largest pid that Linux allows, so that no other number equals it
CONFLICTS = "gpu_exporter_attribution_conflicts_total"


def test_a_wrongly_mapped_holder_is_unknown_until_its_own_process_is_seen(node: Node) -> None:
    node.list_on(0, node.start_process(job(43)))
    node.hold({"uuid": node.uuids[0], "job": "42", "gpus": 1})
    url = node.start()
    evidence = "processes of job 43 run here, but static reports job 42"
    wait_for(lambda: states(url).get("42") == ("unknown", evidence), "the contradiction")
    before = read(url, "gpu_allocation_held_seconds_total", job_id="42") or 0.0
    wait_for(lambda: (read(url, "gpu_allocation_held_seconds_total", job_id="42") or 0) > before + 2, "time to pass")
    assert read(url, RUN, job_id="42") is None
    assert not read(url, "gpu_allocation_idle_seconds_total", job_id="42")
    assert not read(url, "gpu_allocation_observed_seconds_total", job_id="42")
    assert (read(url, CONFLICTS, source="static") or 0) > 0
    assert node.log().count(evidence) == 1
    assert f"gpu 0: {evidence}. The time of job 42 on gpu 0 counts as unknown" in node.log()

    node.list_on(0, node.start_process(job(42)))
    wait_for(lambda: (read(url, RUN, job_id="42") or 0) > 0.3, "an idle run of the holder that is seen at work")


@pytest.mark.parametrize("places", ["files"], indirect=True)
def test_the_exporter_publishes_no_pid(node: Node, places: Places) -> None:
    places.put(PID, job(43))
    node.list_on(0, PID)
    node.hold({"uuid": node.uuids[0], "job": "42", "gpus": 1})
    url = node.start("--log.level=debug")
    wait_for(lambda: states(url).get("42", ("", ""))[0] == "unknown", "the contradiction")
    for path in ("/metrics", "/api/v1/status", "/api/v1/table", "/api/v1/holders", "/"):
        assert str(PID) not in (fetch(url + path) or str(PID))
    assert str(PID) not in node.log()


def test_without_the_process_check_the_same_node_looks_idle(node: Node) -> None:
    """Without the check, the node of the test above is idle, so the check alone prevents it."""
    node.list_on(0, node.start_process(job(43)))
    node.hold({"uuid": node.uuids[0], "job": "42", "gpus": 1})
    url = node.start("--no-attribution.process")
    wait_for(lambda: (read(url, RUN, job_id="42") or 0) > 1, "the idle run")
    assert read(url, CONFLICTS, source="static") == 0


def test_a_holder_that_works_on_another_gpu_is_not_idle_on_its_own_gpu(node: Node) -> None:
    """The driver has renumbered its GPUs: Slurm reports the job on gpu 0, and the job works on gpu 1."""
    node.list_on(1, node.start_process(job(42)))
    node.hold({"uuid": node.uuids[0], "job": "42", "gpus": 1})
    url = node.start()
    evidence = "processes of job 42 run on gpu 1, which static did not allocate to it"
    wait_for(lambda: states(url).get("42") == ("unknown", evidence), "the contradiction")
    assert read(url, RUN, job_id="42") is None
    assert read(url, "gpu_allocated", gpu="0") == 1
    assert read(url, "gpu_allocated", gpu="1") is None


def test_a_gpu_that_an_unknown_pod_uses_is_not_free(node: Node, tmp_path: Path) -> None:
    (tmp_path / "pods" / f"ops_prober-0_{UID}").mkdir(parents=True)
    node.list_on(1, node.start_process(POD))
    node.list_on(0, node.start_process(DOCKER))
    node.hold()
    logs = f"--attribution.kubelet.logs={tmp_path}/pods"
    url = node.start(logs)
    wait_for(lambda: read(url, "gpu_allocated", gpu="1") == 1, "the pod that uses it")
    pod = {"scheduler": "kubernetes", "namespace": "ops", "pod": "prober-0", "source": "process"}
    assert read(url, "gpu_allocation_info", gpu="1", pod_uid=UID, **pod) == 1
    assert read(url, "gpu_allocation_info", gpu="0", scheduler="container", container="d" * 12, source="process") == 1
    assert states(url, "pod")["prober-0"] == (
        "unknown",
        "a process of the pod uses this GPU, but no scheduler allocated it, and the pod requests no GPU",
    )
    assert read(url, RUN, gpu="1") is None and read(url, RUN, gpu="0") is None
    assert node.log().count("pod ops/prober-0 uses a GPU that no source allocated to it: it may be privileged, or") == 1
    table = node.once("--format=table", *node.flags(), logs).stdout
    assert f"ops/prober-0/{'f' * 12}" in table and f"container {'d' * 12}" in table
    node.list_on(1)
    wait_for(lambda: read(url, "gpu_allocated", gpu="1") == 0, "the GPU to be free again")


def test_only_the_mig_instance_with_another_holders_process_is_contradicted(node: Node) -> None:
    node.list_on(2, (node.start_process(job(43)), "7/0"), (node.start_process(job(44)), "8/0"))
    node.hold(*({"uuid": uuid, "job": name} for uuid, name in zip(node.instances, ("42", "44"), strict=True)))
    url = node.start()
    wait_for(lambda: (read(url, RUN, job_id="44") or 0) > 0.3, "the idle run of the one that is confirmed")
    assert states(url)["42"] == ("unknown", "processes of job 43 run here, but static reports job 42")
    assert read(url, RUN, job_id="42") is None


@pytest.mark.parametrize("places", ["files"], indirect=True)
def test_attribution_by_process_requires_the_hosts_proc(node: Node, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = node.once(*QUIET, "--attribution.process", f"--path.procfs={tmp_path}/empty")
    assert done.returncode == 2
    assert done.stderr == (
        f"gpu-exporter: --attribution.process: {tmp_path}/empty does not show the host's processes; run with "
        "hostPID, name the host's /proc with --path.procfs, or leave the flag out\n"
    )
    done = node.once(*QUIET, "--attribution.process", "--no-collector.processes")
    assert (done.returncode, "needs --collector.processes" in done.stderr) == (2, True)


MEMORY, PROCESSES = "gpu_allocation_memory_used_bytes", "gpu_allocation_processes"
LONE = "user.slice/user-1000.slice"  # a login session, which no scheduler knows


def uses(url: str, **names: str) -> tuple[float | None, float | None]:
    """The number of a holder's processes, and their memory in GiB."""
    memory = read(url, MEMORY, **names)
    return read(url, PROCESSES, **names), None if memory is None else memory / 2**30


def test_holders_of_a_shared_gpu_have_the_memory_of_their_own_processes(node: Node) -> None:
    node.hold(
        {"uuid": node.uuids[0], "job": "42"}, {"uuid": node.uuids[0], "job": "43"}, {"uuid": node.uuids[1], "job": "44"}
    )
    own = {"a": (job(42), 3), "b": (job(42), 1), "c": (job(43), 8)}
    node.list_with_memory(0, **own)
    node.list_with_memory(1, d=(job(44), 2))
    url = node.start()
    wait_for(lambda: uses(url, job_id="42") == (2.0, 4.0), "what job 42 uses")
    assert uses(url, job_id="43") == (1.0, 8.0)
    # The holder of a whole GPU has all of the device's memory, even the memory of unlisted processes.
    assert uses(url, job_id="44")[0] == 1.0
    assert read(url, MEMORY, job_id="44") == read(url, "gpu_memory_used_bytes", gpu="1")

    node.list_with_memory(
        0, **own, e=(LONE, 5)
    )  # this process could belong to a job that Slurm does not track by cgroup
    wait_for(lambda: uses(url, job_id="42") == (None, None), "one unknown process to leave all unknown")
    assert uses(url, job_id="43") == (None, None)

    node.list_with_memory(0, a=(job(42), 3))
    wait_for(lambda: uses(url, job_id="43") == (0.0, 0.0), "a holder without a process")
    assert uses(url, job_id="42") == (1.0, 3.0)
