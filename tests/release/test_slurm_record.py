"""The hours of Slurm jobs equal the record of sacct, on nodes with whole GPUs, with shards and with MPS."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.component.slurm_host import PROLOG, SCENARIO, plug, source_of
from tests.component.test_slurm_hours import are_read_for, read_hours, settled_page
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, Running, fetch, wait_for
from tests.testbed.slurm import GPUS, RECORDED, Layout, Slurm, chroot_of, start_slurm

from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.model.holders import HolderKey

pytestmark = pytest.mark.slurm
AWAY_S = 12.0  # how long an exporter is stopped
SCRIPTS = {
    name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs/$SLURMD_NODENAME") for name, text in PROLOG.items()
}
SETTINGS = "PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n"
COLUMNS = "JobIDRaw,Start,End,Account"
NODES = Layout(
    gres_of=(f"gpu:h100:{GPUS}", f"gpu:h100:{GPUS},shard:16", f"gpu:h100:{GPUS},mps:200"),
    conf=f"{Layout().conf}NodeName=n1 Name=shard Count=16 File={{root}}/dev/nvidia[2-3]\n"
    "NodeName=n2 Name=mps Count=200 File={root}/dev/nvidia[2-3]\n",
    files=SCRIPTS,
    settings=f"GresTypes=gpu,shard,mps\n{SETTINGS}",
    nodes=3,
    recorded=True,
)


# The exporters' commands of Slurm. While the file `silent` exists, slurmctld answers none of them.
ASKED = """#!/bin/sh
[ "$1" = listpids ] || while [ -e {root}/silent ]; do sleep 0.1; done
exec {program} "$@"
"""


class Batch(NamedTuple):
    """Tasks of an account of their own. `seconds`: 0 until the test ends them. `gpus`: GPUs of each task on each of its
    nodes, of which it has all or a part.
    """

    nodes: str
    seconds: int
    flags: str = "--gres=gpu:1"
    tasks: int = 1
    gpus: int = 1


WHOLE, SHARD, MPS = "n0", "n1", "n2"
# They end while slurmctld is away.
RESTS = {
    "rest": Batch(WHOLE, 0),
    "shard_rest": Batch(SHARD, 0, "--gres=shard:8"),
    "mps_rest": Batch(MPS, 0),
}
FIRST = {
    "gang": Batch(f"{WHOLE},{SHARD}", 3, "--gres=gpu:1 -N2 -n2", 2),
    "again": Batch(WHOLE, 30, "--gres=gpu:1 --requeue"),
    "cut": Batch(WHOLE, 90),
    **RESTS,
    "short": Batch(WHOLE, 2, tasks=10),
    "shard_short": Batch(SHARD, 2, tasks=8),
    "mps_short": Batch(MPS, 2, tasks=8),
}
SECOND = {
    "quick": Batch(WHOLE, 5, tasks=5),
    "shard_part": Batch(SHARD, 3, "--gres=shard:8", 6),
    "shard_middle": Batch(SHARD, 15, tasks=3),
    "mps_part": Batch(MPS, 3, "--gres=mps:100", 6),
}
THIRD = {"pair": Batch(WHOLE, 12, "--gres=gpu:2", 3, 2), "mps_middle": Batch(MPS, 15, tasks=3)}
BATCHES = FIRST | SECOND | THIRD


class Run(NamedTuple):
    """One run on one GPU, in Unix seconds. `recorded`: its seconds in Slurm's record. `begin`, `end`: the whole seconds
    in which its prolog and its epilog ran, as they wrote them.
    """

    job: str
    account: str
    node: str
    gpu: str
    recorded: float
    begin: float
    end: float


class Node:
    """The exporter on one node."""

    def __init__(self, start: Callable[[], tuple[Running, str]], state: Path) -> None:
        self._start = start
        self._state = state
        self._missed = 0.0  # by earlier processes
        self.running, self.url = start()

    def page(self) -> str:
        return fetch(f"{self.url}/metrics") or ""

    def missed(self) -> float:
        found = re.search(r'^gpu_exporter_jobs_missed_total\{source="slurm"\} (\S+)$', self.page(), re.MULTILINE)
        assert found is not None
        return self._missed + float(found[1])

    def stop(self, with_signal: int) -> None:
        self._missed = self.missed()
        self.running.stop(with_signal)

    def start(self) -> None:
        self.running, self.url = self._start()

    def wait_until_saved(self, account: str) -> None:
        """Wait until the state file contains the running job of this account. Without that, a process that is killed
        leaves nothing about the job, and nothing proves that its time was not counted.
        """
        wait_for(lambda: f'account="{account}"' in self.page(), f"the job of {account}")
        since = time.time_ns()
        wait_for(lambda: (self._state / "state").stat().st_mtime_ns > since, "the state file")

    def hours(self) -> tuple[dict[str, float], dict[str, float]]:
        """GPU-seconds held and known by account, once two polls have added nothing."""
        text = settled_page(self.url)
        return read_hours(text, "held"), read_hours(text, "known")


class Site(NamedTuple):
    """A cluster with an exporter on each node. `holders`: every holder that another source on the same nodes has reported."""

    slurm: Slurm
    nodes: Mapping[str, Node]
    holders: set[tuple[str, HolderKey]]

    @property
    def over(self) -> Path:
        return self.slurm.root / "over"

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Let no exporter get an answer of slurmctld, as if it was slow. Jobs begin and end."""
        silent = self.slurm.root / "silent"
        silent.touch()
        try:
            yield
        finally:
            silent.unlink()

    def submit(self, account: str, batch: Batch) -> str:
        script = self.slurm.root / f"{account}.sh"
        part = "$(printf %02d $((SLURM_JOB_ID * 37 % 100)))"
        begun = f"touch {self.over}/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.begun"
        work = (
            f"sleep {batch.seconds}.{part}"
            if batch.seconds
            else f"until [ -e {self.over}/{account} ]; do sleep 0.2; done"
        )
        script.write_text(f"#!/bin/sh\n{begun}\n{work}\ntouch {self.over}/$SLURM_JOB_ID.done\n", encoding="utf-8")
        script.chmod(0o755)
        flags = ("-n1", *batch.flags.split(), *([f"--array=1-{batch.tasks}"] if batch.tasks > 1 else []))
        return self.slurm.submit_script(script, *flags, f"--nodelist={batch.nodes}", f"--account={account}")

    def wait_for_run(self, job: str, restarts: int = 0) -> None:
        wait_for((self.over / f"{job}.{restarts}.begun").exists, f"run {restarts} of job {job}")

    def count_ends(self, node: str) -> int:
        return len(list((self.slurm.root / "jobs" / node / ".ended").glob("*.*")))

    def wait_for_ends(self, more: Mapping[str, int]) -> None:
        """Wait until this many more runs have ended on each node."""
        most = {node: self.count_ends(node) + number for node, number in more.items()}
        wait_for(lambda: all(self.count_ends(node) >= number for node, number in most.items()), "runs to end")

    def wait_until_over(self) -> None:
        wait_for(lambda: not self.slurm.run("squeue", "-h").strip(), "the end of all tasks", each_s=1.0)

    def wait_until_quiet(self) -> None:
        """Wait until no job begins or ends, also for slurmctld, which then has the nodes' answers to its orders.

        Without these answers, a slurmctld that stops orders the jobs to run again.
        """

        def is_quiet() -> bool:
            orders = re.findall(r"^Agent (?:queue size|count):\s+(\d+)", self.slurm.run("sdiag"), re.MULTILINE)
            return not self.slurm.run("squeue", "-h", "-t", "CF,CG") and orders == ["0", "0"]

        wait_for(is_quiet, "slurmctld to be quiet")

    def list_runs(self) -> list[Run]:
        """Every run in Slurm's record, on each of its GPUs."""
        about = ("--duplicates", "--allocations", "--allusers", "--starttime=now-1hour", f"--format={COLUMNS}")
        text = self.slurm.run("sacct", *about, "-P", "-n", environment={"SLURM_TIME_FORMAT": "%s"})
        found = [line.split("|") for line in text.splitlines()]
        rows = [(job, float(start), float(end), account) for job, start, end, account in found]
        filed = {node: _read_ended(self.slurm.root / "jobs" / node / ".ended") for node in self.nodes}
        runs: list[Run] = []
        for job, start, end, account in sorted(rows, key=lambda row: row[1]):
            for node in BATCHES[account].nodes.split(","):
                file, begin = filed[node][job].pop(0), start
                if abs(float(file["began"]) - begin) <= 2.0:  # otherwise, the prolog waited while the job had its GPU
                    begin = float(file["began"])
                for gpu in file["gpus"].split(","):
                    runs.append(Run(job, account, node, gpu, end - start, begin, float(file["end"])))
        assert not any(files for of_job in filed.values() for files in of_job.values()), "a run without a record"
        return runs


