"""Short jobs with the shipped prolog and epilog: the hours of every account and the number of runs equal Slurm's record."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.runtime.reading import ONE_READING
from gpu_exporter.common.model.holders import HolderKey
from tests.component.slurm_host import FLAGS, PROLOG, SCENARIO, plug, source_of
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, Running, fetch, run_exporter, wait_for
from tests.testbed.slurm import GPUS, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
ACCOUNTS = ("chem", "phys")
# Slurm's record of every run, as in sacct. It includes requeued runs, whose dates are no longer in the job.
RECORD = "JobCompType=jobcomp/filetxt\nJobCompLoc={root}/log/runs.txt\n"
# The node's own date of each start and end, since its prolog and epilog run late on a busy machine.
DATED = {
    name: text.replace("\n", f"\ndate +%s.%N >>{{root}}/over/$SLURM_JOB_ID.{name}\n", 1)
    for name, text in PROLOG.items()
}
# Not 24.11.5: its slurmctld reports some ends to a node up to 5 s late, and the job keeps its GPU until then.
LAYOUT = Layout(
    files={name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in DATED.items()},
    settings=f"PrologFlags=Contain\nProlog={{root}}/etc/prolog.sh\nEpilog={{root}}/etc/epilog.sh\n{RECORD}",
)
POLL_S = 5.0
RUN = re.compile(r"^JobId=(\d+) .*?StartTime=(\S+) EndTime=(\S+) .*? Account=(\S*) ", re.MULTILINE)


class Ran(NamedTuple):
    """One run of a job of one GPU, in seconds: its time in Slurm's record, and how late the node's dates are."""

    job: str
    account: str
    recorded: float
    start_late: float
    end_late: float


class Site(NamedTuple):
    """A cluster of one node, and the exporter on it."""

    slurm: Slurm
    start: Callable[[], tuple[Running, str]]  # the exporter
    exporter: Running
    url: str
    ahead_s: int  # of the node's clock
    holders: set[HolderKey]  # every holder that a second source has reported

    def submit(self, seconds: int, tasks: int, *flags: str) -> list[str]:
        """Submit an array of this many tasks of one GPU for each account. The tasks end one after the other."""
        script = self.slurm.root / f"sleep-{seconds}.sh"
        part = "$(printf %02d $((SLURM_JOB_ID * 37 % 100)))"
        over = f"{self.slurm.root}/over/$SLURM_JOB_ID"
        begun = f"touch {over}.${{SLURM_RESTART_COUNT:-0}}.begun"
        lines = ["#!/bin/sh", begun, f"sleep {seconds}.{part}", f"touch {over}"]
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        script.chmod(0o755)
        array = ("-n1", "--gres=gpu:1", f"--array=1-{tasks}", *flags)
        return [self.slurm.submit_script(script, *array, f"--account={account}") for account in ACCOUNTS]

    def wait_until_over(self) -> None:
        wait_for(lambda: not self.slurm.run("squeue", "-h").strip(), "the end of all tasks", each_s=1.0)

    def ages(self) -> dict[str, int]:
        """The seconds for which each running job has run, in Slurm's opinion."""
        lines = self.slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%A %M").splitlines()
        times = {job: text.split(":") for job, text in map(str.split, lines)}
        return {job: 60 * int(minutes) + int(seconds) for job, (minutes, seconds) in times.items()}

    def shown(self) -> set[str]:
        """The jobs that the exporter shows."""
        return set(
            re.findall(r'^gpu_allocation_info\{.*job_id="(\d+)"', fetch(f"{self.url}/metrics") or "", re.MULTILINE)
        )

    def count_ends(self) -> int:
        record = self.slurm.root / "log" / "runs.txt"
        return len(RUN.findall(record.read_text("utf-8"))) if record.exists() else 0

    def list_runs(self) -> list[Ran]:
        """Every run that Slurm has recorded."""

        def wall(text: str) -> float:
            return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) + self.ahead_s

        def dates(job: str, script: str) -> list[float]:
            return [float(line) for line in (self.slurm.root / "over" / f"{job}.{script}").read_text().split()]

        runs: dict[str, list[Ran]] = defaultdict(list)
        for job, started, ended, account in RUN.findall((self.slurm.root / "log" / "runs.txt").read_text("utf-8")):
            first, last = (dates(job, f"{name}.sh")[len(runs[job])] for name in ("prolog", "epilog"))
            start, end = wall(started), wall(ended)
            runs[job].append(Ran(job, account, end - start, first - start, last - end))
        return [run for each in runs.values() for run in each]

    def hours(self) -> tuple[dict[str, float], dict[str, float], str]:
        """GPU-seconds held and known by account, once two polls have added nothing, and the metrics page."""
        text = settled_page(self.url)
        return read_hours(text, "held"), read_hours(text, "known"), text


