"""Jobs by Slurm's own commands.

Four questions, none of which a job's owner can shape an answer to (docs/decisions/0001):
- who: `squeue` with columns that only Slurm and its administrators fill, restricted to this node;
- which positions (IDX): `scontrol show job ID --json`, on Slurm before 23.02 `squeue --json`, asked again when the job
  was resized, when the node contradicts it, and now and then;
- what is in use at all: `GresUsed` of `scontrol show node -d`. A GPU in use that no listed job has is held by a job
  that is hidden from us; one that is not in use is held by none. "Free" rests on this alone;
- what an IDX means: gres.conf (gres_conf.py). Where that is not proven, nothing is resolved.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from gpu_exporter.attribution import slurm_commands
from gpu_exporter.attribution.gres_conf import GpuOrder
from gpu_exporter.attribution.gres_files import list_places, read_order
from gpu_exporter.attribution.slurm_words import (
    SQUEUE_FORMAT,
    Job,
    JobGpus,
    NodeRecord,
    SlurmConfig,
    parse_config,
    parse_job_gpus,
    parse_job_text,
    parse_node,
    parse_squeue,
)
from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.model import Grant, Holder, HolderKey
from gpu_exporter.vendor import NVIDIA, Vendor

log = logging.getLogger(__name__)
# A job that is COMPLETING has given its GPUs back, while its epilog still runs (seen on 22.05.8).
HOLDING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
CONFIG_EACH_S = 600.0  # what `scontrol show config` says changes with a reconfiguration
GPUS_EACH_S = 300.0  # a resize that changes no column of squeue is seen within this time
POLL_TIMEOUTS = 2  # a poll has this many times the timeout of one command
DOUBT_EACH_S = 30.0  # while node and jobs disagree, the jobs are asked again this often
# How jobs are asked for their GPUs: `squeue --json` on Slurm before 23.02, plain text where it is built without JSON.
FIRST_WAY = "scontrol --json"
WITHOUT_JSON = re.compile(r"unrecognized option '--json'|serializer|data_parser", re.IGNORECASE)
Run = Callable[[Sequence[str], float], str]


class _Known(NamedTuple):
    """A job's GPUs, when they were asked for (monotonic seconds), and its size then."""

    gpus: JobGpus
    asked: float
    size: tuple[str, ...]


