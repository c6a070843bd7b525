"""What slurmctld says of one node, in as few and as small questions as can be.

Three questions, none of which a job's owner can shape an answer to (docs/decisions/0001):
- what is in use at all: `GresUsed` of `sinfo -n NODE`, 3 kB. A GPU in use that no known job has is held by a job that
  is new or hidden from us; one that is not in use is held by none. "Free" rests on this alone. (`scontrol show node
  NODE` says more, and is filtered by the client: 350 kB in a cluster of 1,000 nodes. So that is asked once an hour,
  and when gres.conf does not fit it);
- who: `squeue` with columns that only Slurm and its administrators fill. `squeue -j JOB` is one job, while `squeue -w
  NODE` is filtered by the client, after all jobs and nodes of the cluster were sent (2 MB with 3,000 jobs): so that is
  asked only when GPUs are in use that no job with a step here explains;
- which positions (IDX): `scontrol show job JOB --json`, on Slurm before 23.02 in plain text, and where a job has made
  that ambiguous `squeue --json`. Asked again when a job was resized, when the node contradicts it, and now and then.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from gpu_exporter.attribution.slurm.parse import (
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    Job,
    JobGpus,
    NodeRecord,
    SlurmConfig,
    parse_clock,
    parse_config,
    parse_job_gpus,
    parse_job_text,
    parse_node,
    parse_sinfo,
    parse_squeue,
)
from gpu_exporter.attribution.source import SlowSource, SourceError
from gpu_exporter.clock import Clock

log = logging.getLogger(__name__)
# A job that is COMPLETING has given its GPUs back, while its epilog still runs (seen on 22.05.8).
HOLDING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
CONFIG_EACH_S = 3600.0  # what `scontrol show config` says, and of a node its configuration, changes rarely
JOB_EACH_S = 300.0  # a resize is seen within this time
LIST_EACH_S = 600.0  # GPUs in use by jobs that squeue does not list are asked about again this often
LOOK_TIMEOUTS = 2  # a look has this many times the timeout of one command
DOUBT_EACH_S = 30.0  # while node and jobs disagree, the jobs are asked again this often
SINGLES_MAX = 8  # more jobs than that are asked for at once
GONE = "Invalid job id"  # what squeue ends with for a job that Slurm has forgotten, or hides
WITHOUT_JSON = re.compile(r"unrecognized option '--json'|serializer|data_parser", re.IGNORECASE)
AHEAD_MAX_S = 300.0  # munge's default time to live of a credential
Run = Callable[[Sequence[str], float], str]
Bounds = tuple[float, float]


class OutOfTime(SourceError):
    """Slurm is slow, which is no fault of the job that was asked about."""


class Known(NamedTuple):
    """A job of this node: its row of squeue, its GPUs (None while they are not known), and when each was asked for."""

    job: Job
    asked: float
    gpus: JobGpus | None = None
    gpus_asked: float = -math.inf


class Look(NamedTuple):
    """What Slurm says of a node, from `asked` on (monotonic seconds); `jobs` by job id, each with its GPUs.

    `problem`: why jobs may be missing although Slurm answers. `each_s`: the interval of the collector's rounds if it is
    of one of them, else 0. `clock`: bounds of slurmctld's clock less our monotonic one,
    None where they are not known.
    """

    asked: float
    config: SlurmConfig
    node: NodeRecord
    jobs: Mapping[str, Known]
    problem: str = ""
    each_s: float = 0.0
    clock: Bounds | None = None

    def gpus(self) -> Iterator[JobGpus]:
        """Of each job."""
        return (known.gpus for known in self.jobs.values() if known.gpus is not None)

    def claimed(self) -> set[int]:
        """Every position that a job has."""
        return {index for gpus in self.gpus() for index in gpus.positions()}

    def in_use(self) -> set[int]:
        """Every position that is in use as the node says, or where it names none, as its jobs say."""
        used = self.node.used
        return self.claimed() if used.unnamed else {*used.indexes, *(index for index, _ in used.shared)}

    def surplus(self) -> int:
        """By how many GPUs the jobs exceed what the node has in use, where it names no positions."""
        return sum(len(gpus.indexes) + gpus.unnamed for gpus in self.gpus()) - self.node.used.unnamed

    def doubt(self) -> tuple[int, ...]:
        """Where jobs and node disagree: positions, or the jobs' surplus of GPUs where positions are not named."""
        if self.node.used.unnamed:
            surplus = self.surplus()
            return (surplus,) if surplus else ()
        return tuple(sorted(self.claimed() ^ self.in_use()))

    def unexplained(self) -> tuple[int | str, ...]:
        """What is in use and no job has: positions, or their number below 0, or a share of no position."""
        if self.node.used.unnamed:
            return (self.surplus(),) if self.surplus() < 0 else ()
        share = self.node.used.unnamed_share
        is_explained = not share or any(gpus.unnamed_share for gpus in self.gpus())
        return (*sorted(self.in_use() - self.claimed()), *(() if is_explained else (share,)))


