"""Reports the Slurm job of each GPU of this node. Every poll finds the jobs on this node, from the node alone
(presence.py). The source asks slurmctld for the GPUs of each job (controller.py) when a job starts or ends here, and
otherwise about once a minute (pace.py). If the prolog's files show which jobs have GPUs, it does not ask. For jobs that
are not visible on the node, an answer counts until the next request.

gres.conf defines which GPU an IDX means (gres/conf.py). If gres.conf proves no order, only a UUID from the prolog
identifies a GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.slurm import commands as slurm_commands
from gpu_exporter.agent.attribution.slurm.collected import Collected
from gpu_exporter.agent.attribution.slurm.controller import Controller, KnownJob, Run, SlurmSnapshot, how_far_ahead
from gpu_exporter.agent.attribution.slurm.filed import Begun, FiledJobs, read_job, start_here, start_of_run
from gpu_exporter.agent.attribution.slurm.grants import (
    list_witnesses,
    make_grant,
    name_by_prolog,
    open_instance,
    why_contradicted,
    why_not_running,
)
from gpu_exporter.agent.attribution.slurm.gres.boot import find_boot
from gpu_exporter.agent.attribution.slurm.gres.conf import GpuOrder, Shares
from gpu_exporter.agent.attribution.slurm.gres.epochs import Epochs
from gpu_exporter.agent.attribution.slurm.gres.files import count_named, list_places, read_order
from gpu_exporter.agent.attribution.slurm.memory import SlurmMemory
from gpu_exporter.agent.attribution.slurm.on_node.ends import Recall
from gpu_exporter.agent.attribution.slurm.on_node.job_files import EndedJob, JobFile
from gpu_exporter.agent.attribution.slurm.on_node.presence import Presence, Present
from gpu_exporter.agent.attribution.slurm.on_node.steps import StepReader, Steps
from gpu_exporter.agent.attribution.slurm.pace import INTERVAL_MAX_S, Pace, Retry
from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus, NodeRecord, SlurmConfig
from gpu_exporter.agent.attribution.slurm.users import User, UserNames
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.procfs import NewestProcess, Procfs
from gpu_exporter.common.vendor import Vendor

Watched: TypeAlias = "tuple[frozenset[str], frozenset[str]]"
"""Jobs on this node, and the stopped jobs among them."""
_RunKey: TypeAlias = "tuple[str, str]"  # job id and restart count
RENEW_FIRST_S, RENEW_MOST_S = 5.0, 600.0  # first and longest interval of requests while no order is proven
ENDED_MAX = 4096  # ended jobs that are kept while Slurm has never answered
# A slurmd that started later by more than this has restarted. The kernel's boot time moves by less with the clock.
RESTART_S = 5.0


class SlurmOptions(NamedTuple):
    """The paths and names that the source uses.

    - `node`: NodeName of this node, "" for its short host name.
    - `gres_conf`: None for the usual places.
    - `procfs`: the host's /proc.
    - `job_files`: directory of the prolog's files, None for the usual place.
    - `collected`: address or directory of a collector, which then replaces slurmctld.
    - `state`: directory for state that survives a restart, None to keep no state.
    - `keeps_state`: this process also writes to `state`.
    - `recall`: returns the state file's content about ended jobs (ends.py), None to count no jobs of the past.
    """

    node: str = ""
    timeout_s: float = 5.0
    gres_conf: Path | None = None
    procfs: Path = Path("/proc")
    job_files: Path | None = None
    collected: Address | Path | None = None
    state: Path | None = None
    keeps_state: bool = True
    recall: Recall | None = None


DEFAULTS = SlurmOptions()


class SlurmSource:
    """Reports the jobs on the GPUs of one node of a Slurm cluster."""

    name = "slurm"

    def __init__(
        self,
        options: SlurmOptions = DEFAULTS,
        run: Run = slurm_commands.run,
        clock: Clock = SYSTEM_CLOCK,
        *,
        vendor: Vendor,
        pace: Pace | None = None,
    ) -> None:
        """`pace`: decides when to ask slurmctld, by default every 60 s. Raises ValueError for an invalid NodeName."""
        self._vendor = vendor
        self._node = options.node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self._gres_conf = options.gres_conf
        self._clock = clock
        self._procfs, procfs, timeout_s = options.procfs, Procfs(options.procfs), options.timeout_s
        self._controller = (
            Controller(self._node, timeout_s, run, clock)
            if options.collected is None
            else Collected(self._node, options.collected, timeout_s, clock)
        )
        steps = StepReader(self._node, lambda command: run(command, timeout_s), procfs)
        self._presence = Presence(steps, options.job_files, clock, options.recall)
        self._pace = pace if pace is not None else Pace(60.0)
        self._look: SlurmSnapshot | None = None
        self._renewed_s = 0.0  # seconds between two answers of slurmctld
        self._failed = ""  # why the last request failed
        self._seen: Watched | None = None  # at the last request
        self._before = Steps({})  # at the last poll
        self._written: dict[str, float] = {}  # when the files of jobs were written, at the last poll
        self._epochs = Epochs(options.state, self._node, writes=options.keeps_state)
        self._memory = SlurmMemory(options.state, self._node, procfs, writes=options.keeps_state)
        self._users = UserNames(options.state, self._node, writes=options.keeps_state)
        self._filed = FiledJobs()
        self._granted: dict[str, tuple[str, list[Grant]]] = {}  # by job, at the last poll: restart count and grants
        self._ended: list[EndedJob] = []  # ended jobs that are not reported yet
        self._stepped: dict[str, float] = {}  # when a list last had a step of the job (Unix seconds)
        self._missed = 0  # number of other ended jobs that are not reported yet
        self._over: dict[_RunKey, _Over] = {}  # ended runs, until slurmctld no longer lists the job
        self._said: tuple[GpuOrder, Shares] | None = None  # content of gres.conf at the last poll: order, shared GPUs
        self._misfit = False  # gres.conf and Slurm's report about the node prove no order
        self._slurmd = NewestProcess(procfs, "slurmd")
        self._slurmd_start: float | None = None  # at the last poll
        self._reconfigured: float | None = None  # when slurmd had restarted, until a later answer of Slurm
        self._renewal = Retry(RENEW_FIRST_S, RENEW_MOST_S)
        self._again: dict[str, float] = {}  # jobs that may have been requeued, and when their processes were new
        self._ending: dict[
            str, float
        ] = {}  # jobs that slurmctld was ending at the last request, and their files' dates
        self._settled: set[str] = set()  # jobs that had a step here at an earlier request

    def poll(self) -> Answer:
        """Returns the jobs' grants. Raises SourceError if slurmctld has never answered, and no answer was saved."""
        now = self._clock.monotonic()
        present = self._presence.read(self._look.config.prolog_flags if self._look is not None else None)
        ended = [*self._ended, *present.ended]
        self._ended = ended[-ENDED_MAX:]
        self._missed += present.missed + len(ended) - len(self._ended)
        pids = present.steps.pids
        filed = self._filed.find(self._look, present) if self._look is not None else {}
        others = {job for job in pids if _is_other(self._before.pids.get(job), pids[job])}
        # A job whose file was written again has started again.
        written = {job: file.written_wall for job, file in present.files.items()}
        others |= {job for job, wall in written.items() if self._written.get(job, wall) != wall}
        self._again |= dict.fromkeys(others - filed.keys(), now)
        self._before, self._written = present.steps, written
        renew = self._misfit and self._renewal.is_due(now, self._newer_slurmd())
        self._note_slurmd(now)
        changed = self._watch(present) != self._seen or bool(self._again) or self._reconfigured is not None
        if self._pace.is_due(now, changed) or renew:
            self._ask(present, now, renew)
            self._seen = self._watch(present)
        if self._look is None:
            self._look = self._memory.recall(present, now, self._clock.wall())
        elif not self._failed:
            self._memory.keep(self._look, present, now, self._clock.wall())
        if self._look is None:
            failed = SourceError(self._failed)
            places = list_places(SlurmConfig("", "", "", frozenset()), self._node, self._gres_conf)
            failed.counted = count_named(places, self._node, self._vendor)
            raise failed
        return self._answer(self._look, present)

    def _watch(self, present: Present) -> Watched:
        """Returns the jobs whose start or end requires a request to slurmctld, and the stopped jobs among them.

        If a prolog writes files, jobs without a file hold no GPU, and jobs with a sufficient file need no request.
        """
        jobs = present.jobs
        if present.is_complete and self._look is not None:
            jobs = jobs & (present.files.keys() | self._look.jobs.keys())
            stopped = present.steps.stopped & jobs
            jobs = jobs - self._filed.settled(self._look, present, self._clock.wall())
            doubtful = self._filed.list_lost(self._look, present) | (present.stale & self._look.jobs.keys())
            return jobs | doubtful | present.over, stopped
        return jobs, present.steps.stopped & jobs

    def _newer_slurmd(self) -> float | None:
        """Returns the start (Unix seconds) of a slurmd that started after Slurm's last report about the node.

        That report is then out of date. None if slurmd has not restarted since.
        """
        start = self._slurmd.start_wall()
        known = self._look.node.slurmd_start if self._look is not None else None
        return start if start is not None and known is not None and start > known + RESTART_S else None

    def _note_slurmd(self, now: float) -> None:
        """Notes a restart of slurmd. Slurm's configuration may have changed, since from 23.11 `scontrol reconfigure`
        restarts slurmd.
        """
        start = self._slurmd.start_wall()
        if start is None:
            return
        if self._slurmd_start is not None and abs(start - self._slurmd_start) > RESTART_S:
            self._reconfigured = now
        self._slurmd_start = start

    def _ask(self, present: Present, now: float, renew: bool) -> None:
        here = present.jobs
        doubted = self._again.keys() | self._list_replaced(present)
        is_reconfigured = self._reconfigured is not None
        try:
            look = self._controller.look(here - doubted, renew=renew, is_reconfigured=is_reconfigured)
        except SourceError as exc:
            self._failed = str(exc)
            self._pace.failed(now)
            return
        self._look, self._failed, self._ending = look, "", {}
        ending = self._controller.list_ending(self._list_denied(look, present))
        self._ending = {job: present.files[job].written_wall for job in ending}
        if self._reconfigured is not None and look.asked >= self._reconfigured:
            self._reconfigured = None  # an older answer of the collector may have the old configuration
        self._again = {job: since for job, since in self._again.items() if since > look.asked}
        self._settled = (self._settled | here) & (look.jobs.keys() | here)
        # A job whose steps have ended is ending. A job that never had a step may remain so for days.
        moving = self._settled & look.jobs.keys() - here
        moving |= {job for job, known in look.jobs.items() if known.job.state == "CONFIGURING"}
        is_proven = look.jobs.keys() <= here and not look.unexplained() and not look.problem
        self._pace.answered(
            now,
            self._clock.monotonic() - now,
            unsettled=bool(moving or look.doubt() or _list_late(look, present) or self._list_denied(look, present)),
            # A collector's answer costs slurmctld nothing. A closed node may be opened again.
            quiet=present.is_complete and is_proven and not look.each_s and not look.node.closed,
        )
        # A snapshot that needs no request counts as new until something changes. Then its age counts as usual.
        self._renewed_s = min(self._pace.interval_s + look.each_s, INTERVAL_MAX_S)

    def _list_replaced(self, present: Present) -> Set[str]:
        """Returns the jobs of which another job's file claims a whole GPU, or whose own file is of another run: the
        known run may have ended, although a file or a step of the job remains.
        """
        jobs = self._look.jobs if self._look is not None else {}
        claimed = {index for job, file in present.files.items() if job not in jobs for index in file.indexes}
        requeued = {
            job
            for job, file in present.files.items()
            if job in jobs and file.run is not None and file.run.restarts != jobs[job].job.restarts
        }
        return requeued | {
            job for job, known in jobs.items() if known.gpus is not None and claimed & {*known.gpus.indexes}
        }

    def _answer(self, look: SlurmSnapshot, present: Present) -> Answer:
        """Returns grants for the jobs that the node's record confirms, and for GPUs in use without a known job.

        Raises SourceError if the jobs contradict the record, and it is unclear which job is wrong.
        """
        config = look.config
        places = list_places(config, self._node, self._gres_conf)
        found = read_order(places, self._node, look.node, self._vendor, find_boot(Procfs(self._procfs)))
        # A file that was changed after slurmd started may still be written, and its line about parts may be missing.
        said, self._said = self._said, (found.order, found.shares)
        is_settled = found.since is not None or said == self._said
        self._filed.shares = found.shares if found.order.kind != "unknown" and is_settled else None
        lost, reported = self._filed.list_lost(look, present), look.jobs
        files = (*present.files.items(), *((job.job_id, job.file) for job in self._ended))
        begun = self._list_begun(look, present, files)
        over = self._list_over(look, present)
        look, disputed = self._filed.merge(look, present, self._clock.monotonic(), over)
        self._users.note(User(known.job.user, known.job.uid) for known in look.jobs.values())
        self._users.note(User(file.run.user, file.run.uid) for _, file in files if file.run is not None)
        problems = [text for text in (self._failed, look.problem, *disputed.values()) if text]
        if lost:
            text = f"job {_name(lost)} has only a prolog's file, and Slurm does not list the job"
            problems.append(f"{text}, so no GPU is reported as free")
        problems += self._count_surplus(look)
        order = self._epochs.note(found, look.node.slurmd_start, self._clock.wall())
        self._misfit = order.kind == "unknown" and bool(look.in_use())
        if self._misfit:
            problems.append(f"GPUs in use cannot be resolved: {order.problem}")
        else:
            self._renewal.settle()
        granted = self._grant_jobs(look, present, reported, order, begun)
        hidden = self._grant_hidden(look, order)
        ended, missed = self._list_ended(look, present, order, begun)
        past = {grant.holder.key for grant in ended}
        self._filed.forget(look, present, {grant.holder.job_id for grant in ended})
        # The last processes of an ended job may still run.
        grants = [grant for grant in (*granted.grants, *hidden) if grant.holder.key not in past]
        self._granted = {job: (known.job.restarts, []) for job, known in look.jobs.items()}
        for grant in grants:
            if grant.holder.job_id:  # otherwise the job is hidden
                self._granted[grant.holder.job_id][1].append(grant)
        problems += granted.problems
        share = look.node.used.unnamed_share or next((g.unnamed_share for g in look.gpus() if g.unnamed_share), "")
        if share:
            problems.append(f"{share} is in use, but Slurm does not name the GPU, so no GPU is reported as free")
        unasked = self._list_unasked(look, present)
        ending = self._list_ending(present)
        notices, late = self._list_notices(look, present), _list_late(look, present) | unasked | ending
        if denied := _name(self._list_denied(look, present) - unasked):
            text = f"job {denied} has steps and GPUs here, but slurmctld reports a GPU of it as free"
            problems.append(f"{text}, so the exporter reports no GPU as free")
        if unasked:
            notices.append(f"slurmctld is not asked yet about job {_name(unasked)}, so no GPU is reported as free")
        if ending:
            notices.append(f"job {_name(ending)} is ending, but its processes still run, so no GPU is reported as free")
        return Answer(
            grants,
            "; ".join(dict.fromkeys(problems)),
            notice="; ".join(notices[:3]),
            conflicts=granted.conflicts,
            hides_users=bool(config.private & {"jobs", "users"}),
            is_late=bool(late or self._again.keys() & present.jobs),
            as_of=look.asked if self._failed or look.each_s else None,
            is_old=bool(self._failed),
            devices=None if self._failed else _count_devices(order, look.node),
            closed="" if self._failed else look.node.closed,
            closed_reason="" if self._failed else look.node.reason,
            counted=0 if found.order.kind == "unknown" else sum(count for _, count in look.node.configured),
            ended=ended,
            missed=missed,
            reported=present.reported,
        )

    def _list_begun(self, look: SlurmSnapshot, present: Present, files: Sequence[tuple[str, JobFile]]) -> Begun:
        """Returns the begins of the last jobs on each GPU. Notes steps. `look`, `files`: see FiledJobs.list_begun."""
        wall, there = self._clock.wall(), {job for job, _ in files}
        self._stepped = {job: at for job, at in self._stepped.items() if job in there}
        self._stepped |= dict.fromkeys(present.steps.pids, wall)
        return self._filed.list_begun(look, files, wall)

    def _list_over(self, look: SlurmSnapshot, present: Present) -> Set[str]:
        """Returns the jobs in the snapshot whose epilog has run here, or whose steps ended after slurmctld reported the
        run. slurmctld may list them for some time after that.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        by_steps, by_epilog = dict[_RunKey, _Over](), dict[_RunKey, _Over]()
        for job in present.ended:
            if job.file.run is not None:
                at = now - max(0.0, wall - job.end_wall) if job.by_steps else now
                ended = by_steps if job.by_steps else by_epilog
                ended[job.job_id, job.file.run.restarts] = _Over(at, is_sure=not job.by_steps)
        filed = {(job, file.run.restarts if file.run is not None else "") for job, file in present.files.items()}
        self._over = {
            run: over
            for run, over in (self._over | by_steps).items()
            if (run[0] in look.jobs or look.asked <= over.at) and run not in filed  # else it runs again
        }
        rows = {(job, known.job.restarts): known.asked for job, known in look.jobs.items()}
        gone = {run for run, over in self._over.items() if over.is_sure or rows.get(run, 0.0) <= over.at}
        self._over |= by_epilog  # this poll reports their ends, and the next one no longer has their files
        return {job for job, known in look.jobs.items() if (job, known.job.restarts) in gone}

    def _list_unasked(self, look: SlurmSnapshot, present: Present) -> Set[str]:
        """Returns jobs with GPUs that started since the last request, while the limit of early requests is reached."""
        asked = self._seen[0] if self._seen is not None else frozenset()
        filed = {job for job, file in present.files.items() if file.indexes or file.uuids}
        return filed - look.jobs.keys() - asked

    def _list_denied(self, look: SlurmSnapshot, present: Present) -> Set[str]:
        """Returns unknown jobs with steps and GPUs here of which slurmctld reports a GPU as free. A slurmctld 22.05.8
        that has just started reports too few GPUs in use until the node has registered. Leaves out jobs that are
        ending, and jobs whose epilog has run since the steps were read.
        """
        proven, in_use = self._filed.find(look, present), look.in_use()
        unlisted = {job: file for job, file in present.files.items() if job not in look.jobs and job not in proven}
        denied = {job for job, file in unlisted.items() if job in present.steps.pids and not in_use >= {*file.indexes}}
        return {job for job in denied - self._list_ending(present) if self._presence.has_file(job)}

    def _list_ending(self, present: Present) -> Set[str]:
        """Returns the jobs that slurmctld was ending at the last request, and that still have steps here. slurmctld
        reports their GPUs as free, although their processes may use them.
        """
        files = present.files
        there = {job for job in self._ending if job in files and files[job].written_wall == self._ending[job]}
        return there & present.steps.pids.keys()

    def _list_notices(self, look: SlurmSnapshot, present: Present) -> list[str]:
        """Returns messages for people that affect no grant."""
        notices = [*present.notices, *self._users.list_notices()]
        hidden, late = sorted(look.in_use() - look.claimed()), sorted(_list_late(look, present))
        if hidden:
            notices.append(self._why_hidden(f"IDX {', '.join(map(str, hidden))}", look.config))
        if late:
            notices.append(f"the collector's last round lacks job {', '.join(late[:3])}, so no GPU is reported as free")
        return notices

    def _count_surplus(self, look: SlurmSnapshot) -> list[str]:
        """Returns problems of a node without positions in its record. Raises SourceError if the jobs have more GPUs."""
        if not look.node.used.unnamed:
            return []
        surplus = look.surplus()
        if surplus > 0:
            raise SourceError(
                f"the jobs of node {self._node} have {surplus} more GPUs than the node's record shows as in use"
            )
        if surplus == 0:
            return []
        return [f"{self._why_hidden(f'{-surplus} GPUs', look.config)}, so no GPU is reported as free"]

    def _grant_jobs(
        self, look: SlurmSnapshot, present: Present, reported: Mapping[str, KnownJob], order: GpuOrder, begun: Begun
    ) -> _Granted:
        """Returns the grants of the jobs. `reported`: the jobs that slurmctld reported, by id."""
        grants: list[Grant] = []
        left: list[Grant] = []  # of jobs whose epilog is late: the next job has begun
        problems: list[str] = []
        now, wall = self._clock.monotonic(), self._clock.wall()
        conflicts, used = 0, look.in_use()
        ahead_s = how_far_ahead(look.clock, now, wall)
        for job_id, known in look.jobs.items():
            gpus, file = known.gpus or JobGpus((), 0), present.files.get(job_id, JobFile())
            holder = self._holder(known.job, look.config, gpus, start_of_run(known.job, file, ahead_s))
            if gpus.unnamed:
                problems.append(
                    f"{holder.label} has {gpus.unnamed} GPUs without an index: "
                    "File= in gres.conf must name device files"
                )
            start = start_here(known.job.start, file, ahead_s)
            own = self._epochs.at(start, order)
            contradicted = why_contradicted(gpus, file)
            why, obstacle = (contradicted, "contradiction") if contradicted else why_not_running(known, present.steps)
            conflicts += bool(contradicted)
            witnesses = list_witnesses(job_id, present, is_reported=reported.get(job_id) is known)
            for index, share in gpus.parts():
                if index not in used:
                    conflicts += 1
                    problems.append(
                        f"{holder.label} has IDX {index}, but node {self._node} does not list IDX {index} as in use"
                    )
                    continue
                grant = make_grant(index, own, holder, why, obstacle)._replace(
                    start_here=start, share=share, witnesses=witnesses
                )
                if grant.kind == "unproven":
                    grant = open_instance(grant, index, own, self._procfs)
                if grant.kind == "unproven":
                    grant = name_by_prolog(grant, index, gpus, file)
                if not self._is_here(job_id, present):
                    grant = self._as_of(look, grant)
                elif job_id in present.waning:  # it may have ended after that list
                    asked = known.asked if reported.get(job_id) is known else 0.0
                    grant = grant._replace(confirmed=max(present.waning[job_id], asked))
                over = _find_next(grant, file.began_wall, begun) if job_id not in present.steps.pids else None
                if over is None:
                    grants.append(grant)
                else:
                    left.append(grant._replace(confirmed=now - max(0.0, wall - over)))
        held = {grant.number for grant in grants}
        grants += [grant for grant in left if grant.number not in held]  # otherwise they would share the GPU
        return _Granted(grants, problems, conflicts)

    def _grant_hidden(self, look: SlurmSnapshot, order: GpuOrder) -> list[Grant]:
        """Returns grants for the GPUs in use that no job explains."""
        shares, own = dict(look.node.used.shared), self._epochs.at(None, order)
        grants: list[Grant] = []
        for index in sorted(look.in_use() - look.claimed()):
            holder = self._hidden(index, look.config)
            grant = make_grant(index, own, holder, "held by a job that Slurm does not show", "hidden")
            grants.append(self._as_of(look, grant._replace(share=shares.get(index, ""))))
        return grants

    def _list_ended(
        self, look: SlurmSnapshot, present: Present, order: GpuOrder, begun: Begun
    ) -> tuple[tuple[Grant, ...], int]:
        """Returns grants of jobs that have ended since the last poll, and the number of ended jobs without a grant."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        ahead_s = how_far_ahead(look.clock, now, wall)
        ended: list[Grant] = []
        missed, self._missed = self._missed, 0
        waiting: list[EndedJob] = []
        for job in self._ended:
            run, file = job.file.run, job.file
            end = now - max(0.0, wall - job.end_wall)
            if job.by_steps and _has_run(look, job):
                waiting.append(job)  # slurmctld has reported later that the job runs (_list_over)
                continue
            restarts, grants = self._granted.get(job.job_id, ("", []))
            if run is not None and (run.cluster, run.restarts) != (look.config.cluster, restarts):
                grants = []  # of another run, or of a job with that number in another cluster
            if not grants and run is not None and self._filed.names(file, look):
                known = read_job(job.job_id, file)
                start = start_here(known.start, file, ahead_s)
                own = self._epochs.at(start, order)
                gpus = self._filed.gpus_of(file, look)
                holder = self._holder(known, look.config, gpus, known.start)
                if start is not None:  # if the clock was set back since the end, both dates are in the future
                    start -= max(0.0, job.end_wall - wall)
                grants = [
                    make_grant(index, own, holder, "", "")._replace(start_here=start, share=share)
                    for index, share in gpus.parts()
                ]
            grants = [grant for grant in grants if grant.kind != "unproven"]
            for grant in grants:  # the epilog may be late
                over = min(job.end_wall, _find_next(grant, file.began_wall, begun) or math.inf)
                # A job that began before the last list with a step of this job has another part of the GPU.
                stepped = max(file.began_wall or 0.0, self._stepped.get(job.job_id, 0.0))
                proven = min(over, _find_next(grant, stepped, begun, wholes=(True, None)) or math.inf)
                at, possible = (end - max(0.0, job.end_wall - each) for each in (proven, over))
                why = "the next job may have the whole GPU" if proven < over else ""
                ended.append(grant._replace(confirmed=at, possible=possible, why=why))
            missed += not (grants or job.is_again) and bool(file.indexes or file.uuids)
        self._ended = waiting
        return tuple(ended), missed

    def _is_here(self, job_id: str, present: Present) -> bool:
        """Returns whether this poll proves, without slurmctld, that the job still holds its GPUs of
        the last snapshot.
        """
        return job_id in present.jobs and job_id not in self._again

    def _as_of(self, look: SlurmSnapshot, grant: Grant) -> Grant:
        """Sets the date of a grant to the time of slurmctld's answer, for a job that only slurmctld reports."""
        return grant._replace(confirmed=look.asked, renewed_s=self._renewed_s)

    def _holder(self, job: Job, config: SlurmConfig, gpus: JobGpus, began: float | None) -> Holder:
        # Cluster, job id, restart count and start: a requeued job is a new holder.
        start = "" if began is None else math.floor(began)
        user = self._users.show(User(job.user, job.uid))
        return Holder(
            key=HolderKey("slurm", f"{config.cluster}/{job.job_id}/{job.restarts}/{start}"),
            job_id=job.job_id,
            cluster=config.cluster,
            user=user.name,
            uid=user.uid,
            account=job.account,
            partition=job.partition,
            qos=job.qos,
            source=self.name,
            resource="gres/gpu",
            start_wall=job.start,
            units=gpus.total,
            array_job_id=job.array_job_id,
            array_task_id=job.array_task_id,
            het_job_id=job.het_job_id,
            het_job_offset=job.het_job_offset,
        )

    def _hidden(self, index: int, config: SlurmConfig) -> Holder:
        """Returns a holder without a name, for a GPU that is in use by the node's record but has no known job."""
        return Holder(
            key=HolderKey("slurm", f"{config.cluster}/hidden/{index}"),
            cluster=config.cluster,
            source=self.name,
            resource="gres/gpu",
            identity="hidden",
        )

    def _why_hidden(self, what: str, config: SlurmConfig) -> str:
        text = f"{what} in use by jobs that squeue does not list"
        if "jobs" in config.private:
            return f"{text}: PrivateData=jobs hides them from uid {os.geteuid()}; run as SlurmUser or root"
        return text


