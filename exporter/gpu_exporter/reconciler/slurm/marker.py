"""Marks on Slurm jobs: a line of text in AdminComment, else in Extra (since 23.02) or Comment.

The reconciler uses another field if AdminComment is in use or denied, but never Extra if Slurm filters nodes by it
(SchedulerParameters=extra_constraints). It never overwrites texts of others. AdminComment needs the rights of an
Administrator, the other fields those of an Operator. Jobs are read with `squeue --json`, in which no job name or
comment can imitate another field.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gpu_exporter.common import commands
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import need_real, need_wholes, parse_timestamp, real
from gpu_exporter.common.slurm import commands as slurm_commands
from gpu_exporter.reconciler.decision.outcomes import ENDED, LOST, RUNS
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.surroundings import Incarnation, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import START_SLACK_S, HolderName
from gpu_exporter.reconciler.marks import Mark, MarkError, Refused, timestamp
from gpu_exporter.reconciler.slurm.live import MARK, LiveJob, parse_jobs, read_field
from gpu_exporter.reconciler.slurm.survey import describe

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0
MAX_ANSWER = 128 * 1024 * 1024  # 40,000 jobs of `squeue --json`
# How long one list serves for renewals on 22.05, where every list contains all jobs: 3,000 jobs are 9 MB and half a
# second.
RECENT_S = 5.0
LISTED_S = 20.0  # how long the list of a cycle serves for the survey; below the shortest usual interval
# The lists take at most this share of slurmctld's time: after a slow list, the reconciler pauses for up to REST_MAX_S.
BUSY_SHARE = 0.05
REST_MAX_S = 60.0  # the time that the liveness probe adds to three intervals; marks end later by up to this time
AUTO = "auto"
EXTRA_SINCE = (23, 2)  # release of Slurm
NEEDS = "only an Administrator of Slurm (sacctmgr), SlurmUser and root may write AdminComment"
# Error of scontrol for missing rights.
DENIED = re.compile(r"Access/permission denied", re.IGNORECASE)
# Errors of scontrol for a job that has ended or does not exist.
GONE = re.compile(r"Invalid job id|Job/step already completing or completed", re.IGNORECASE)
TAKEN = frozenset(("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"))  # the job did not end by itself


def render_mark(decision: Decision, stage: str, start: float, acted: str = "") -> str:
    """Returns the text of a mark.

    `stage`: for a new mark, the stage of the decision; for a renewal, the stage of the mark. `start`: start of the job
    (Unix seconds), which changes with a requeue. `acted`: the note about an action on this run of the job; "" for no
    action.
    """
    since = timestamp(decision.idle_since_wall or decision.observed_wall)
    return (
        f"{LABEL}={stage};since={since};gpus={decision.held};start={timestamp(start)};"
        f"observed-until={timestamp(decision.observed_wall)}" + (f";acted={acted}" if acted else "")
    )


def acted_on(job: LiveJob) -> str:
    """Returns the note about an action on this run of a job, from its mark; "" if there was no action."""
    start = parse_timestamp(read_field(job.text, "start"))
    is_this_run = start is not None and abs(job.start - start) <= START_SLACK_S
    match = MARK.match(job.text)
    return (read_field(match[0], "acted") or "") if match is not None and is_this_run else ""


def add_note(text: str, note: str) -> str:
    """Returns the text of a mark, with a note about an action on this run of its job.

    Without the text of others after the mark: `set_text` appends it again.
    """
    match = MARK.match(text)
    assert match is not None
    fields = [field for field in match[0].split(";") if not field.startswith("acted=")]
    return ";".join([*fields, f"acted={note}"])


def _read_setting(settings: str, name: str) -> str:
    """Returns a value in the output of `scontrol show config`; "" if it is missing or (null)."""
    match = re.search(rf"^{name}[ \t]*=[ \t]*(.*?)[ \t]*$", settings, flags=re.MULTILINE)
    return match[1] if match and match[1] != "(null)" else ""


def run_slurm(*command: str) -> str:
    """Runs a command of Slurm and returns its output. Raises MarkError."""
    try:
        done = slurm_commands.run(command, TIMEOUT_S, MAX_ANSWER)
    except commands.CommandError as exc:
        raise MarkError("error", str(exc)) from exc
    if done.status != 0:
        result = "replaced" if GONE.search(done.reason) else "error"
        raise MarkError(result, f"{' '.join(command[:2])} ended with status {done.status}: {done.reason}")
    return done.out


class JobMarker:
    scheduler = "slurm"
    rest_s = 0.0
    foreign = 0
    cluster = ""
    """Slurm's ClusterName, as in the label slurm_cluster."""
    _run = staticmethod(run_slurm)

    def __init__(self, clock: Clock, policy: Policy, field: str = AUTO) -> None:
        """`field`: the only one of FIELDS to write, or AUTO.

        Raises MarkError if Slurm does not answer, names no cluster, or does not allow this field.
        """
        self._clock = clock
        self._policy = policy
        self._recent: tuple[float, list[LiveJob]] | None = None
        self._listed: tuple[float, list[LiveJob]] | None = None
        version = re.search(r"slurm(?:-wlm)? (\d+)\.(\d+)", self._run("scontrol", "--version"))
        release = need_wholes(version.groups()) if version else (0, 0)
        self._filters = release >= EXTRA_SINCE
        """Whether `squeue --json --jobs` lists only the named jobs."""
        settings = self._run("scontrol", "show", "config")
        kill_wait = re.match("[0-9]+", _read_setting(settings, "KillWait"))  # 30 sec
        self.kill_wait_s = need_real(kill_wait[0]) if kill_wait else math.inf
        """Seconds from SIGTERM to SIGKILL at the end of a job."""
        self.cluster = _read_setting(settings, "ClusterName")
        if not self.cluster:
            raise MarkError(
                "error",
                "scontrol show config: ClusterName is missing, so the reconciler cannot tell jobs of two "
                "clusters apart, and marks none: set ClusterName in slurm.conf",
            )
        self._denied: set[str] = set()
        self.odd: Counter[tuple[str, str]] = Counter()
        extra = "Extra" if release >= EXTRA_SINCE else "Comment"
        self.fields = ["AdminComment", extra] if field == AUTO else [field]
        """Fields for marks, the best first."""
        if "Extra" in self.fields and "extra_constraints" in _read_setting(settings, "SchedulerParameters"):
            if field == "Extra":
                text = (
                    "with SchedulerParameters=extra_constraints, Slurm filters nodes by Extra; the "
                    "reconciler marks no job: set another --slurm.field"
                )
                raise MarkError("error", text)
            self.fields.remove("Extra")
        if field == "Extra" and release < EXTRA_SINCE:
            raise MarkError(
                "error", f"Slurm {version[0] if version else '?'} has no field Extra: set --slurm.field=Comment"
            )

    @staticmethod
    def is_present() -> bool:
        """Returns whether this host has Slurm's client commands."""
        return commands.find("squeue") is not None and commands.find("scontrol") is not None

    def list_marks(self) -> Sequence[Mark]:
        self._recent = None  # a list that is compared with these marks must be younger than the marks
        began = self._clock.monotonic()
        try:
            jobs = self._jobs()
        finally:
            self.rest_s = min(REST_MAX_S, (self._clock.monotonic() - began) / BUSY_SHARE)
        self._listed = self._clock.monotonic(), jobs
        return [mark for mark in (job.mark for job in jobs if not job.has_ended) if mark is not None]

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        """See Surveyor.survey. Uses the same list of jobs as the marks, so there is one list per cycle."""
        try:
            jobs = {job.job_id: job for job in self._jobs_of_this_cycle()}
        except MarkError as exc:
            return dict.fromkeys(names, Unreadable(f"the owners and groups of jobs cannot be read: {exc}", True))
        gone = Unreadable("squeue does not list the job")
        return {
            name: describe(jobs[name.name], jobs.values(), self._policy) if name.name in jobs else gone
            for name in names
        }

    def _jobs_of_this_cycle(self) -> list[LiveJob]:
        now = self._clock.monotonic()
        if self._listed is None or now - self._listed[0] >= LISTED_S:
            self._listed = now, self._jobs()
        return self._listed[1]

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        check_markable(mark.live, decision, self.cluster)

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        object_to_job(mark.live)
        marked = parse_timestamp(read_field(mark.live.text, "start"))
        if marked is not None and not abs(mark.live.start - marked) <= START_SLACK_S:
            raise Refused("replaced", "Slurm restarted the job after the reconciler marked it")
        if decision is not None and decision.start_wall is not None and decision.cluster == self.cluster:
            object_to_start(mark.live, decision.start_wall)

    def inspect(self, decision: Decision, wall: float) -> None:
        check_markable(self._find(decision.name.name, self.recent_jobs()), decision, self.cluster)

    def label(self, decision: Decision) -> str:
        job = next((job for job in self.recent_jobs() if job.job_id == decision.name.name), None)
        return f"{job.field if job is not None and job.field else self.fields[0]}={LABEL}={decision.stage}"

    def write(self, decision: Decision, wall: float) -> str:
        job = self.read(decision.name.name)
        check_markable(job, decision, self.cluster)
        self.set_text(job, render_mark(decision, decision.stage, job.start, acted_on(job)))
        return job.field

    def renew(self, mark: Mark, decision: Decision) -> None:
        """See Marker.renew. It writes the whole text, so it first reads the job; on 22.05 from a recent list."""
        job_id = mark.name.name
        job = self.read(job_id) if self._filters else self._find(job_id, self.recent_jobs())
        if job.incarnation != mark.incarnation:
            raise Refused("replaced", "Slurm restarted the job after the reconciler listed it")
        if job.text != mark.live.text:
            raise Refused("foreign", "the mark's text changed after the reconciler listed the job")
        object_to_texts(job)
        self.set_text(job, render_mark(decision, mark.stage, job.start, acted_on(job)))

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        """Removes the mark from any run of the job, because a requeued job keeps the text of its last run."""
        try:
            job = self.read(mark.name.name)
        except Refused as exc:
            raise MarkError("replaced", str(exc)) from exc
        if job.mark is None:
            return
        try:
            self.update(job.target, job.marked)  # an older mark may be in a field that is no longer used
        except MarkError as exc:
            if not DENIED.search(str(exc)):
                raise
            if others := {field: text for field, text in job.marked.items() if field != "AdminComment"}:
                self.update(job.target, others)
            raise MarkError("error", f"{exc}; {NEEDS}") from exc

    def read(self, job_id: str, *, ended: bool = False) -> LiveJob:
        """Reads a live job; with `ended`, also for some minutes after its end. Raises Refused if the job is gone.

        Slurm 22.05 always answers with all jobs.
        """
        try:
            jobs = self._jobs("--jobs", job_id, *(["--states=all"] if ended else []))
        except MarkError as exc:
            if exc.result != "replaced":
                raise
            jobs = []
        return self._find(job_id, jobs)

    @staticmethod
    def _find(job_id: str, jobs: Sequence[LiveJob]) -> LiveJob:
        found = next((job for job in jobs if job.job_id == job_id), None)
        if found is None:
            raise Refused("replaced", "the job is gone")
        return found

    def find_living(self, holders: Collection[Incarnation]) -> Collection[Incarnation]:
        """See Surveyor.find_living. Uses the list of jobs of this cycle."""
        try:
            starts = {job.job_id: job.start for job in self._jobs_of_this_cycle() if not job.has_ended}
        except MarkError:
            return holders
        return {
            (name, begun)
            for name, begun in holders
            if name.name in starts and (not begun or abs(starts[name.name] - (real(begun) or 0.0)) <= START_SLACK_S)
        }

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        """See Surveyor.read_fate. Slurm lists a job for some minutes after its end. `incarnation`: the job's start."""
        try:
            job = self.read(name.name, ended=True)
        except Refused:
            return LOST
        except MarkError:
            return RUNS
        if f"{job.start:.0f}" != incarnation or not TAKEN.isdisjoint(job.words):
            return LOST
        return ENDED if job.has_ended else RUNS

    def recent_jobs(self) -> list[LiveJob]:
        """Returns all jobs, from a list that is at most RECENT_S old."""
        now = self._clock.monotonic()
        if self._recent is None or now - self._recent[0] >= RECENT_S:
            self._recent = now, self._jobs()
        return self._recent[1]

    def _jobs(self, *selection: str) -> list[LiveJob]:
        text = self._run("squeue", "--json", "--all", *selection)
        try:
            return parse_jobs(text, self.fields, self._denied, self._note_odd)
        except ValueError as exc:
            raise MarkError("error", str(exc)) from exc

    def _note_odd(self, count: int) -> None:
        if not self.odd:
            log.warning("squeue --json: %d jobs are malformed and are left out; this is logged once", count)
        self.odd["Job", "malformed"] += count

    def set_text(self, job: LiveJob, text: str) -> None:
        """Writes a mark into its field, and removes older marks from other fields. Raises MarkError.

        Text that others have added after a mark is kept.
        """
        added = job.marked.get(job.field, "")
        try:
            self.update(job.target, {**job.marked, job.field: f"{text},{added}" if added else text})
        except MarkError as exc:
            if job.field != "AdminComment" or not DENIED.search(str(exc)):
                raise
            if len(self.fields) == 1:
                remedy = "run the reconciler as one of these users, or choose another --slurm.field"
                raise MarkError("error", f"{exc}; {NEEDS}: {remedy}") from exc
            self.fields.remove("AdminComment")
            self._denied.add("AdminComment")
            left = (
                f"from the next cycle on, the reconciler writes marks to {self.fields[0]}, and leaves "
                "AdminComment unchanged"
            )
            raise MarkError("error", f"{NEEDS}; {left}") from exc

    def update(self, target: str, texts: Mapping[str, str]) -> None:
        """Sets these fields of one job. Raises MarkError."""
        self._run("scontrol", "update", f"JobId={target}", *(f"{field}={text}" for field, text in texts.items()))