def sum_late(ran: Iterable[Ran]) -> tuple[float, float]:
    """How late prologs and epilogs were, beyond the half second that a date of Slurm has lost on average."""
    late = ((run.start_late - 0.5, run.end_late - 0.5) for run in ran)
    starts, ends = (max(0.0, sum(each)) for each in zip(*late, strict=True))
    return starts, ends


def settled_page(url: str) -> str:
    """The metrics page, once two polls have added no hours. A new account is published as 0 for its first minute."""
    seen: list[tuple[float, str]] = []

    def page() -> str | None:
        text = fetch(f"{url}/metrics") or ""
        hours = str((read_hours(text, "held"), read_hours(text, "known")))
        if not seen or seen[-1][1] != hours:
            seen.append((time.monotonic(), hours))
        is_new = 0.0 in read_hours(text, "held").values()
        return None if is_new or time.monotonic() - seen[-1][0] <= 12.0 else text

    return wait_for(page, "their hours", each_s=0.5)


def are_read_for(seconds: float, page: str) -> bool:
    """Whether every GPU has been read for longer than this time."""
    observed = re.findall(r"^gpu_observed_seconds_total{.*} (\S+)$", page, re.MULTILINE)
    return len(observed) == GPUS and min(map(float, observed)) > seconds


def read_hours(page: str, counter: str) -> dict[str, float]:
    pattern = rf'^gpu_tenant_{counter}_gpu_seconds_total{{.*?account="(\w*)".*?}} (\S+)$'
    return {account: float(value) for account, value in re.findall(pattern, page, re.MULTILINE)}


@contextmanager
def site(
    release: str,
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    state: Path,
    ahead_s: int = 0,
    layout: Layout = LAYOUT,
) -> Iterator[Site]:
    with start_slurm(processes, chroot_of(release), layout._replace(ahead_s=ahead_s)) as slurm:
        environment = {
            **nvml_environment,
            "SLURM_CONF": slurm.environment["SLURM_CONF"],
            "PATH": slurm.environment["PATH"],
        }
        (slurm.root / "jobs").mkdir()
        (slurm.root / "over").mkdir()
        (slurm.root / "over").chmod(0o777)
        plug(nvml_table, range(GPUS))
        feeder = ScenarioFeeder(SCENARIO, nvml_table)
        feeder.start()
        flags = (*FLAGS, f"--attribution.slurm.job-files={slurm.root / 'jobs'}", f"--state.directory={state}")
        start = partial(processes.start_exporter, *flags, environment=environment)
        exporter, url = start()
        wait_for(
            lambda: 'gpu_exporter_attribution_complete{source="slurm"} 1' in (fetch(f"{url}/metrics") or ""), "Slurm"
        )
        # Nothing is known before the first readings, and the start of a job is rounded down to a whole second.
        wait_for(lambda: are_read_for(1.0, fetch(f"{url}/metrics") or ""), "a second of readings of every GPU")
        stop = threading.Event()
        holders: set[HolderKey] = set()
        watcher = threading.Thread(target=watch, args=(slurm, holders, stop))
        watcher.start()
        try:
            yield Site(slurm, start, exporter, url, ahead_s, holders)
        finally:
            stop.set()
            watcher.join()
            feeder.stop()


def watch(slurm: Slurm, holders: set[HolderKey], stop: threading.Event) -> None:
    """Poll a second source like the exporter's, to record the holders of the runs."""
    source = source_of(slurm, job_files=slurm.root / "jobs", procfs=Path("/proc"))
    while not stop.wait(5.0):
        with contextlib.suppress(SourceError):  # slurmctld is unavailable
            answer = source.poll()
            holders |= {grant.holder.key for grant in (*answer.grants, *answer.ended) if grant.holder.job_id}