def _read_ended(place: Path) -> dict[str, list[dict[str, str]]]:
    """The epilog's files by job, in order of their ends."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for path in sorted(place.iterdir()):
        file = dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines())
        found[file["job"]].append(file)
    return found


@contextmanager
def site(processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, state: Path) -> Iterator[Site]:
    with start_slurm(processes, chroot_of(RECORDED), NODES) as slurm:
        environment = {
            **nvml_environment,
            "SLURM_CONF": slurm.environment["SLURM_CONF"],
            "PATH": f"{_make_commands(slurm)}:{slurm.environment['PATH']}",
        }
        (slurm.root / "over").mkdir()
        (slurm.root / "over").chmod(0o777)
        (slurm.root / "jobs").mkdir()
        plug(nvml_table, range(GPUS))
        feeder = ScenarioFeeder(SCENARIO, nvml_table)
        feeder.start()
        nodes: dict[str, Node] = {}
        for name in (f"n{index}" for index in range(NODES.nodes)):
            (slurm.root / "jobs" / name).mkdir()
            flags = (
                "--attribution.slurm",
                f"--attribution.slurm.node={name}",
                "--no-attribution.kubelet",
                f"--attribution.slurm.job-files={slurm.root / 'jobs' / name}",
                f"--state.directory={state / name}",
            )
            nodes[name] = Node(partial(processes.start_exporter, *flags, environment=environment), state / name)
        # Nothing is known before the first readings, and the start of a job is rounded down to a whole second.
        for node in nodes.values():
            wait_for(lambda: 'gpu_exporter_attribution_complete{source="slurm"} 1' in node.page(), "Slurm")  # noqa: B023
            wait_for(lambda: are_read_for(1.0, node.page()), "a second of readings of every GPU")  # noqa: B023
        stop = threading.Event()
        holders: set[tuple[str, HolderKey]] = set()
        watcher = threading.Thread(target=watch, args=(slurm, list(nodes), holders, stop))
        watcher.start()
        try:
            yield Site(slurm, nodes, holders)
        finally:
            stop.set()
            watcher.join()
            feeder.stop()


def _make_commands(slurm: Slurm) -> Path:
    """The directory of the exporters' commands (ASKED)."""
    folder = slurm.root / "asked"
    folder.mkdir()
    for name in ("scontrol", "sinfo", "squeue"):
        program = shutil.which(name, path=slurm.environment["PATH"])
        (folder / name).write_text(ASKED.format(root=slurm.root, program=program), "utf-8")
        (folder / name).chmod(0o755)
    return folder


