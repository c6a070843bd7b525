"""Several holders on one GPU, with processes of known loads: each holder has its own share, and the rest is unattributed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.loads import Constant
from tests.testbed.cgroups import Places
from tests.testbed.process_node import Node, job, read, states
from tests.testbed.processes import fetch, wait_for

pytestmark = pytest.mark.slow

SETTINGS = """
sampling: {interval: 500ms, interval_max: 1s, deadline: 2s}
attribution: {interval: 1s}
diagnosis: {window: 20s, interval: 1s, hold: 1s}
"""
LONE = f"system.slice/docker-{'a' * 64}.scope"  # a container outside every scheduler
BUSY, IDLE, OBSERVED, HELD, ENERGY = (
    f"gpu_allocation_{name}_total"
    for name in ("busy_seconds", "idle_seconds", "observed_seconds", "held_seconds", "energy_joules")
)
RUN = "gpu_allocation_idle_run_seconds"
NOBODY = "gpu_unattributed_busy_seconds_total"
POINTS = 0.02


class Seen(NamedTuple):
    """Counters of one scrape, by family and by job or GPU."""

    values: Mapping[tuple[str, str], float]

    def since(self, before: Seen, family: str, subject: str) -> float:
        return self.values.get((family, subject), 0.0) - before.values.get((family, subject), 0.0)


def look(url: str) -> Seen:
    """The counters of allocations by job, and of GPUs by gpu."""
    found: dict[tuple[str, str], float] = {}
    for metric in text_string_to_metric_families(fetch(f"{url}/metrics") or ""):
        for sample in metric.samples:
            job_id, gpu = sample.labels.get("job_id"), sample.labels.get("gpu")
            subject = f"job {job_id}" if job_id else f"gpu {gpu}"
            if job_id or (gpu is not None and set(sample.labels) <= {"gpu", "uuid"}):
                found[sample.name, subject] = sample.value
    return Seen(found)


@pytest.fixture
def shared(make_node: Callable[..., Node], places: Places, tmp_path: Path) -> Node:
    """A node with six GPUs.

    gpu 0: jobs 42 and 43 work. Job 44 has an idle process. The driver also lists zombies.
    gpu 1: job 45 works, and so does a container outside every scheduler. Job 46 has no process.
    gpu 2: a process works, and there is no holder.
    gpu 3: the processes of both jobs are idle.
    gpu 4: jobs 49 and 50 are clients of an MPS server that job 49 has started. The driver lists only the server.
    gpu 5: all work of job 51 is done by a container that the job has started, outside the job's cgroup.
    """
    loads = (0.75, 0.8, 0.4, 0.0, 0.6, 0.6)
    node = make_node(
        gpus=[{"model": "H100", "load": {"kind": "constant", "value": load}} for load in loads], settings=SETTINGS
    )
    works = {0: ((42, 0.25), (42, 0.15), (43, 0.35), (44, 0.0)), 1: ((45, 0.5), (0, 0.3)), 3: ((47, 0.0), (48, 0.0))}
    for gpu, processes in works.items():
        pids = []
        for number, load in processes:
            pids.append(node.start_process(job(number) if number else LONE))
            node.work(pids[-1], Constant(load))
        node.list_on(gpu, *pids)
    node.add_zombies(0, 100)
    server = shutil.copy(shutil.which("sleep") or "", tmp_path / "nvidia-cuda-mps-server")
    for gpu, path, program in ((4, job(49), str(server)), (5, LONE, "sleep")):
        pid = node.start_process(path, (program, "600"))
        comm = Path(f"/proc/{pid}/comm")
        wait_for(lambda comm=comm, name=Path(program).name: comm.read_text().strip() == name[:15], "it to run")
        places.put(pid, path)  # put again, with the program's name
        node.work(pid, Constant(0.6))
        node.list_on(gpu, pid)
    holders = {0: (42, 43, 44), 1: (45, 46), 3: (47, 48), 4: (49, 50), 5: (51,)}
    node.hold(
        *({"uuid": node.uuids[gpu], "job": str(number)} for gpu, numbers in holders.items() for number in numbers)
    )
    return node


def test_each_holder_has_its_own_busy_time_and_the_rest_is_unattributed(shared: Node) -> None:
    url = shared.start()
    # Readings of a GPU without a holder wait for three polls.
    wait_for(lambda: (look(url).values.get((NOBODY, "gpu 2")) or 0) > 1, "the first unattributed time")
    before = look(url)
    wait_for(lambda: look(url).since(before, "gpu_observed_seconds_total", "gpu 0") > 15, "15 seconds")
    seen = look(url)

    def ratio(family: str, subject: str) -> float:
        """Of the observed time: on a busy machine, part of the held time is unknown."""
        held, observed = (seen.since(before, each, subject) for each in (HELD, OBSERVED))
        assert observed >= held / 2, subject
        return seen.since(before, family, subject) / (
            observed or seen.since(before, "gpu_observed_seconds_total", subject)
        )

    for number, load in ((42, 0.4), (43, 0.35), (44, 0.0), (45, 0.5), (51, 0.6)):
        assert ratio(BUSY, f"job {number}") == pytest.approx(load, abs=POINTS), number
    for number in (44, 47, 48):  # beside busy neighbours, and on a GPU without work
        assert ratio(IDLE, f"job {number}") > 0.9, number
        assert (read(url, RUN, job_id=str(number)) or 0) > 10
    for number in (42, 43, 45, 51):
        assert read(url, RUN, job_id=str(number)) == 0
    for gpu, load in (
        (0, 0.0),
        (1, 0.3),
        (2, 0.4),
        (3, 0.0),
        (4, 0.6),
        (5, 0.0),
    ):  # charged about a second at a time, so less exact
        assert ratio(NOBODY, f"gpu {gpu}") == pytest.approx(load, abs=0.06), gpu
    # While an unknown process works on a GPU, no holder of this GPU is idle.
    for number in (46, 49, 50):
        assert seen.since(before, OBSERVED, f"job {number}") == 0
        assert not read(url, RUN, job_id=str(number))

    # The shares add up to the GPU, except for time that still waits for its holder.
    for gpu, numbers in ((0, (42, 43, 44)), (1, (45, 46)), (2, ()), (3, (47, 48)), (4, (49, 50)), (5, (51,))):
        parts = sum(seen.values.get((BUSY, f"job {number}"), 0.0) for number in numbers)
        whole, known = seen.values["gpu_busy_seconds_total", f"gpu {gpu}"], parts + seen.values[NOBODY, f"gpu {gpu}"]
        assert known <= whole + 1e-6 and whole - known < 5.0
    energy = {number: seen.since(before, ENERGY, f"job {number}") for number in (42, 43, 44)}
    drawn = seen.since(before, "gpu_energy_joules_total", "gpu 0")
    # Up to 3 of about 16 seconds wait for their holder. test_division.py checks that no time is lost.
    assert 0.8 * drawn < sum(energy.values()) < 1.2 * drawn
    assert energy[42] > energy[43] > energy[44] > 0
    assert energy[42] - energy[44] == pytest.approx((energy[43] - energy[44]) * 0.40 / 0.35, rel=0.02)
    utilization = {number: read(url, "gpu_allocation_utilization_ratio", job_id=str(number)) for number in (42, 44, 46)}
    assert utilization == {42: pytest.approx(0.4, abs=POINTS), 44: 0.0, 46: None}

    wait_for(lambda: states(url)["44"][0] == "held_idle" or None, "the idle sharer to be judged")
    found = states(url)
    assert found["42"][0] in ("healthy", "bursty")
    assert found["46"] == (
        "unknown",
        "a process on the shared GPU belongs to no holder, or its owner cannot be looked up",
    )
    assert {found[name][0] for name in ("49", "50")} == {"unknown"}
    assert {found[name][0] for name in ("47", "48")} == {"held_idle"}


@pytest.mark.parametrize("places", ["files"], indirect=True)
def test_without_host_processes_the_holders_of_a_busy_shared_gpu_are_unknown(shared: Node) -> None:
    url = shared.start("--no-attribution.process")
    wait_for(lambda: (look(url).values.get((NOBODY, "gpu 0")) or 0) > 5, "busy time")
    for number in (42, 43, 44):
        assert not read(url, OBSERVED, job_id=str(number))
        assert not read(url, RUN, job_id=str(number))
    assert (read(url, RUN, job_id="47") or 0) > 3  # an idle GPU is idle time for every holder


@pytest.mark.parametrize("places", ["files"], indirect=True)
@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_UNKNOWN"])
def test_without_process_utilization_the_holders_of_a_shared_gpu_are_unknown(shared: Node, error: str) -> None:
    shared.refuse(0, "nvmlDeviceGetProcessUtilization", error)
    url = shared.start()
    wait_for(lambda: (look(url).values.get((NOBODY, "gpu 0")) or 0) > 5, "busy time")
    assert [read(url, OBSERVED, job_id=str(number)) or 0 for number in (42, 43, 44)] == [0, 0, 0]
    wait_for(lambda: "per-process utilization" in states(url)["44"][1] or None, "the reason")
    status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
    assert all(gpu["up"] for gpu in status["gpus"])
