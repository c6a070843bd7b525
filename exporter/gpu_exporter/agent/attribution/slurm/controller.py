"""Asks slurmctld about one node, with as few and as small requests as possible.

The exporter asks three questions. A job's owner cannot change the answers (docs/decisions/0001):

- Which GPUs are in use? `sinfo -n NODE` prints `GresUsed`, and the node's state (3 kB). Only this answer proves that a
  GPU is free. If a GPU is in use, but belongs to no known job, a new or hidden job holds it. (`scontrol show node NODE`
  prints more, but its client filters the whole cluster: 350 kB for 1,000 nodes. The exporter runs it once an hour, and
  when gres.conf does not fit the last answer.)
- Which jobs use these GPUs? `squeue`, with columns that only Slurm and its administrators fill. `squeue -j JOB` returns
  one job. `squeue -w NODE` receives all jobs and nodes of the cluster before it filters them (2 MB with 3,000 jobs).
The exporter runs it only if some GPUs in use belong to no job with a step here.
- Which positions (IDX) does a job have? `scontrol show job JOB --json`. On Slurm before 23.02, the plain text, or
  `squeue --json` if a job has made the text ambiguous. The exporter asks again when a job was resized, when the node's
  record contradicts it, and every JOB_EACH_S.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.parse import (
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
from gpu_exporter.agent.attribution.source import SlowSource, SourceError
from gpu_exporter.common.clock import Clock

log = logging.getLogger(__name__)
# A COMPLETING job no longer holds GPUs, while its epilog still runs (seen on 22.05.8).
HOLDING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
# how often the node's record is read again, and `scontrol show config` unless it was read for another reason
CONFIG_EACH_S = 3600.0
JOB_EACH_S = 300.0  # a resize is detected within this time
LIST_EACH_S = 600.0  # how often to ask again about GPUs in use by jobs that squeue does not list
LOOK_TIMEOUTS = 2  # `look` may take this many times the timeout of one command
DOUBT_EACH_S = 30.0  # how often to ask about the jobs again while node and jobs disagree
SINGLES_MAX = 8  # if more jobs are due, one request asks for all of them
GONE = "Invalid job id"  # squeue's error text for a job that Slurm has forgotten, or hides
WITHOUT_JSON = re.compile(r"unrecognized option '--json'|serializer|data_parser", re.IGNORECASE)
AHEAD_MAX_S = 300.0  # default time to live of a munge credential
Run = Callable[[Sequence[str], float], str]
Bounds = tuple[float, float]


class OutOfTime(SourceError):
    """Slurm answers slowly in general: the cause is not the job in the request."""


class KnownJob(NamedTuple):
    """A job of this node: its row of squeue, and its GPUs (None while unknown).

    `asked`, `gpus_asked`: when the exporter asked for the row and for the GPUs (monotonic seconds).
    """

    job: Job
    asked: float
    gpus: JobGpus | None = None
    gpus_asked: float = -math.inf


class SlurmSnapshot(NamedTuple):
    """Slurm's report about a node at `asked` (monotonic seconds).

    - `jobs`: the jobs on the node by id, each with its GPUs.
    - `problem`: why jobs may be missing although Slurm answers.
    - `each_s`: seconds between the collector's rounds, 0 without a collector.
    - `clock`: bounds of the difference between slurmctld's clock and the exporter's monotonic clock, None if unknown.
    """

    asked: float
    config: SlurmConfig
    node: NodeRecord
    jobs: Mapping[str, KnownJob]
    problem: str = ""
    each_s: float = 0.0
    clock: Bounds | None = None

    def gpus(self) -> Iterator[JobGpus]:
        """Returns the GPUs of each job."""
        return (known.gpus for known in self.jobs.values() if known.gpus is not None)

    def claimed(self) -> set[int]:
        """Returns the positions (IDX) of all jobs."""
        return {index for gpus in self.gpus() for index in gpus.positions()}

    def in_use(self) -> set[int]:
        """Returns the positions (IDX) that the node's record shows as in use. If the record has no positions, returns
        those of the jobs.
        """
        used = self.node.used
        return self.claimed() if used.unnamed else {*used.indexes, *(index for index, _ in used.shared)}

    def surplus(self) -> int:
        """Returns the number of the jobs' GPUs minus the number of GPUs in use on the node, for a record without
        positions.
        """
        return sum(len(gpus.indexes) + gpus.unnamed for gpus in self.gpus()) - self.node.used.unnamed

    def doubt(self) -> tuple[int, ...]:
        """Returns the positions that are only in the jobs or only in the node's record, empty if both agree.

        For a record without positions: the difference of the two numbers (`surplus`), empty if it is 0.
        """
        if self.node.used.unnamed:
            surplus = self.surplus()
            return (surplus,) if surplus else ()
        return tuple(sorted(self.claimed() ^ self.in_use()))

    def unexplained(self) -> tuple[int | str, ...]:
        """Returns positions or shares of GPUs that are in use, but that no known job has. A known job with a part does
        not explain the use of a whole GPU. Empty if every GPU in use has a job.

        For a record without positions: one number, the negative count of these GPUs.
        """
        if self.node.used.unnamed:
            return (self.surplus(),) if self.surplus() < 0 else ()
        share = self.node.used.unnamed_share
        is_explained = not share or any(gpus.unnamed_share for gpus in self.gpus())
        whole = {*self.node.used.indexes} - {index for gpus in self.gpus() for index in gpus.indexes}
        return (*sorted((self.in_use() - self.claimed()) | whole), *(() if is_explained else (share,)))


class Controller:
    """Asks slurmctld about the jobs of one node, and remembers the answers."""

    def __init__(self, node: str, timeout_s: float, run: Run, clock: Clock) -> None:
        self.node = node
        self._timeout_s = timeout_s
        self._run_command = run
        self._clock = clock
        self._config: SlurmConfig | None = None
        self._config_at = -math.inf
        self._bounds: Bounds | None = None
        self._record: NodeRecord | None = None
        self._record_at = -math.inf
        self._known: dict[str, KnownJob] = {}
        self._doubted_at = -math.inf
        self._doubt_before: tuple[int, ...] = ()
        self._listed_at = -math.inf
        self._listed_for: tuple[int | str, ...] = ()  # unexplained GPUs after the last list of all jobs
        self._refused: dict[str, float] = {}  # by job with a failed request: no request until this time
        self._slow: set[str] = set()  # jobs for which Slurm was too slow at the last request
        self._has_json = True
        self._all_refused_until = -math.inf
        self._began = self._until = 0.0  # of the present `look`

    def look(self, here: Collection[str], renew: bool = False, *, is_reconfigured: bool = False) -> SlurmSnapshot:
        """Asks Slurm for a new snapshot. Raises SourceError. Takes at most LOOK_TIMEOUTS timeouts, for any number of
        jobs.

        `here`: the known jobs with a step on this node. `renew`: read the node's record again, because it does not fit
        gres.conf. `is_reconfigured`: read Slurm's configuration again, because it may have changed.
        """
        now = self._clock.monotonic()
        self._began, self._until = now, now + LOOK_TIMEOUTS * self._timeout_s
        if self._config is None or is_reconfigured or now - self._config_at >= CONFIG_EACH_S:
            self._config = self._read_config()
        if renew or now - self._record_at >= CONFIG_EACH_S:
            self._record = None
        look = self._look(here)
        doubt = look.doubt()
        if doubt and doubt != self._doubt_before and not look.problem:
            # A job may have started or ended between the requests.
            look = self._look(here)
        self._doubt_before = look.doubt()
        return look

    def list_ending(self, jobs: Set[str]) -> Set[str]:
        """Returns those of the jobs that slurmctld is ending. It may report their GPUs as free before their last
        processes and the epilog have ended. Asks about at most SINGLES_MAX jobs.
        """
        ending = set()
        for job in sorted(jobs)[:SINGLES_MAX]:
            with suppress(SourceError):  # also if Slurm has forgotten the job
                rows = parse_squeue(self._squeue("-j", job, states=("COMPLETING",)))
                ending |= {row.job_id for row in rows if row.job_id == job}
        return ending

    def _look(self, here: Collection[str]) -> SlurmSnapshot:
        now = self._clock.monotonic()
        if self._record is None:
            node = self._record = parse_node(self._run("scontrol", "show", "node", self.node, "-d"))
            self._record_at = now
            self._has_json = True  # Slurm may have been upgraded
        else:
            text = self._run("sinfo", "-h", "-N", "-n", self.node, "-O", SINFO_FORMAT)
            node = parse_sinfo(text, self._record)
        problem = ""
        try:
            self._learn(lambda: self._picture(now, node), here, now)
        except OutOfTime as exc:  # GPUs in use whose job is still unknown get a holder without a name
            problem = str(exc)
        return self._picture(now, node)._replace(problem=problem)

    def _picture(self, now: float, node: NodeRecord) -> SlurmSnapshot:
        assert self._config is not None  # `look` reads it first
        jobs = {job: known for job, known in self._known.items() if known.gpus is not None}
        return SlurmSnapshot(now, self._config, node, jobs, clock=self._bounds)

    def _learn(self, picture: Callable[[], SlurmSnapshot], here: Collection[str], now: float) -> None:
        """Asks about the jobs that are unknown or may have changed. Raises SourceError."""
        self._slow &= self._known.keys() | set(here)
        # Remember jobs without GPUs while they have a step here.
        self._known = {job: known for job, known in self._known.items() if _may_hold(known) or job in here}
        holding = {job: known for job, known in self._known.items() if _may_hold(known)}
        due = {
            job
            for job, known in holding.items()
            if job not in here or known.job.state != "RUNNING" or now - known.asked >= JOB_EACH_S
        }
        self._ask(due, now)
        # The last `look` may have run out of time before it asked for some of these jobs.
        never = {job for job, known in self._known.items() if known.gpus_asked == -math.inf}
        self._ask_gpus(never | {job for job in holding if holding[job].gpus is not None}, now, again=False)
        used = picture().node.used
        if (
            picture().unexplained() or used.shared or used.unnamed_share
        ):  # a known job may explain only one share of a GPU
            new = set(here) - self._known.keys()
            self._ask(new, now)
            # A job with a step here that squeue does not show is ending, or is hidden from the exporter.
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
        """Asks for rows and GPUs of these jobs, and forgets ended jobs. `again`: also asks for GPUs that are known."""
        self._refused = {job: until for job, until in self._refused.items() if now < until}
        jobs = jobs - self._refused.keys()
        if len(jobs) > SINGLES_MAX:
            return self._list(now, again)
        for job in sorted(jobs):
            try:
                rows = parse_squeue(self._squeue("-j", job))  # for an array or het job, more jobs than the one
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
        """Asks for rows of all jobs of this node, and for the GPUs of new or resized jobs.

        Also reads the configuration again, which is small beside this list: PrivateData may have changed.
        """
        rows = parse_squeue(self._squeue("-w", self.node))
        if self._config_at < self._began:
            self._config = self._read_config()
        self._take(rows, now)
        listed = {row.job_id for row in rows}
        self._known = {job: known for job, known in self._known.items() if job in listed}
        self._ask_gpus(listed, now, again)

    def _squeue(self, *which: str, states: Sequence[str] = HOLDING) -> str:
        return self._run("squeue", "-h", "-a", "--local", *which, "-t", ",".join(states), "-O", SQUEUE_FORMAT)

    def _take(self, rows: Iterable[Job], now: float) -> None:
        for job in rows:
            before = self._known.get(job.job_id)
            is_same = before is not None and (before.job.start, before.job.restarts) == (job.start, job.restarts)
            if before is None or not is_same:
                self._known[job.job_id] = KnownJob(job, now)
            else:
                asked = before.gpus_asked if before.job.size == job.size else -math.inf
                self._known[job.job_id] = before._replace(job=job, asked=now, gpus_asked=asked)

    def _ask_gpus(self, jobs: Iterable[str], now: float, again: bool) -> None:
        """Asks for the GPUs of these jobs. Without an answer, the last known GPUs of a job remain.

        A failed request for one job does not affect the others. The failed job's GPUs still count as held, because the
        node's record shows them in use.
        """
        everything: dict[str, JobGpus] | None = None  # of the whole cluster, asked for once
        for job in sorted(jobs):
            known = self._known.get(job)
            if known is None or now < self._refused.get(job, now):
                continue
            if known.gpus is not None and now - known.gpus_asked < JOB_EACH_S and not again:
                continue
            if self._clock.monotonic() - now > self._timeout_s:
                return  # the next poll asks for the others: Slurm is slow, and the source must answer
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
        """Returns whether Slurm in general is slow, not only for this job. The next poll then asks about the job again.

        slurmctld 24.11.5 sometimes takes 5 s for an answer. One slow answer must not cost a job its GPUs for
        DOUBT_EACH_S. After two slow answers in a row for one job, the exporter does not ask about it for DOUBT_EACH_S,
        because these requests delay the others.
        """
        if isinstance(reason, OutOfTime):
            return True
        is_first = isinstance(reason, SlowSource) and job not in self._slow
        if is_first:
            self._slow.add(job)
        return is_first

    def _refuse(self, job: str, now: float, reason: SourceError) -> None:
        self._refused[job] = now + DOUBT_EACH_S
        log.info("job %s: %s; its GPUs are unknown until Slurm answers the next request", job, reason)

    def _ask_one(self, job: str) -> JobGpus | None:
        """Returns the GPUs of one job, None while they are unknown. Raises SourceError."""
        if self._has_json:
            try:
                return parse_job_gpus(self._run("scontrol", "show", "job", job, "--json"), self.node).get(job)
            except SourceError as exc:
                if not WITHOUT_JSON.search(str(exc)):
                    raise
            self._has_json = False
        return parse_job_text(self._run("scontrol", "-o", "show", "job", "-d", job), job, self.node)

    def _ask_all(self, now: float) -> dict[str, JobGpus]:
        """Returns the GPUs of every job on this node, by job id, from JSON of the whole cluster. Raises SourceError.

        For Slurm 22.05, which has JSON only for all jobs together (some builds have no JSON). This answer is the
        largest, so after a failure the exporter does not ask again for LIST_EACH_S.
        """
        if now < self._all_refused_until:
            return {}
        self._all_refused_until = now + LIST_EACH_S
        everything = parse_job_gpus(self._run("squeue", "--json", "-a"), self.node)
        self._all_refused_until = -math.inf
        return everything

    def _read_config(self) -> SlurmConfig:
        now = self._clock.monotonic()
        text = self._run("scontrol", "show", "config")
        self._bounds = narrow(self._bounds, bound_clock(parse_clock(text), now, self._clock.monotonic()))
        self._config_at = now
        return parse_config(text)

    def _run(self, *command: str) -> str:
        left_s = self._until - self._clock.monotonic()
        if left_s <= 0.0:
            limit_s = LOOK_TIMEOUTS * self._timeout_s
            raise OutOfTime(f"Slurm took longer than {limit_s:g} s for all answers of one poll")
        return self._run_command(command, min(self._timeout_s, left_s))


def bound_clock(told: float | None, before: float, after: float) -> Bounds | None:
    """Returns bounds of the difference of two clocks: slurmctld's minus the exporter's monotonic one, in seconds.

    `told`: slurmctld's clock in whole Unix seconds, None if unknown. It was read between `before` and `after`
    (monotonic seconds). The monotonic clock does not change when the system clock is set.
    """
    return None if told is None else (told - after, told + 1.0 - before)


def narrow(before: Bounds | None, found: Bounds | None) -> Bounds | None:
    """Returns the difference that agrees with an earlier and a new answer: a slow answer has wide bounds.

    If they contradict each other, a clock was set, and only the new answer counts.
    """
    if before is None or found is None:
        return found or before
    both = max(before[0], found[0]), min(before[1], found[1])
    return both if both[0] <= both[1] else found


def how_far_ahead(clock: Bounds | None, now: float, wall: float) -> float:
    """Returns by how many seconds the exporter's clock is ahead of slurmctld's clock.

    - `now` (monotonic seconds) and `wall` (Unix seconds) are the same moment.
    - 0 if the bounds contain 0: clocks with NTP agree, and a difference within the bounds is not corrected.
    - 0 above AHEAD_MAX_S: munge would let no job start, so one of the clocks was just set, and earlier dates prove
      nothing.
    """
    if clock is None:
        return 0.0
    least, most = wall - now - clock[1], wall - now - clock[0]
    ahead_s = (least + most) / 2
    return 0.0 if least <= 0.0 <= most or abs(ahead_s) > AHEAD_MAX_S else ahead_s


def _may_hold(known: KnownJob) -> bool:
    """Returns whether the job has GPUs or parts of GPUs on this node. True also while this is unknown."""
    return known.gpus is None or bool(known.gpus.positions() or known.gpus.unnamed or known.gpus.unnamed_share)