def watch(slurm: Slurm, nodes: list[str], holders: set[tuple[str, HolderKey]], stop: threading.Event) -> None:
    """Poll a second source on each node like the exporter's, to record the holders of the runs."""
    sources = {
        node: source_of(slurm, node=node, job_files=slurm.root / "jobs" / node, procfs=Path("/proc")) for node in nodes
    }
    while not stop.wait(5.0):
        for node, source in sources.items():
            with contextlib.suppress(SourceError):  # slurmctld is unavailable
                answer = source.poll()
                found = (grant.holder for grant in (*answer.grants, *answer.ended))
                holders |= {(node, holder.key) for holder in found if holder.job_id}


class Expected(NamedTuple):
    """GPU-seconds: in Slurm's record; how much later the epilogs ran, compared with the prologs; and what of this the next
    job on the GPU already has.
    """

    recorded: float
    later: float
    taken: float

    @property
    def total(self) -> float:
        return self.recorded + self.later - self.taken


def expect(runs: Sequence[Run]) -> Expected:
    """The GPU-seconds of these runs by Slurm's record, and each reason why the exporter counts others."""
    recorded = sum(run.recorded for run in runs)
    later = sum(run.end - run.begin for run in runs) - recorded
    taken = 0.0
    for run in runs:
        nexts = [each.begin for each in runs if (each.node, each.gpu) == (run.node, run.gpu) and each.begin > run.begin]
        taken += max(0.0, run.end - min([run.end, *nexts]))
    return Expected(recorded, later, taken)