class Controller:
    """Remembers what it was told of the jobs of one node."""

    def __init__(self, node: str, timeout_s: float, run: Run, clock: Clock) -> None:
        self.node = node
        self._timeout_s = timeout_s
        self._run_command = run
        self._clock = clock
        self._config: SlurmConfig | None = None
        self._config_at = -math.inf
        self._bounds: Bounds | None = None
        self._record: NodeRecord | None = None
        self._known: dict[str, Known] = {}
        self._doubted_at = -math.inf
        self._doubt_before: tuple[int, ...] = ()
        self._listed_at = -math.inf
        self._listed_for: tuple[int | str, ...] = ()  # what the last list of all jobs left unexplained
        self._refused: dict[str, float] = {}  # jobs that could not be asked about, and until when they are left alone
        self._slow: set[str] = set()  # jobs at whose last question Slurm was too slow
        self._has_json = True
        self._all_refused_until = -math.inf
        self._until = 0.0

    def look(self, here: Collection[str], renew: bool = False) -> Look:
        """`here`: the jobs that have a step on this node, as far as is known. `renew`: what was said of the node's
        configuration does not fit.

        Raises SourceError; takes LOOK_TIMEOUTS timeouts at most, however many jobs there are.
        """
        self._until = self._clock.monotonic() + LOOK_TIMEOUTS * self._timeout_s
        config = self._read_config()
        if renew:
            self._record = None
        look = self._look(config, here)
        doubt = look.doubt()
        if doubt and doubt != self._doubt_before and not look.problem:
            # A job may have begun or ended between the questions.
            look = self._look(config, here)
        self._doubt_before = look.doubt()
        return look

    def _look(self, config: SlurmConfig, here: Collection[str]) -> Look:
        now = self._clock.monotonic()
        if self._record is None:
            node = self._record = parse_node(self._run("scontrol", "show", "node", self.node, "-d"))
        else:
            used = parse_sinfo(self._run("sinfo", "-h", "-N", "-n", self.node, "-O", SINFO_FORMAT))
            node = self._record._replace(used=used)
        problem = ""
        try:
            self._learn(lambda: self._picture(now, config, node), here, now)
        except OutOfTime as exc:  # what is in use and has no job by now is held without a name
            problem = str(exc)
        return self._picture(now, config, node)._replace(problem=problem)

    def _picture(self, now: float, config: SlurmConfig, node: NodeRecord) -> Look:
        jobs = {job: known for job, known in self._known.items() if known.gpus is not None}
        return Look(now, config, node, jobs, clock=self._bounds)

    def _learn(self, picture: Callable[[], Look], here: Collection[str], now: float) -> None:
        """Ask about the jobs that are not known or may have changed. Raises SourceError."""
        self._slow &= self._known.keys() | set(here)
        # A job that holds nothing here is remembered as such for as long as it has a step here.
        self._known = {job: known for job, known in self._known.items() if _may_hold(known) or job in here}
        holding = {job: known for job, known in self._known.items() if _may_hold(known)}
        due = {
            job
            for job, known in holding.items()
            if job not in here or known.job.state != "RUNNING" or now - known.asked >= JOB_EACH_S
        }
        self._ask(due, now)
        # The last look may have run out of time before it had asked for some of these.
        never = {job for job, known in self._known.items() if known.gpus_asked == -math.inf}
        self._ask_gpus(never | {job for job in holding if holding[job].gpus is not None}, now, again=False)
        if picture().unexplained():
            new = set(here) - self._known.keys()
            self._ask(new, now)
            # What squeue does not show, though it has a step here, is ending or hidden from us.
            self._refused.update((job, now + JOB_EACH_S) for job in new - self._known.keys() - self._refused.keys())
        doubt, unexplained = picture().doubt(), picture().unexplained()
        if doubt and now - self._doubted_at >= DOUBT_EACH_S:
            self._doubted_at = now
            self._ask(self._known.keys(), now, again=True)
            unexplained = picture().unexplained()
        if unexplained and (unexplained != self._listed_for or now - self._listed_at >= LIST_EACH_S):
            self._list(now)
            self._listed_for, self._listed_at = picture().unexplained(), now

    def _ask(self, jobs: Set[str], now: float, again: bool = False) -> None:
        """Rows and GPUs of these jobs; one that has ended is forgotten. `again`: what is known is in doubt."""
        self._refused = {job: until for job, until in self._refused.items() if now < until}
        jobs = jobs - self._refused.keys()
        if len(jobs) > SINGLES_MAX:
            return self._list(now, again)
        for job in sorted(jobs):
            try:
                rows = parse_squeue(self._squeue("-j", job))  # of an array or het job more than the one
            except SourceError as exc:
                if self._is_slurms_fault(job, exc):
                    raise OutOfTime(str(exc)) from exc
                if GONE not in str(exc):
                    self._refuse(job, now, exc)
                    continue
                rows = []
            self._take([row for row in rows if row.job_id == job], now)
            if all(row.job_id != job for row in rows):
                self._known.pop(job, None)
        self._ask_gpus(jobs, now, again)
        return None

    def _list(self, now: float, again: bool = False) -> None:
        """Rows of all jobs of this node, and the GPUs of those that are new or were resized."""
        rows = parse_squeue(self._squeue("-w", self.node))
        self._take(rows, now)
        listed = {row.job_id for row in rows}
        self._known = {job: known for job, known in self._known.items() if job in listed}
        self._ask_gpus(listed, now, again)

    def _squeue(self, *which: str) -> str:
        return self._run("squeue", "-h", "-a", "--local", *which, "-t", ",".join(HOLDING), "-O", SQUEUE_FORMAT)

    def _take(self, rows: Iterable[Job], now: float) -> None:
        for job in rows:
            before = self._known.get(job.job_id)
            is_same = before is not None and (before.job.start, before.job.restarts) == (job.start, job.restarts)
            if before is None or not is_same:
                self._known[job.job_id] = Known(job, now)
            else:
                asked = before.gpus_asked if before.job.size == job.size else -math.inf
                self._known[job.job_id] = before._replace(job=job, asked=now, gpus_asked=asked)

    def _ask_gpus(self, jobs: Iterable[str], now: float, again: bool) -> None:
        """What is not answered stays as it was known; a job that was never known stays unknown.

        A job that cannot be asked about costs no other job its answer: the node's record makes its GPUs held.
        """
        everything: dict[str, JobGpus] | None = None  # of the whole cluster, asked for once
        for job in sorted(jobs):
            known = self._known.get(job)
            if known is None or now < self._refused.get(job, now):
                continue
            if known.gpus is not None and now - known.gpus_asked < JOB_EACH_S and not again:
                continue
            if self._clock.monotonic() - now > self._timeout_s:
                return  # the rest at the next look: Slurm is slow, and the source must answer
            try:
                gpus = self._ask_one(job)
                if gpus is None and not self._has_json:
                    everything = self._ask_all(now) if everything is None else everything
                    gpus = everything.get(job)
            except SourceError as exc:
                if self._is_slurms_fault(job, exc):
                    return
                self._refuse(job, now, exc)
            else:
                self._slow.discard(job)
                self._known[job] = known._replace(gpus=gpus, gpus_asked=now)

    def _is_slurms_fault(self, job: str, reason: SourceError) -> bool:
        """Whether Slurm is slow and it may be by chance that it was so at this job, which the next look asks about.

        slurmctld 24.11.5 takes 5 s for an answer now and then, and left a job without its GPUs for DOUBT_EACH_S. A job
        at whose question it is slow twice is left alone, so that it does not keep the others waiting.
        """
        if isinstance(reason, OutOfTime):
            return True
        is_first = isinstance(reason, SlowSource) and job not in self._slow
        if is_first:
            self._slow.add(job)
        return is_first

    def _refuse(self, job: str, now: float, reason: SourceError) -> None:
        self._refused[job] = now + DOUBT_EACH_S
        log.info("job %s: its GPUs are unknown until Slurm answers: %s", job, reason)

    def _ask_one(self, job: str) -> JobGpus | None:
        """The GPUs of one job, None while they are not known. Raises SourceError."""
        if self._has_json:
            try:
                return parse_job_gpus(self._run("scontrol", "show", "job", job, "--json"), self.node).get(job)
            except SourceError as exc:
                if not WITHOUT_JSON.search(str(exc)):
                    raise
            self._has_json = False
        return parse_job_text(self._run("scontrol", "-o", "show", "job", "-d", job), job, self.node)

    def _ask_all(self, now: float) -> dict[str, JobGpus]:
        """The GPUs on this node of every job, by job id: 22.05 has JSON for all jobs only, and some builds for none.

        Raises SourceError; where that was no use it is not tried again for a while, since it is the largest answer.
        """
        if now < self._all_refused_until:
            return {}
        self._all_refused_until = now + LIST_EACH_S
        everything = parse_job_gpus(self._run("squeue", "--json", "-a"), self.node)
        self._all_refused_until = -math.inf
        return everything

    def _read_config(self) -> SlurmConfig:
        now = self._clock.monotonic()
        if self._config is None or now - self._config_at >= CONFIG_EACH_S:
            text = self._run("scontrol", "show", "config")
            self._config = parse_config(text)
            self._bounds = bound_clock(parse_clock(text), now, self._clock.monotonic())
            self._config_at = now
            self._record = None
            self._has_json = True  # Slurm may have been upgraded
        return self._config

    def _run(self, *command: str) -> str:
        left_s = self._until - self._clock.monotonic()
        if left_s <= 0.0:
            limit_s = LOOK_TIMEOUTS * self._timeout_s
            raise OutOfTime(f"Slurm took longer than {limit_s:g} s for all answers of one poll")
        return self._run_command(command, min(self._timeout_s, left_s))


def bound_clock(told: float | None, before: float, after: float) -> Bounds | None:
    """Bounds of slurmctld's clock less our monotonic one, which a step of our own clock does not change.

    `told`: whole seconds, by slurmctld, of a moment between `before` and `after` (monotonic seconds).
    """
    return None if told is None else (told - after, told + 1.0 - before)


def how_far_ahead(clock: Bounds | None, now: float, wall: float) -> float:
    """By how many seconds our clock is ahead of slurmctld's. `now`: monotonic seconds, `wall`: Unix seconds of then.

    0 where it need not be: clocks that are kept by NTP agree, and what cannot be seen is not corrected. 0 also beyond
    AHEAD_MAX_S, where munge would let no job start: then one of the clocks was just stepped, and dates of before prove
    nothing.
    """
    if clock is None:
        return 0.0
    least, most = wall - now - clock[1], wall - now - clock[0]
    ahead_s = (least + most) / 2
    return 0.0 if least <= 0.0 <= most or abs(ahead_s) > AHEAD_MAX_S else ahead_s


def _may_hold(known: Known) -> bool:
    """Whether the job has GPUs or shares of them here, or may have."""
    return known.gpus is None or bool(known.gpus.positions() or known.gpus.unnamed or known.gpus.unnamed_share)
