"""Real Slurm: which GPU a job has under every kind of gres.conf, on boards whose minor numbers are not NVML's indexes.

The truth is slurmd's own log: the device files in the order of IDX.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.agent.attribution.slurm.controller import JOB_EACH_S
from gpu_exporter.agent.attribution.slurm.pace import INTERVAL_MAX_S, Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmSource
from gpu_exporter.agent.attribution.source import Answer
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.rows import join_rows
from tests.component.slurm_host import FLAGS, MINORS, PROLOG, SCENARIO, Host, idx_of, plug, requests, run_as, source_of
from tests.testbed.clocks import StoppableClock
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, wait_for
from tests.testbed.slurm import GPUS, USER, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
# slurmd reads this file in place of NVML: the links of each GPU (-1 to itself) give its position in the bus order.
FAKE_GPUS = "".join(
    f"h100|8|0-7|{','.join('-1' if i == index else '0' for i in range(GPUS))}|{{root}}/dev/nvidia{minor}\n"
    for index, minor in enumerate(MINORS)
)
# Without links, as AutoDetect=nvidia finds the GPUs.
NO_LINKS = "".join(f"h100|8|0-7|(null)|{{root}}/dev/nvidia{minor}\n" for minor in MINORS)
LAYOUTS = {
    "files": Layout(),
    "files in another order": Layout(
        conf="Name=gpu Type=h100 File={root}/dev/nvidia[2-3]\nName=gpu Type=h100 File={root}/dev/nvidia[0-1]\n"
    ),
    "types in another order than slurm.conf": Layout(
        gres="gpu:a100:2,gpu:h100:2",
        conf="Name=gpu Type=h100 File={root}/dev/nvidia[0-1]\nName=gpu Type=a100 File={root}/dev/nvidia[2-3]\n",
    ),
    "no type": Layout(
        gres="gpu:4", conf="Name=gpu File={root}/dev/nvidia[2-3]\nName=gpu File={root}/dev/nvidia[0-1]\n"
    ),
    "no type but cores": Layout(  # 22.05 prints gpu:(null):1(IDX:0) for it
        gres="gpu:4",
        conf="Name=gpu Files={root}/dev/nvidia[2-3] Cores=0-3\nName=gpu File={root}/dev/nvidia[0-1] Cores=4-7\n",
    ),
    "every part of the grammar": Layout(
        conf='NodeName=r[1-2]n[1-4] Name=gpu File=/dev/nvidia9\nNodeName=n[0-9] Name=gpu \\\n Type=h100 File="{root}/dev/nvidia3" # one\n'
        "Include more.conf\n",
        files={"more.conf": "NodeName=n0 Name=gpu Type=h100 File={root}/dev/nvidia[0-2] Count=3\n"},
    ),
    "AutoDetect alone": Layout(conf="AutoDetect=nvml\n", files={"fake_gpus.conf": FAKE_GPUS}),
    "AutoDetect and files": Layout(
        conf="AutoDetect=nvml\nName=gpu Type=h100 File={root}/dev/nvidia[0-3]\n", files={"fake_gpus.conf": FAKE_GPUS}
    ),
}
DETECTED = {  # AutoDetect=nvidia came with 24.11
    "AutoDetect of nvidia and files": Layout(
        conf="AutoDetect=nvidia\nName=gpu Type=h100 File={root}/dev/nvidia[3,1]\nName=gpu Type=h100 File={root}/dev/nvidia[2,0]\n",
        files={"fake_gpus.conf": NO_LINKS},
    ),
    "AutoDetect of nvidia and types": Layout(
        gres="gpu:a100:2,gpu:h100:2",
        conf="AutoDetect=nvidia\nName=gpu Type=h100 File={root}/dev/nvidia[2,0]\nName=gpu Type=a100 File={root}/dev/nvidia[3,1]\n",
        files={"fake_gpus.conf": NO_LINKS.replace("h100", "a100", 1)},
    ),
}
BY_NODE_NAME = ("every part of the grammar",)  # layouts whose gres.conf names the node
NEWER = ("types in another order than slurm.conf", "no type", "AutoDetect and files")
CASES = [("22.05", name) for name in LAYOUTS] + [
    (release, name) for release in ("24.11", "26.05") for name in (*NEWER, *DETECTED)
]


@pytest.mark.parametrize(("release", "name"), CASES, ids=lambda text: text.replace(" ", "-"))
def test_a_job_has_the_gpu_whose_file_slurmd_gives_it(
    release: str, name: str, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable
) -> None:
    layout = (LAYOUTS | DETECTED)[name]
    with start_slurm(processes, chroot_of(release), layout) as slurm:
        kinds = [part.split(":")[1] for part in layout.gres.split(",") if part.count(":") == 2]
        kind_of_each = [f"gpu:{kind}:1" for kind in kinds for _ in range(GPUS // len(kinds))] or ["gpu:1"] * GPUS
        jobs = [slurm.submit(f"--gres={gres}", runs=False) for gres in kind_of_each]
        for job in jobs:
            slurm.wait_until_runs(job)
        minors = slurm.minors()
        assert sorted(minors) == list(range(GPUS))
        host = Host(slurm, nvml_environment, nvml_table)
        assert host.held() == {job: {host.uuid_of_minor[minors[idx_of(slurm, job)]]} for job in jobs}


@pytest.mark.parametrize("name", ["files", "AutoDetect alone", "every part of the grammar"])
def test_no_gpu_where_slurm_counts_four_fails_the_health_check_on_the_first_boot(
    name: str, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    with start_slurm(processes, None, LAYOUTS[name]) as slurm:
        host = Host(slurm, nvml_environment, nvml_table)
        plug(nvml_table, [])
        cases = [("", "the driver lists no GPU that answers"), ("LD_LIBRARY_PATH", "libnvidia-ml")]
        for number, (missing, reason) in enumerate([*cases, *(cases if name in BY_NODE_NAME else [])]):
            if number == len(cases):
                slurm.controller.stop()  # gres.conf still counts the GPUs of this node
            environment = {key: value for key, value in host.environment.items() if key != missing}
            flags = ("--state.directory=", "--timeout=60s", f"--path.sysfs={tmp_path}", *FLAGS)
            command = [*GPU_EXPORTER, "--once", "--check=devices", *flags]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 3, done.stderr
            assert f"no GPU data: {reason}" in done.stderr
            assert "; slurm counts 4 GPUs here, but 0 answer" in done.stderr
            assert f"failed checks: lost: {reason}" in done.stderr
        if name in BY_NODE_NAME:
            slurm.start_controller()


@pytest.fixture(scope="module", params=["22.05", "24.11", "26.05"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    chroot = chroot_of(request.param)
    layout = Layout(settings="PrivateData=jobs,users\n", nodes=2)
    with Processes(tmp_path_factory.mktemp("slurm")) as processes, start_slurm(processes, chroot, layout) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster: Slurm) -> Any:
    yield cluster
    cluster.cancel_all()


@pytest.fixture
def host(slurm: Slurm, nvml_environment: dict[str, str], nvml_table: NvmlTable) -> Host:
    return Host(slurm, nvml_environment, nvml_table)


ON_N0 = ("-w", "n0", "-N1")


def test_grants_contain_every_fact_that_slurm_has_about_a_job(slurm: Slurm, host: Host) -> None:
    held = slurm.submit("--gres=gpu:2", "--account=phys", *ON_N0)
    (task,) = [slurm.submit("--gres=gpu:1", "--array=7-7", *ON_N0)]
    status = host.once()
    allocations = {a["uuid"]: a for a in status["allocations"]}
    assert set(allocations) == {host.uuid_of_minor[minor] for minor in (0, 1, 2)}
    first = allocations[host.uuid_of_minor[0]]
    assert (first["job_id"], first["user"], first["account"], first["partition"]) == (held, USER, "phys", "gpu")
    assert (first["slurm_cluster"], first["scheduler"], first["source"]) == ("lab", "slurm", "slurm")
    assert first["start_timestamp_seconds"] > 1.7e9
    assert f"job {task}_7" in host.run("table")
    hidden = host.once("auto")[
        "allocations"
    ]  # PrivateData hides users here, and without a state directory there is no key
    assert {(a["user"], a["account"]) for a in hidden} == {("", "")}


HOSTILE = (
    "JOB_GRES= Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:8(IDX:0-7)",
    " Nodes=n0 CPU_IDs=0 Mem=0 GRES=x",
    "x MinCPUsNode=1",
    'x","gres_detail":["gpu:4(IDX:0-3)"],"y":"',
    "x\n   UserId=root(0) JobId=1 JOB_GRES=gpu:1 Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:h100:1(IDX:3) MinCPUsNode=1",
)


def test_gpus_of_a_drained_down_or_reserved_node_are_not_free(slurm: Slurm, host: Host) -> None:
    def states() -> list[str]:
        return sorted(row.state for row in join_rows(host.once()))

    def update(state: str) -> None:
        slurm.run("scontrol", "update", "nodename=n0", f"state={state}", "reason=bad fan")

    slurm.submit("--gres=gpu:1", *ON_N0)
    held = ["unknown"]  # a job that is too young for a state
    assert states() == [*["free"] * (GPUS - 1), *held]
    clock = StoppableClock()
    source = source_of(slurm, clock=clock, pace=Pace(1.0))
    try:
        assert source.poll().closed == ""
        update("drain")
        before = requests(slurm)
        clock.later += INTERVAL_MAX_S
        assert (source.poll().closed, source.poll().closed_reason) == ("drained", "bad fan")
        assert set((requests(slurm) - before).values()) <= {1}, "no question of its own"
        assert states() == [*["closed"] * (GPUS - 1), *held]
        assert host.run("holders").count("slurm has closed this node: drained (bad fan)") == GPUS - 1
        assert 'gpu_node_closed{source="slurm",state="drained"} 1' in host.run("prometheus")
        slurm.cancel_all()
        update("down")
        assert states() == ["closed"] * GPUS
        update("resume")
        reservation = ("reservationname=r1", "starttime=now", "duration=10", "users=root", "nodes=n0")
        slurm.run("scontrol", "create", "reservation", *reservation, "flags=maint")
        wait_for(lambda: "MAINT" in slurm.run("scontrol", "show", "node", "n0"), "the reservation", each_s=0.5)
        assert "slurm has closed this node: reserved" in host.run("holders")
        slurm.run("scontrol", "delete", "reservation=r1")
        wait_for(lambda: "MAINT" not in slurm.run("scontrol", "show", "node", "n0"), "its end", each_s=0.5)
        assert states() == ["free"] * GPUS
    finally:
        slurm.attempt("scontrol", "delete", "reservation=r1")
        slurm.attempt("scontrol", "update", "nodename=n0", "state=resume")


def test_no_job_name_gains_a_gpu_or_takes_one_from_another_job(slurm: Slurm, host: Host) -> None:
    honest = slurm.submit("--gres=gpu:1", *ON_N0)
    hostile = [slurm.submit("-J", name, *ON_N0) for name in HOSTILE]
    named = slurm.submit("-J", HOSTILE[0], "--gres=gpu:1", *ON_N0)
    assert host.held() == {honest: {host.uuid_of_minor[0]}, named: {host.uuid_of_minor[1]}}
    assert hostile


def test_gpus_of_hidden_jobs_are_held_without_a_name(slurm: Slurm) -> None:
    job = slurm.submit("--gres=gpu:2", *ON_N0)

    def poll(user: str) -> Answer:
        return source_of(slurm, run_as(slurm, user)).poll()

    seen = poll("")
    assert [(c.holder.job_id, c.device) for c in seen.grants] == [(job, "0"), (job, "1")]
    assert seen.hides_users
    hidden = poll("daemon")
    assert [(c.holder.identity, c.holder.job_id, c.device, c.running) for c in hidden.grants] == [
        ("hidden", "", "0", False),
        ("hidden", "", "1", False),
    ]
    assert (hidden.problem, hidden.notice.startswith("IDX 0, 1 in use by jobs that squeue does not list")) == ("", True)


def test_a_wrong_name_of_the_node_is_reported_with_the_flag_that_corrects_it(slurm: Slurm, host: Host) -> None:
    flags = ("--state.directory=", "--timeout=120s", *FLAGS, "--attribution.slurm.node=vm")
    done = subprocess.run(
        [*GPU_EXPORTER, "--once", "--format=table", *flags],
        env=host.environment, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 4
    why = "scontrol ended with status 1: Node vm not found; name this node with --attribution.slurm.node"
    assert f"gpu-exporter: partial: source of holders slurm: {why}" in done.stderr.splitlines(), done.stderr


def test_a_job_that_releases_a_node_holds_fewer_gpus(slurm: Slurm, host: Host) -> None:
    job = slurm.submit("--gres=gpu:2", "-N2", "-n2")
    clock = ManualClock()
    source = source_of(slurm, clock=clock)
    assert {grant.holder.units for grant in source.poll().grants} == {4}
    slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1")
    clock.advance(JOB_EACH_S)
    assert {grant.holder.units for grant in source.poll().grants} == {2}


def test_a_quiet_node_hardly_asks_the_controller(slurm: Slurm, host: Host) -> None:
    """Ten minutes with a poll every 5 s.

    The node sees jobs with steps by itself. It sends one request a minute for a job without steps.
    """
    working = slurm.submit("--gres=gpu:1", *ON_N0)
    others = [slurm.submit("-w", "n1", "-N1") for _ in range(3)]
    clock = ManualClock()
    source = source_of(slurm, clock=clock, pace=Pace(60.0, lambda: 0.0))
    assert [grant.holder.job_id for grant in source.poll().grants] == [working]
    before = requests(slurm)
    for _ in range(120):
        clock.advance(5.0)
        answer = source.poll()
        assert [(grant.holder.job_id, grant.confirmed) for grant in answer.grants] == [(working, 0.0)]
        assert (answer.problem, answer.notice) == ("", "")
    assert others
    asked = requests(slurm) - before
    assert asked["REQUEST_NODE_INFO_SINGLE"] == 10  # one sinfo a minute
    assert 0 < asked["REQUEST_JOB_INFO_SINGLE"] <= 2 * 2
    assert asked["REQUEST_JOB_INFO"] == 0  # its answer has every job of the cluster
    assert asked["REQUEST_NODE_INFO"] <= 2  # its answer has every node: `scontrol show job -d` of 22.05
    assert asked.total() <= 30, asked


def obstacles(text: str, job: str) -> set[str]:
    """Why the job has no idle run."""
    found = (line for line in text.splitlines() if line.startswith("gpu_allocation_activity_unknown{"))
    return {line.partition('reason="')[2].partition('"')[0] for line in found if f'job_id="{job}"' in line}


def test_a_suspended_job_holds_and_an_ended_one_does_not(
    slurm: Slurm, host: Host, processes: Processes, tmp_path: Path
) -> None:
    config = tmp_path / "fast.yaml"
    config.write_text("attribution: {interval: 500ms}\n", encoding="utf-8")
    first, held = slurm.submit("--gres=gpu:1", *ON_N0), slurm.submit("--gres=gpu:2", *ON_N0)
    _, url = processes.start_exporter(*FLAGS, f"--config.file={config}", environment=host.environment)

    def metrics() -> str:
        return fetch(f"{url}/metrics") or ""

    wait_for(lambda: f'gpu_allocated{{gpu="3",uuid="{host.uuid_of_minor[2]}"}} 1' in metrics(), "the held GPU")
    wait_for(lambda: f'gpu_allocated{{gpu="0",uuid="{host.uuid_of_minor[3]}"}} 0' in metrics(), "the free GPU")
    wait_for(lambda: f'job_id="{held}"' in metrics(), "the job that holds it")
    wait_for(lambda: metrics().count("gpu_allocation_holder_units{") == 3, "both jobs with their three GPUs")
    slurm.run("scontrol", "suspend", held)
    wait_for(lambda: "SUSPENDED" in slurm.run("squeue", "-h", "-j", held, "-o", "%T"), "the job to be suspended")
    wait_for(lambda: obstacles(metrics(), held) & {"suspended", "stopped"}, "what keeps it from working")
    slurm.run("scontrol", "resume", held)
    wait_for(lambda: not obstacles(metrics(), held) & {"suspended", "stopped"}, "that to be over")
    slurm.run("scancel", held)
    wait_for(lambda: f'job_id="{held}"' not in metrics(), "the job's series to go")
    assert f'job_id="{first}"' in metrics()


def test_jobs_keep_their_gpus_when_a_gpu_leaves_the_list_over_a_restart(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """slurmd keeps its numbers, while NVML renumbers the other GPUs. Resolved jobs keep their GPUs; a new job is unknown."""
    with start_slurm(processes, layout=LAYOUTS["AutoDetect alone"]) as slurm:
        host = Host(slurm, nvml_environment, nvml_table)
        before = [slurm.submit("--gres=gpu:1") for _ in range(2)]  # IDX 0 and 1
        config = tmp_path / "fast.yaml"
        config.write_text("attribution: {interval: 500ms}\nstate: {write_interval: 1s}\n", encoding="utf-8")
        flags = (*FLAGS, f"--config.file={config}", f"--state.directory={tmp_path / 'state'}")

        def status(url: str) -> str:
            return fetch(f"{url}/api/v1/status") or "{}"

        def held(url: str) -> dict[str, str]:
            return {a["job_id"]: a["uuid"] for a in json.loads(status(url)).get("allocations", ())}

        truth = {job: SCENARIO.gpus[index].uuid for index, job in enumerate(before)}
        running, url = processes.start_exporter(*flags, environment=host.environment)
        wait_for(lambda: held(url) == truth, "the two jobs")
        running.stop()
        plug(nvml_table, (1, 2, 3))  # the GPU of the first job has fallen off the bus
        later = slurm.submit("--gres=gpu:1")  # IDX 2; NVML's position 2 is now another GPU
        running, url = processes.start_exporter(*flags, environment=host.environment)
        wait_for(lambda: "is not resolved" in status(url), "the third job to be unresolved")
        assert held(url)[before[1]] == truth[before[1]]
        assert later not in held(url)
        metrics = fetch(f"{url}/metrics") or ""
        assert "gpu_allocated{" not in metrics  # the third job holds one of the GPUs, so none is free
        assert f'job_id="{later}"' not in metrics


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_nodes_whose_prolog_writes_files_send_no_request(
    release: str, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable
) -> None:
    """Ten minutes with 5 exporters of node n0. Before that, slurmd itself runs the shipped prolog and epilog."""
    layout = Layout(
        files={name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in PROLOG.items()},
        settings="PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n",
    )
    with start_slurm(processes, chroot_of(release), layout) as slurm:
        files = slurm.root / "jobs"
        first, second = slurm.submit("--gres=gpu:1"), slurm.submit("--gres=gpu:2")
        slurm.submit()
        assert {path.name: path.read_text().splitlines()[1] for path in files.iterdir()} == {
            first: "gpus=0",
            second: "gpus=1,2",
        }
        clock = StoppableClock()
        nodes = [source_of(slurm, clock=clock, job_files=files) for _ in range(5)]

        def poll() -> None:
            clock.later += 5.0
            for node in nodes:
                answer = node.poll()
                assert sorted((grant.holder.job_id, grant.device) for grant in answer.grants) == held
                assert (answer.problem, answer.notice) == ("", "")

        held = [(first, "0"), (second, "1"), (second, "2")]
        nodes[0].poll()  # all exporters share one node, so its steps are read once per poll
        steps = nodes[0]._presence._steps.read()
        for node in nodes[1:]:
            node._presence._steps.read = lambda: steps  # type: ignore[method-assign]
        for _ in range(20):  # until every exporter has run for its first minute
            poll()
        before = requests(slurm)
        for _ in range(120):
            poll()
        assert requests(slurm) == before
        slurm.run("scancel", first)
        wait_for(lambda: not (files / first).exists(), "the epilog to remove the file of the job")
        assert (files / second).exists()


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_the_prologs_files_equal_the_answers_of_slurmctld(release: str, processes: Processes, tmp_path: Path) -> None:
    """Jobs of sbatch, of an array and of srun, whose owners export false variables; the first and the second run of a job."""
    layout = Layout(
        files={name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in PROLOG.items()},
        settings="PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n",
    )
    says_start = release != "22.05"
    with start_slurm(processes, chroot_of(release), layout) as slurm:
        (slurm.root / "jobs").mkdir()
        questions: list[str] = []

        def run(command: Sequence[str], timeout_s: float) -> str:
            if "listpids" not in command:
                questions.append(" ".join(command))
            return run_as(slurm)(command, timeout_s)

        def source(ask: Callable[[Sequence[str], float], str]) -> SlurmSource:
            return source_of(slurm, ask, job_files=slurm.root / "jobs")

        def facts(answer: Answer) -> list[tuple[Any, ...]]:
            """The facts of every grant that a prolog gets. Before 23.02 a prolog gets no start time."""
            assert answer.problem == ""
            return sorted(
                (
                    h.job_id,
                    h.user,
                    h.uid,
                    h.account,
                    h.partition,
                    h.units,
                    h.key.incarnation.split("/")[2],
                    grant.device,
                )
                + ((h.key, h.start_wall) if says_start else ())
                for grant in answer.grants
                for h in (grant.holder,)
            )

        exporter = source(run)
        assert exporter.poll().grants == []
        questions.clear()
        lies = {
            "SLURM_JOB_ACCOUNT": "lie",
            "SLURM_JOB_USER": "root",
            "SLURM_JOB_GPUS": "3",
            "SLURM_JOB_START_TIME": "5",
        }
        first = slurm.submit("--gres=gpu:1", "--account=phys", "--requeue", environment=lies)
        slurm.submit("--gres=gpu:1", "--array=7-7")
        command = ["srun", "-n1", "--mpi=none", "--gres=gpu:2", "sleep", "600"]
        step = processes.start(command, {**slurm.environment, **lies})
        seen = wait_for(lambda: len(list((slurm.root / "jobs").glob("[0-9]*"))) == 3 and exporter.poll(), "three files")
        assert isinstance(seen, Answer)
        assert facts(seen) == facts(source(run_as(slurm)).poll())
        assert len(facts(seen)) == GPUS
        assert questions == []
        slurm.requeue(first)
        wait_for(lambda: not (slurm.root / "jobs" / first).exists(), "the end of its first run")
        slurm.run_again(first)
        wait_for(lambda: (slurm.root / "jobs" / first).exists(), "the file of its second run")
        again = exporter.poll()
        assert facts(again) == facts(source(run_as(slurm)).poll())
        (before,), (after,) = ({fact[6] for fact in facts(each) if fact[0] == first} for each in (seen, again))
        assert (before, after) == ("0", "1")
        step.stop()
        slurm.cancel_all()
        wait_for(lambda: not list((slurm.root / "jobs").glob("[0-9]*")), "the epilogs")
        last = exporter.poll()
        assert (last.grants, last.missed, questions) == ([], 0, [])
        assert len(last.ended) == GPUS, "each with its end"


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(("kind", "line"), [("shard", "Count=16 File={root}/dev/nvidia[2-3]"), ("mps", "Count=400")])
def test_files_show_whole_gpus_beside_shared_gpus(
    release: str, kind: str, line: str, processes: Processes, tmp_path: Path
) -> None:
    """A prolog sees which job has MPS, and does not see which job has shards."""
    layout = Layout(
        gres=f"gpu:h100:4,{kind}:{16 if kind == 'shard' else 400}",
        conf=f"{Layout().conf}Name={kind} {line}\n",
        files={name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in PROLOG.items()},
        settings=f"GresTypes=gpu,{kind}\nPrologFlags=Contain\nProlog={{root}}/etc/prolog.sh\nEpilog={{root}}/etc/epilog.sh\n",
    )
    with start_slurm(processes, chroot_of(release), layout) as slurm:
        (slurm.root / "jobs").mkdir()
        questions: list[str] = []

        def run(command: Sequence[str], timeout_s: float) -> str:
            questions.append(" ".join(command))
            return run_as(slurm)(command, timeout_s)

        files, clock = slurm.root / "jobs", StoppableClock()
        clock.halted = clock.monotonic()  # on a busy machine, these steps may take longer than a minute
        exporter = source_of(slurm, run, clock, job_files=files)

        def has_settled() -> bool:  # slurmctld may report a new job late, and is asked again until it does
            clock.later += 1.0
            questions.clear()
            shares = [grant.share for grant in exporter.poll().grants]
            return shares == [kind] and all("listpids" in text for text in questions)

        part = slurm.submit(f"--gres={kind}:2")
        wait_for(has_settled, "the part of a GPU")
        questions.clear()
        whole = slurm.submit("--gres=gpu:2")
        wait_for((files / whole).exists, "the prolog, which a job that runs may be ahead of")
        answer = exporter.poll()
        held = sorted((grant.holder.job_id, grant.share) for grant in answer.grants)
        assert held == sorted([(part, kind), (whole, ""), (whole, "")])
        assert [text for text in questions if "listpids" not in text] == []
        slurm.cancel_all()
        wait_for(lambda: not list(files.glob("[0-9]*")), "the epilogs")
        last = exporter.poll()
        assert sorted(grant.holder.job_id for grant in last.ended) == sorted([part, whole, whole])
        short = slurm.submit("--gres=gpu:1")
        wait_for((files / short).exists, "its prolog")
        slurm.cancel_all()
        wait_for(lambda: not list(files.glob("[0-9]*")), "its epilog")
        last = exporter.poll()
        assert ([grant.holder.job_id for grant in last.ended], last.missed) == ([short], 0)


PARTS = Layout(
    gres="gpu:1g.10gb:2,gpu:h100:2",
    conf="Name=gpu Type=h100 File={root}/dev/nvidia[0-1]\n"
    "Name=gpu Type=1g.10gb MultipleFiles={root}/dev/nvidia2,{root}/dev/nvidia-cap30,{root}/dev/nvidia-cap31\n"
    "Name=gpu Type=1g.10gb MultipleFiles={root}/dev/nvidia2,{root}/dev/nvidia-cap39,{root}/dev/nvidia-cap40\n",
    devices=("nvidia-cap30", "nvidia-cap31", "nvidia-cap39", "nvidia-cap40"),
)


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_jobs_have_their_mig_devices_beside_whole_gpus(release: str, processes: Processes, tmp_path: Path) -> None:
    """The truth is slurmd's own log: the device files in the order of IDX."""
    minors = tmp_path / "driver" / "nvidia-caps" / "mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("gpu2/gi7/access 30\ngpu2/gi7/ci0/access 31\ngpu2/gi8/access 39\ngpu2/gi8/ci0/access 40\n")
    opened = {"nvidia-cap30": ("instance", "2/7/0"), "nvidia-cap39": ("instance", "2/8/0")}
    opened |= {f"nvidia{minor}": ("minor", str(minor)) for minor in (0, 1)}
    with start_slurm(processes, chroot_of(release), PARTS) as slurm:
        jobs = [slurm.submit(f"--gres=gpu:{kind}:1") for kind in ("1g.10gb", "h100", "1g.10gb", "h100")]
        answer = source_of(slurm, procfs=tmp_path).poll()
        files = re.findall(r"gpu device number \d+\([^)]*/(nvidia[^/)]+)\):", slurm.node.log())[:8]
        truth = [opened[name] for name in files if name in opened]
        assert len(truth) == 4
        assert answer.problem == ""
        assert {grant.holder.job_id: (grant.kind, grant.device) for grant in answer.grants} == {
            job: truth[idx_of(slurm, job)] for job in jobs
        }