def test_hours_of_60_jobs_equal_slurms_record(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """Arrays, a requeue, an scancel, exporters that are killed and stopped, and an outage of slurmctld. Before the outage,
    slurmctld is too slow for the exporters.
    """
    with site(processes, nvml_environment, nvml_table, tmp_path) as here:
        nodes, slurm = here.nodes, here.slurm
        jobs = {account: here.submit(account, batch) for account, batch in FIRST.items()}
        here.wait_for_run(jobs["again"])
        here.wait_for_run(jobs["cut"])
        here.wait_for_ends({WHOLE: 2})
        nodes[WHOLE].wait_until_saved("rest")
        nodes[SHARD].wait_until_saved("shard_rest")
        with here.silence():
            nodes[WHOLE].stop(signal.SIGKILL)
            nodes[WHOLE].start()
            slurm.requeue(jobs["again"])
            slurm.run("scancel", jobs["cut"])
            nodes[WHOLE].wait_until_saved("rest")
            since = time.monotonic()
            nodes[WHOLE].stop(signal.SIGTERM)
            nodes[SHARD].stop(signal.SIGKILL)
            for account, batch in SECOND.items():
                here.submit(account, batch)
            here.wait_for_ends({WHOLE: 3, SHARD: 3, MPS: 3})
            wait_for(lambda: time.monotonic() - since >= AWAY_S, "the length of the absence")
            nodes[WHOLE].start()
            nodes[SHARD].start()
        slurm.run_again(jobs["again"])
        # A job that slurmctld starts before the node has registered gets no GPU by name (docs/slurm.md).
        wait_for(lambda: not slurm.run("squeue", "-h", "-t", "PD"), "every task to begin", each_s=0.5)
        here.wait_until_quiet()
        slurm.controller.stop()
        for account in RESTS:
            (here.over / account).touch()
        wait_for(
            lambda: all((here.over / f"{jobs[account]}.done").exists() for account in RESTS),
            "ends of which slurmctld hears later",
        )
        slurm.start_controller()
        for name in nodes:
            slurm.wait_until_registered(name)
        for account, batch in THIRD.items():
            here.submit(account, batch)
        here.wait_until_over()
        runs = here.list_runs()
        assert Counter(run.account for run in runs) == Counter(
            {
                account: (batch.tasks + (account == "again")) * batch.gpus * len(batch.nodes.split(","))
                for account, batch in BATCHES.items()
            }
        )
        held: dict[tuple[str, str], float] = {}
        known: dict[tuple[str, str], float] = {}
        for name, node in nodes.items():
            for counters, hours in zip((held, known), node.hours(), strict=True):
                counters |= {(name, account): value for account, value in hours.items()}
        for name, node in nodes.items():
            ran = [run for run in runs if run.node == name]
            due, got = expect(ran), {account: held.get((name, account), 0.0) for account in BATCHES}
            longest = sorted((run.end - run.begin for run in ran), reverse=True)
            missed = sum(longest[: int(node.missed())])
            lines = "\n".join(map(str, sorted(ran, key=lambda run: (run.gpu, run.begin))))
            text = f"{name}: {got}, due {due.total} ({due}), {node.missed()} missed\n{lines}"
            print(text.splitlines()[0])  # shown if the test fails at another place
            assert due.total - missed - 0.01 * due.recorded <= sum(got.values()) <= due.total + 0.01 * due.recorded, (
                text
            )
            assert node.missed() <= 0.1 * len(ran), text
            assert held.get((name, ""), 0.0) < 1.0, "hours of no account"
        assert all(known[key] <= hours + 0.01 for key, hours in held.items())
        assert known[WHOLE, "rest"] < held[WHOLE, "rest"] - AWAY_S + 1.0, "time without the exporter is unknown"
        number = len({(run.node, run.job, run.begin) for run in runs})
        wait_for(lambda: len(here.holders) >= number, "the second source to have reported every run")
        assert len(here.holders) == number, here.holders