class SlurmSource:
    """Polls Slurm for the jobs of one node."""

    name = "slurm"

    def __init__(
        self,
        node: str = "",
        timeout_s: float = 5.0,
        gres_conf: Path | None = None,
        run: Run = slurm_commands.run,
        clock: Clock = SYSTEM_CLOCK,
        vendor: Vendor = NVIDIA,
    ) -> None:
        self._vendor = vendor
        self._node = node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self._timeout_s = timeout_s
        self._gres_conf = gres_conf
        self._run_command = run
        self._clock = clock
        self._config: SlurmConfig | None = None
        self._config_at = -math.inf
        self._known: dict[str, _Known] = {}  # by incarnation
        self._doubted_at = -math.inf
        self._doubt_before: tuple[int, ...] = ()
        self._refused: dict[str, float] = {}  # jobs that could not be asked about, and until when they are left alone
        self._how = FIRST_WAY
        self._until = 0.0

    def poll(self) -> Answer:
        """Raises SourceError; takes POLL_TIMEOUTS timeouts at most, however many jobs there are."""
        self._until = self._clock.monotonic() + POLL_TIMEOUTS * self._timeout_s
        config = self._read_config()
        jobs, node = self._look(config)
        doubt = self._doubt(node)
        if doubt and doubt != self._doubt_before:  # a job may have begun or ended between the questions
            jobs, node = self._look(config)
            doubt = self._doubt(node)
        self._doubt_before = doubt
        return self._answer(jobs, node, config)

    def _look(self, config: SlurmConfig) -> tuple[dict[str, Job], NodeRecord]:
        """The node's jobs by incarnation, and its own record."""
        text = self._run("squeue", "-h", "-a", "-w", self._node, "-t", ",".join(HOLDING), "-O", SQUEUE_FORMAT)
        jobs = {self._incarnation(job, config.cluster): job for job in parse_squeue(text)}
        node = parse_node(self._run("scontrol", "show", "node", self._node, "-d"))
        self._refresh(jobs, node)
        return jobs, node

    def _doubt(self, node: NodeRecord) -> tuple[int, ...]:
        """Where jobs and node disagree: positions, or the jobs' surplus of GPUs where positions are not named."""
        granted = [index for known in self._known.values() for index in known.gpus.indexes]
        if node.used.unnamed:
            surplus = len(granted) + sum(known.gpus.unnamed for known in self._known.values()) - node.used.unnamed
            return (surplus,) if surplus else ()
        return tuple(sorted(set(granted) ^ set(node.used.indexes)))

    def _refresh(self, jobs: dict[str, Job], node: NodeRecord) -> None:
        """Ask for the GPUs of every job whose GPUs are not known, or may have changed."""
        now = self._clock.monotonic()
        self._known = {key: known for key, known in self._known.items() if key in jobs}
        self._refused = {key: until for key, until in self._refused.items() if key in jobs}
        wanted = {
            key
            for key, job in jobs.items()
            if key not in self._known
            or self._known[key].size != job.size
            or now - self._known[key].asked >= GPUS_EACH_S
        }
        self._ask({key: jobs[key] for key in wanted}, now)
        if self._doubt(node) and now - self._doubted_at >= DOUBT_EACH_S:
            self._doubted_at = now
            self._ask({key: job for key, job in jobs.items() if key not in wanted}, now)

    def _ask(self, jobs: dict[str, Job], now: float) -> None:
        """What is not answered stays as it was known; a job that was never known stays unknown.

        A job that cannot be asked about costs no other job its answer: the node's record makes its GPUs held.
        """
        wanted = {key: job for key, job in jobs.items() if now >= self._refused.get(key, now)}
        if wanted and self._how == "squeue --json":
            try:
                found = parse_job_gpus(self._run("squeue", "--json", "-a"), self._node)
            except SourceError as exc:
                if not WITHOUT_JSON.search(str(exc)) and "printed more than" not in str(exc):
                    raise
                self._how = "scontrol"
            else:
                for key, job in wanted.items():
                    self._note(key, job, found.get(job.job_id), now)
                return
        for key, job in wanted.items():
            if self._clock.monotonic() - now > self._timeout_s or self._clock.monotonic() >= self._until:
                return  # the rest at the next poll: Slurm is slow, and the source must answer
            try:
                self._note(key, job, self._ask_one(job), now)
            except SourceError as exc:
                if self._how == "scontrol --json" and WITHOUT_JSON.search(str(exc)):
                    self._how = "squeue --json"
                    return self._ask(jobs, now)
                self._refused[key] = now + DOUBT_EACH_S
                log.info("job %s: its GPUs are unknown until Slurm answers: %s", job.job_id, exc)
        return None

    def _ask_one(self, job: Job) -> JobGpus | None:
        """The GPUs of one job, None while they are not known. Raises SourceError."""
        if self._how == "scontrol --json":
            return parse_job_gpus(self._run("scontrol", "show", "job", job.job_id, "--json"), self._node).get(
                job.job_id
            )
        return parse_job_text(self._run("scontrol", "-o", "show", "job", "-d", job.job_id), job.job_id, self._node)

    def _note(self, key: str, job: Job, gpus: JobGpus | None, now: float) -> None:
        if gpus is None:
            self._known.pop(key, None)
        else:
            self._known[key] = _Known(gpus, now, job.size)

    def _answer(self, jobs: dict[str, Job], node: NodeRecord, config: SlurmConfig) -> Answer:
        """Grants of the jobs that the node's own record confirms, and of the GPUs in use that no job explains.

        Raises SourceError where the record cannot say which of the jobs' grants is wrong.
        """
        problems: list[str] = []
        notices: list[str] = []
        held = Counter(index for known in self._known.values() for index in known.gpus.indexes)
        used = set(held) if node.used.unnamed else set(node.used.indexes)
        if node.used.unnamed:
            (surplus,) = self._doubt(node) or (0,)
            if surplus > 0:
                raise SourceError(f"the jobs of node {self._node} have {surplus} GPUs more than the node has in use")
            if surplus < 0:
                problems.append(f"{self._why_hidden(f'{-surplus} GPUs', config)}, so no GPU is called free")
        order = GpuOrder("unknown")
        if used:
            order = read_order(list_places(config, self._node, self._gres_conf), self._node, node, self._vendor)
        if order.kind == "unknown" and used:
            problems.append(f"GPUs in use cannot be resolved: {order.problem}")
        grants: list[Grant] = []
        conflicts = 0
        for key, known in self._known.items():
            holder = self._holder(key, jobs[key], config, known.gpus)
            if known.gpus.unnamed:
                problems.append(
                    f"{holder.label} has {known.gpus.unnamed} GPUs without an index: "
                    "File= in gres.conf must name device files"
                )
            for index in known.gpus.indexes:
                if index in used:
                    grants.append(_grant(index, order, holder, jobs[key].state))
                    continue
                conflicts += 1
                problems.append(f"{holder.label} claims IDX {index}, which node {self._node} does not have in use")
        hidden = sorted(used - held.keys())
        grants += [_grant(index, order, self._hidden(index, config), "") for index in hidden]
        if hidden:
            notices.append(self._why_hidden(f"IDX {', '.join(map(str, hidden))}", config))
        shares = node.used.shares or next((k.gpus.shares for k in self._known.values() if k.gpus.shares), "")
        if shares:
            problems.append(f"{shares} is in use: shards and MPS are not attributed, so no GPU is called free")
        return Answer(
            grants,
            "; ".join(dict.fromkeys(problems)),
            notice="; ".join(notices[:3]),
            conflicts=conflicts,
            hides_users=bool(config.private & {"jobs", "users"}),
        )

    def _holder(self, key: str, job: Job, config: SlurmConfig, gpus: JobGpus) -> Holder:
        return Holder(
            key=HolderKey("slurm", key),
            job_id=job.job_id,
            cluster=config.cluster,
            user=job.user,
            uid=job.uid,
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
        """The job that has this GPU by the node's own record, without its name."""
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

    def _incarnation(self, job: Job, cluster: str) -> str:
        """Cluster, job id, restart count and start: a requeued job is a new holder."""
        return f"{cluster}/{job.job_id}/{job.restarts}/{'' if job.start is None else int(job.start)}"

    def _read_config(self) -> SlurmConfig:
        now = self._clock.monotonic()
        if self._config is None or now - self._config_at >= CONFIG_EACH_S:
            self._config = parse_config(self._run("scontrol", "show", "config"))
            self._config_at = now
            self._how = FIRST_WAY  # Slurm may have been upgraded
        return self._config

    def _run(self, *command: str) -> str:
        left_s = self._until - self._clock.monotonic()
        if left_s <= 0.0:
            raise SourceError(
                f"Slurm takes longer than {POLL_TIMEOUTS * self._timeout_s:g} s for the answers of one poll"
            )
        return self._run_command(command, min(self._timeout_s, left_s))


def _grant(index: int, order: GpuOrder, holder: Holder, state: str) -> Grant:
    """The grant of the GPU at this IDX. Where its order is not proven, only what was resolved before still counts."""
    kind: Literal["minor", "index", "unproven"] = "unproven" if order.kind == "unknown" else order.kind
    device, reason = str(index), order.problem
    if order.kind == "minor":
        device = order.minors[index] if index < len(order.minors) else ""
        if not device:
            kind, reason = "unproven", f"gres.conf names no whole GPU at IDX {index}"
    return Grant(
        kind,
        device,
        holder,
        running=state == "RUNNING",
        why="" if state == "RUNNING" else f"the job is {state}" if state else "held by a job that Slurm does not show",
        number=f"IDX {index}",
        among=order.minors if order.kind == "index" else (),
        total=order.total,
        reason=reason,
    )