def compare(here: Site, tasks: int, runs: int, *, is_known: bool = True) -> None:
    """Check that the hours and the number of runs equal Slurm's record. `is_known`: the exporter ran all the time."""
    ran = here.list_runs()
    assert {run.account for run in ran} == set(ACCOUNTS)
    assert (len({each.job for each in ran}), len(ran)) == (tasks, runs)
    held, known, page = here.hours()
    wait_for(lambda: len(here.holders) >= runs, "the second source to have reported every run")
    assert len(here.holders) == runs, here.holders
    assert 'gpu_exporter_jobs_missed_total{source="slurm"} 0' in page
    # Slurm's dates are whole seconds. Prolog and epilog run a tenth of a second later, so one date in ten differs by a
    # second, up or down. This noise is around 0. The rest of the difference has to be below 1 %, except for what prolog and
    # epilog were late on a busy machine, beyond the half second that a date of Slurm has lost on average.
    total = sum(run.recorded for run in ran)
    within = max(0.01 * total, 3 * math.sqrt(0.2 * runs))
    later, longer = sum_late(ran)
    assert total - later - within <= sum(held.values()) <= total + longer + within, (held, ran)
    for account in ACCOUNTS:
        if is_known:
            # If a poll comes between the next job's start and a late epilog, one interval of both jobs is unknown.
            unknown = 2 * POLL_S * sum(run.end_late > 1.0 for run in ran)
            assert 0.99 * held[account] - unknown <= known[account] <= held[account] + 0.01, account
        else:
            assert known[account] < 0.8 * held[account], "time without the exporter is unknown"


@pytest.mark.parametrize(("release", "arrays"), [("22.05", {3: 12}), ("26.05", {3: 6, 10: 4, 20: 2})])
def test_hours_of_short_array_tasks_equal_slurms_record(
    release: str,
    arrays: dict[int, int],
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    tmp_path: Path,
) -> None:
    with site(release, processes, nvml_environment, nvml_table, tmp_path) as here:
        for seconds, tasks in arrays.items():
            here.submit(seconds, tasks)
        here.wait_until_over()
        tasks = 2 * sum(arrays.values())
        compare(here, tasks, tasks)


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_hours_are_correct_over_clock_skew_a_requeue_and_an_outage_of_slurmctld(
    release: str,
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    tmp_path: Path,
) -> None:
    """The clock of slurmctld is 5 s behind the clock of the node."""
    with site(release, processes, nvml_environment, nvml_table, tmp_path, ahead_s=5) as here:
        running = ("squeue", "-h", "-t", "RUNNING", "-o", "%A")
        here.submit(10, 4, "--requeue")
        first = wait_for(lambda: here.slurm.run(*running).split() or None, "the first tasks")
        over = here.slurm.root / "over"
        wait_for((over / f"{first[0]}.0.begun").exists, "a run that ends early")
        here.slurm.run("scontrol", "requeue", first[0])

        def is_last() -> bool:
            """The last run has begun, also for slurmctld, which has the node's answer to its order to start it.

            Without that answer, a slurmctld that stops orders the job to run again.
            """
            starting = here.slurm.run("squeue", "-h", "-t", "PD,CF")
            orders = re.findall(r"^Agent (?:queue size|count):\s+(\d+)", here.slurm.run("sdiag"), re.MULTILINE)
            begun = len(list(over.glob("*.begun"))) == 4 * len(ACCOUNTS) + 1
            return begun and not starting and orders == ["0", "0"]

        wait_for(is_last, "the last run to begin")
        left = set(here.slurm.run(*running).split())
        here.slurm.controller.stop()
        wait_for(lambda: left <= {path.name for path in over.iterdir()}, "their end, of which slurmctld hears later")
        here.slurm.start_controller()
        here.wait_until_over()
        # A job that slurmctld starts before the node has registered gets no GPU by name (docs/slurm.md).
        here.slurm.wait_until_registered()
        here.submit(10, 2)
        here.wait_until_over()
        compare(here, 12, 13)


@pytest.mark.parametrize(("release", "with_signal"), [("22.05", signal.SIGTERM), ("26.05", signal.SIGKILL)])
def test_jobs_that_end_while_the_exporter_does_not_run_get_their_hours(
    release: str,
    with_signal: int,
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    tmp_path: Path,
) -> None:
    with site(release, processes, nvml_environment, nvml_table, tmp_path) as here:
        here.submit(16, 1)
        wait_for(lambda: len(jobs := here.ages().keys()) == 2 and here.shown() >= jobs, "the first tasks")
        here.exporter.stop(with_signal)
        here.submit(4, 4)
        here.wait_until_over()
        here.submit(30, 1)
        wait_for(
            lambda: len(ages := here.ages().values()) == 2 and min(ages) >= 6, "two tasks that have run for six seconds"
        )
        _, url = here.start()
        here = here._replace(url=url)
        here.wait_until_over()
        compare(here, 12, 12, is_known=False)


