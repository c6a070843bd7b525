"""Writes a record of each ended job: its last values as one line of JSON, which the job's user may read.

The series of a job end with the last scrape, and a job of a few seconds may have none. A line has the format of
`allocations` on the status page. Each user has one file. An access control list lets the user read it, because the
owner of a file can grant access without a privilege (acl(5)). On a file system without access control lists, only the
exporter's user can read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, HolderAccount
from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.common.files import PRIVATE, read_kept, write_atomically
from gpu_exporter.common.model.holders import Allocation, AllocationId, HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.outside import whole

log = logging.getLogger(__name__)
RUNS_MAX = 100  # of one user; a run on eight GPUs has 3 kB
USERS_MAX = 200  # the file that was written longest ago is removed
WAITING_MAX = 1000  # runs that wait for a slow disk
FILE_MAX = 8 * 2**20  # bytes: 100 runs on 56 instances
UID_MAX = 2**32 - 2  # of Linux
SEARCHABLE = 0o711  # others may open the file that they know, and list nothing


class EndedRun(NamedTuple):
    """The record of one run. `uid`: the job's user, "" if unknown."""

    uid: str
    line: str


@dataclass(slots=True)
class _Ending:
    """The last values of one holder on one unit. `memory_max`: the most memory in use at any poll, None if shared."""

    allocation: Allocation
    account: HolderAccount
    about: dict[str, Any]
    memory_max: float | None = None


class EndedJobs:
    """Follows Slurm's jobs until the ledger has booked their last readings. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[AllocationId, _Ending] = {}
        self._done: deque[EndedRun] = deque(maxlen=WAITING_MAX)

    def follow(
        self,
        ledger: Ledger,
        entries: Iterable[ConfirmedAllocation],
        answered: Mapping[str, DeviceSnapshot],
        now: float,
        wall: float,
    ) -> None:
        """Updates the jobs from the holders of a poll (`entries`). Ends the jobs that the ledger no longer charges."""
        for entry in entries:
            unit, holder = entry.allocation.unit, entry.allocation.holder
            found = ledger.holdings.get((unit, holder.key))
            if found is None or not holder.job_id or holder.identity or holder.key.scheduler != "slurm":
                continue
            last = self._last.get((unit, holder.key)) or _Ending(entry.allocation, found.account, {})
            last.allocation, last.account = entry.allocation, found.account
            if (snapshot := answered.get(unit.uuid)) is not None:
                _look(last, snapshot)
            self._last[unit, holder.key] = last
        self._end(ledger, now, wall)

    def _end(self, ledger: Ledger, now: float, wall: float, *, at_once: bool = False) -> None:
        over: dict[HolderKey, list[_Ending]] = {}
        charged = {HolderPresence.PRESENT} if at_once else {HolderPresence.PRESENT, HolderPresence.LEAVING}
        for holder_id in list(self._last):
            found = ledger.holdings.get(holder_id)
            if found is None or found.presence not in charged:
                over.setdefault(holder_id[1], []).append(self._last.pop(holder_id))
        for units in over.values():
            end = wall - (now - max(each.account.confirmed for each in units))
            record = {"end_timestamp_seconds": round(end, 3), "allocations": [_describe(each) for each in units]}
            line = json.dumps(record, separators=(",", ":"))
            self._done.append(EndedRun(units[0].allocation.holder.uid, line))

    def take(self, ledger: Ledger, now: float, wall: float, *, at_once: bool) -> list[EndedRun]:
        """Returns the runs that ended since the last call. `at_once`: also runs for which readings may still arrive."""
        if at_once:
            self._end(ledger, now, wall, at_once=True)
        taken = list(self._done)
        self._done.clear()
        return taken


def _look(last: _Ending, snapshot: DeviceSnapshot) -> None:
    """Updates name, memory in use and total memory of the unit from a snapshot."""
    unit, facts, identity = last.allocation.unit, snapshot.facts, snapshot.identity
    last.about = {"gpu": identity.index, "name": identity.name}
    used, total = facts.memory_used_bytes, facts.memory_total_bytes
    if unit.mig_uuid:
        instance = next((each for each in snapshot.instances if each.uuid == unit.mig_uuid), None)
        values = {} if instance is None else {sample.family.name: sample.value for sample in instance.samples}
        last.about["mig"] = "" if instance is None else instance.mig
        used, total = (values.get(f"gpu_mig_memory_{name}_bytes") for name in ("used", "total"))
    last.about["memory_total_bytes"] = total
    if used is not None and not last.allocation.is_shared:
        last.memory_max = max(used, last.memory_max or 0.0)


def _describe(last: _Ending) -> dict[str, Any]:
    """Returns the allocation in the format of the status page."""
    unit, holder, account = last.allocation.unit, last.allocation.holder, last.account
    names = ("job_id", "array_job_id", "array_task_id", "het_job_id", "het_job_offset", "account", "partition", "qos")
    sums = ("held", "observed", "busy", "idle", "stalled")
    return {
        "scheduler": holder.key.scheduler,
        **{name: text for name in names if (text := getattr(holder, name))},
        "uuid": unit.uuid,
        "mig_uuid": unit.mig_uuid,
        **last.about,
        "start_timestamp_seconds": round(account.start_wall, 3),
        **{f"{name}_seconds": round(getattr(account, f"{name}_s"), 3) for name in sums},
        "energy_joules": account.energy_j,
        "memory_max_bytes": last.memory_max,
    }


class JobRecords:
    """The directory with a file for each user. Written by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._warned = False

    def write(self, runs: Iterable[EndedRun]) -> None:
        """Appends these runs to the files of their users. Logs a failure once, until a write succeeds."""
        by_user: dict[int, list[str]] = {}
        for run in runs:
            by_user.setdefault(whole(run.uid, UID_MAX) or 0, []).append(run.line)
        for uid, lines in by_user.items():
            try:
                self._append(uid, lines)
                self._warned = False
            except OSError as exc:
                if not self._warned:
                    log.warning("%s: %s; records of ended jobs are lost", self._directory, exc)
                self._warned = True

    def _append(self, uid: int, lines: list[str]) -> None:
        self._directory.mkdir(exist_ok=True)
        self._directory.chmod(SEARCHABLE)  # regardless of the umask
        path = self._directory / f"{uid}.jsonl"
        before: list[str] = []
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            before = read_kept(path, FILE_MAX).decode().splitlines()
        kept = [*before, *lines][-RUNS_MAX:]
        write_atomically(path, "".join(f"{line}\n" for line in kept).encode(), PRIVATE, reader=uid)
        if not before:
            for old in self._oldest():
                old.unlink(missing_ok=True)

    def _oldest(self) -> Iterator[Path]:
        files = sorted(self._directory.glob("[0-9]*.jsonl"), key=lambda path: path.stat().st_mtime)
        yield from files[:-USERS_MAX]