def check_markable(job: LiveJob, decision: Decision, cluster: str) -> None:
    """Raises Refused if a live job of `cluster` must not carry the mark of this decision."""
    if decision.cluster != cluster:
        known = f"is about a job of cluster {decision.cluster}" if decision.cluster else "names no Slurm cluster"
        raise Refused("cluster", f"the evidence {known}, but the live job is of cluster {cluster}")
    object_to_job(job)
    object_to_start(job, decision.start_wall or 0.0)
    if job.gpus is not None and job.gpus != decision.held:
        raise Refused("gpus", f"Slurm gave the job {job.gpus} GPUs, but exporters report {decision.held} for it")
    object_to_texts(job)


def object_to_texts(job: LiveJob) -> None:
    """Raises Refused if a job has no field that is free for a mark."""
    if not job.field or (job.text and job.mark is None):
        raise Refused("foreign", "the field contains a text that the reconciler did not write")


def object_to_job(job: LiveJob) -> None:
    """Raises Refused if a live job must not carry any mark."""
    if not job.runs:
        raise Refused("not_running", f"the job is {job.state}")


def object_to_start(job: LiveJob, start_wall: float) -> None:
    """Raises Refused unless a live job has the start time of the evidence (`start_wall`, Unix seconds)."""
    if not job.start:
        raise Refused("replaced", "Slurm reports no start time of the job, so it may not be the job of the evidence")
    if not abs(job.start - start_wall) <= START_SLACK_S:
        raise Refused("replaced", "Slurm restarted the job after the evidence was read")
