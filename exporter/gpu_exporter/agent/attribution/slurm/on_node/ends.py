"""Lists each end of a job once, also if the job ended while the exporter did not run.

The epilog's files contain the last jobs. The state file contains the runs whose end was reported, together with the
counters that include them. So after a restart, each other run is reported: it ended in the meantime. Without a state
file of this boot, these runs are missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.on_node.job_files import ENDED, EndedJob, Stamp, number_of, read_ended
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import PastEnds
from gpu_exporter.common.outside import WHOLE_MAX, whole

TOLD_MAX = 1024  # ended runs to remember; the epilog keeps 256
FIRST = 1_000_000_001  # the first number of the epilog's files
# The epilog writes its file within this time after the end. If an unreported end seems older, the clock was set.
LATE_S = 60.0
Recall = Callable[[], "PastEnds | None"]
log = logging.getLogger(__name__)


class NewEnds(NamedTuple):
    """The ends since the last read, and the number of jobs whose end was not seen.

    `notice`: why the epilog's files are not read, "" if they are.
    """

    ended: tuple[EndedJob, ...] = ()
    missed: int = 0
    notice: str = ""


class JobEnds:
    """Remembers the reported ends. Not thread-safe."""

    def __init__(self, place: Path, clock: Clock, recall: Recall | None) -> None:
        """`place`: the directory of the prolog's files.

        `recall`: returns the reports in the state file, or None without a state file of this boot. If `recall` is None,
        ends before the start do not count.
        """
        self._place = place
        self._clock = clock
        self._recall = recall
        self._stamps: dict[str, Stamp] = {}
        self._told: dict[str, int] = {}  # number of the epilog's file, by run, the newest last
        self._highest = 0  # number of the newest file
        self._odd: list[str] = []  # files that could not be read, until they are counted
        self._notice = ""
        self._before: list[EndedJob] | None = self._look()  # until the first read

    @property
    def reported(self) -> tuple[str, ...]:
        """Every reported run, for the state file."""
        return tuple(f"{number}/{run}" for run, number in self._told.items())

    def read(self) -> NewEnds:
        """Returns each new end once, in order of time."""
        ended: list[EndedJob] = []
        missed = 0
        if self._before is not None:
            ended, missed = self._compare(self._before)
            self._before = None
        ended += self._add(self._look())
        missed += self._count_odd() + self._count_removed()
        return NewEnds(tuple(sorted(ended, key=lambda job: (job.end_wall, job.number))), missed, self._notice)

    def add(self, job: EndedJob) -> bool:
        """Records an end without a file of the epilog. Returns False if the end was already reported.

        Once the epilog has written its file, `read` returns the job again.
        """
        return bool(self._add([job]))

    def _compare(self, before: Sequence[EndedJob]) -> tuple[list[EndedJob], int]:
        """Returns the jobs that ended while the exporter did not run, and the number of such jobs that are missed."""
        past = self._recall() if self._recall is not None else None
        if past is None:
            self._highest = max(map(number_of, self._stamps), default=0)
            new = self._add(before)
            if self._recall is None:
                self._odd.clear()
                return [], 0
            return [], _count(new)
        for text in past.reported:
            number, _, run = text.partition("/")
            self._told[run] = whole(number, WHOLE_MAX) or 0
        self._highest = max((FIRST - 1, *self._told.values()))
        new = self._add(before)
        oldest = self._clock.wall() - (self._clock.monotonic() - past.polled) - LATE_S
        dated = [job for job in new if job.end_wall >= oldest]
        return dated, _count(new) - _count(dated)

    def _look(self) -> list[EndedJob]:
        """Returns the jobs in new or changed files of the epilog."""
        self._notice = ""
        try:
            found, self._stamps, odd = read_ended(self._place, self._stamps)
        except SourceError as exc:
            self._notice = f"{exc}; the hours of jobs shorter than a poll are missing"
            return []
        for name, why in odd.items():
            log.warning(
                "%s/%s/%s: %s; the hours of this job are unknown, and it counts as missed",
                self._place,
                ENDED,
                name,
                why,
            )
        self._odd += odd
        return found

    def _add(self, found: Sequence[EndedJob]) -> list[EndedJob]:
        """Returns the jobs whose end was not reported before. A chmod or a clock change makes no new end.

        If an end was reported without a file, because the epilog was slow, the epilog's later file has the exact end.
        """
        new: dict[str, EndedJob] = {}
        for job in found:
            if job.run not in self._told or (job.number and not self._told[job.run]):
                new[job.run] = job._replace(is_again=job.run in self._told)
        self._tell({job.run: job.number for job in new.values()})
        return list(new.values())

    def _tell(self, new: Mapping[str, int]) -> None:
        self._told |= new
        for run in list(self._told)[:-TOLD_MAX]:
            del self._told[run]

    def _count_odd(self) -> int:
        """Returns the number of files that could not be read, each once, also over restarts."""
        new = {name: number_of(name) for name in self._odd if name not in self._told}
        self._odd.clear()
        self._tell(new)
        return len(new)

    def _count_removed(self) -> int:
        """Returns how many files the epilog has removed before the exporter could read them."""
        numbers = [number for name in self._stamps if (number := number_of(name))]
        if not numbers:
            return 0
        removed = max(0, min(numbers) - self._highest - 1) if self._highest else 0
        self._highest = max(self._highest, *numbers)
        return removed


def _count(jobs: Iterable[EndedJob]) -> int:
    return sum(bool(job.file.indexes or job.file.uuids) and not job.is_again for job in jobs)