def test_readings_from_cron_count_held_hours_in_one_file_and_never_idle_hours(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """No exporter runs; some jobs run over several readings, others begin and end between two readings."""
    out, state = tmp_path / "gpu.prom", tmp_path / "state"
    with site("22.05", processes, nvml_environment, nvml_table, state) as here:
        assert here.exporter.stop() == 0
        environment = {**nvml_environment, **{name: here.slurm.environment[name] for name in ("SLURM_CONF", "PATH")}}
        jobs = f"--attribution.slurm.job-files={here.slurm.root / 'jobs'}"
        config = tmp_path / "config.yaml"
        config.write_text("diagnosis: {window: 2s}\n", "utf-8")  # so that the jobs are not too new for a state
        ours = (f"--config.file={config}", f"--output={out}", f"--state.directory={state}", jobs)
        flags = ("--once", *ours, "--timeout=60s", *FLAGS)
        counter = re.compile(r"^(gpu_(?:tenant|allocation)_\w+_total\{.*\}) (\S+)$", re.MULTILINE)
        pages: list[dict[str, float]] = []

        def read() -> str:
            done = run_exporter(*flags, environment=environment)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            text = out.read_text("utf-8")
            pages.append({name: float(value) for name, value in counter.findall(text)})
            return text

        read()
        here.submit(11, 2, "-w", "n0")
        here.submit(2, 6, "-w", "n0")
        while here.slurm.run("squeue", "-h").strip():
            read()
            as_json = ("--format=json", f"--output={tmp_path / 'status'}")
            assert run_exporter(*flags, *as_json, environment=environment).returncode == 0
            found = json.loads((tmp_path / "status").read_text("utf-8"))["allocations"]
            assert {(each["state"], each["evidence"]) for each in found} <= {("unknown", ONE_READING)}
            seen = here.count_ends()  # cron is slow: jobs begin and end between two readings
            wait_for(lambda seen=seen: here.count_ends() >= min(16, seen + 2), "two ends")  # type: ignore[misc]
        read()
        ran, held = here.list_runs(), read_hours(read(), "held")
        assert len(ran) == 16
        total = sum(run.recorded for run in ran)
        later, longer = sum_late(ran)
        within = max(0.01 * total, 3 * math.sqrt(0.2 * 16))
        assert total - later - within <= sum(held.values()) <= total + longer + within
        assert 'gpu_exporter_jobs_missed_total{source="slurm"} 0' in out.read_text("utf-8")
        for before, after in itertools.pairwise(pages):  # Prometheus sees no reset
            assert all(after.get(name, math.inf) >= value for name, value in before.items())
        for name, value in pages[-1].items():  # a reading proves nothing about the time before it
            assert "_held_" in name or value == pages[0].get(name, 0.0), name
        # A file that is older than another reading is not written.
        text, lock = out.read_bytes(), os.open(state / "lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_exporter(*flags, environment=environment)
        assert (done.returncode, out.read_bytes()) == (2, text)
        assert (
            "another gpu-exporter uses this state directory: stop it, or set another --state.directory" in done.stderr
        )
        os.close(lock)


def test_a_job_whose_epilog_did_not_run_is_held_until_its_last_step(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    """As on a site with an epilog of its own that fails: Slurm then starts no other epilog."""
    failing = "#!/bin/sh\ndate +%s.%N >>{root}/over/$SLURM_JOB_ID.epilog.sh\nexit 1\n"
    layout = LAYOUT._replace(files={**LAYOUT.files, "epilog.sh": failing})
    with site("26.05", processes, nvml_environment, nvml_table, tmp_path, layout=layout) as here:
        here.submit(13, 2)
        here.wait_until_over()
        assert {path.name for path in (here.slurm.root / "jobs").iterdir()} >= {run.job for run in here.list_runs()}
        held, _, page = here.hours()
        total = sum(run.recorded for run in here.list_runs())
        assert total - 4 * 7.0 <= sum(held.values()) <= total + 4 * 1.0, (held, here.list_runs())
        assert 'gpu_exporter_jobs_missed_total{source="slurm"} 0' in page