def _has_run(look: SlurmSnapshot, job: EndedJob) -> bool:
    """Returns whether slurmctld reports this run of a job as present."""
    known, run = look.jobs.get(job.job_id), job.file.run
    return known is not None and run is not None and known.job.restarts == run.restarts


def _find_next(
    grant: Grant, began: float | None, begun: Begun, *, wholes: Sequence[bool | None] = (True,)
) -> float | None:
    """Returns when the next job on the job's GPU began after `began` (Unix seconds), so that the job's time was over:
    one of the two has the whole GPU.

    `wholes`: the next job counts if this is known about it, or if the job itself has the whole GPU.
    """
    each = begun.get(grant.number, {}) if began is not None else {}
    return min(
        (at for at, whole in each.items() if (began or 0.0) < at and (whole in wholes or not grant.share)), default=None
    )


class _Over(NamedTuple):
    """The end of a run.

    - `at`: when its epilog was seen, or when a list last had a step of it (monotonic seconds).
    - `is_sure`: its epilog has run. Otherwise, a later report of slurmctld counts.
    """

    at: float
    is_sure: bool


class _Granted(NamedTuple):
    """Grants of jobs, with messages about problems. `conflicts`: the number of contradicted claims."""

    grants: list[Grant]
    problems: list[str]
    conflicts: int


def _count_devices(order: GpuOrder, node: NodeRecord) -> int | None:
    """Returns the number of GPUs that Slurm counts on this node. None unless gres.conf has the same number.

    Slurm's record may be an hour old, and an administrator may drain the node because of a wrong number.
    """
    counted = sum(count for _, count in node.configured)
    return counted if order.kind != "unknown" and len(order.minors) == counted else None


def _name(jobs: Set[str]) -> str:
    """Returns the ids of up to three jobs."""
    return ", ".join(sorted(jobs)[:3])


def _list_late(look: SlurmSnapshot, present: Present) -> Set[str]:
    """Returns jobs on this node that may have GPUs and started after the collector's last round."""
    if not look.each_s:
        return frozenset()  # this node itself asks about each job that starts
    jobs = present.files.keys() if present.is_complete else present.jobs
    return jobs - look.jobs.keys()


def _is_other(before: frozenset[int] | None, now: frozenset[int]) -> bool:
    """Returns whether all processes of a job are new."""
    return before is not None and bool(before and now) and before.isdisjoint(now)
