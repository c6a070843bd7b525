"""Reads Slurm's record of a job: state, times, time limit and GPUs of each run. sacct may hide the jobs of other users
(PrivateData).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from gpu_exporter.common import commands
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB
from gpu_exporter.common.outside import WHOLE_MAX, need_whole, real, whole
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.slurm.commands import run as run_slurm
from gpu_exporter.reports.jobs.model import SlurmRun
from gpu_exporter.reports.jobs.names import AskedJob

WITHIN_S = 30.0
MOST_BYTES = 16 * MIB  # a run has 200 bytes; the largest array has 4 million tasks, and is refused
PART_S = 6 * 3600.0  # of a period that is read at once: 300,000 runs in PART_BYTES
PART_WITHIN_S, PART_BYTES = 120.0, 64 * MIB
FIELDS = (
    *("JobIDRaw", "JobID", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Start", "End", "ElapsedRaw"),
    *("TimelimitRaw", "AllocTRES", "NodeList"),
)
GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?:,|$)")
TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=([0-9]{1,9})")
NO_DATE = ("Unknown", "None", "0", "")  # the start of a job that has not begun
BORDER_S = 2.0  # the times of two calls of sacct differ by less; a requeued job waits longer (cred_expire)
ROWS_MAX = 20_000
TEXT_MAX = 64
LISTS = {"AllocTRES": 4096, "NodeList": 4096}  # characters of lists; a job of 400 nodes with odd names has 4,000


def read_record(asked: AskedJob, since_s: float) -> list[SlurmRun]:
    """Returns the job's runs of the last `since_s` seconds. Raises AnswerError, and its subclass NoRecord if this host
    has no record.
    """
    chosen = f"{asked.number}{asked.mark}{asked.part}"
    text = _ask(["-j", chosen, f"--starttime=now-{since_s:.0f}"], WITHIN_S, MOST_BYTES)
    return parse_record(text)


class Period:
    """Reads the runs of all users from `start` to `end` (Unix seconds). sacct may hide the runs of other users."""

    def __init__(self, start: float, end: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.start, self.end = start, end
        self.unread = 0  # lines of sacct that cannot be read
        self._clock = clock

    def read(self) -> Iterator[tuple[SlurmRun, bool]]:
        """Yields each run once for each part of the period in which it ran, with its time in this part. The second
        value is true at the first part of a run. Raises AnswerError, and NoRecord as read_record does.
        """
        start, before = self.start, set[tuple[str, float, str]]()
        while start < self.end:
            end, now, going = min(self.end, start + PART_S), self._clock.wall(), set[tuple[str, float, str]]()
            period = [f"--starttime=now-{now - start:.0f}", f"--endtime=now-{max(0.0, now - end):.0f}"]
            text = _ask([*period, "--truncate", "--allusers", "--local"], PART_WITHIN_S, PART_BYTES)
            for line in text.splitlines():
                try:
                    run = _parse(line)
                except ValueError:
                    self.unread += 1
                    continue
                if run is not None:
                    key = run.raw, run.gpus, run.nodes
                    yield run, key not in before or run.start > start + BORDER_S
                    if run.end is None or run.end >= end - BORDER_S:
                        going.add(key)
            start, before = end, going


def _ask(chosen: Iterable[str], within_s: float, most_bytes: int) -> str:
    command = ["sacct", *chosen, "--allocations", "--duplicates", "--parsable2", "--noheader"]
    try:
        done = run_slurm([*command, f"--format={','.join(FIELDS)}"], within_s, most_bytes)
    except commands.NotFound as exc:
        raise NoRecord(str(exc)) from exc
    except commands.CommandError as exc:
        raise AnswerError(str(exc)) from exc
    if done.status != 0:
        kind = NoRecord if "accounting storage is disabled" in done.reason else AnswerError
        raise kind(f"sacct: {done.reason}")
    return done.out


class NoRecord(AnswerError):
    """This host has no sacct, or its Slurm has no slurmdbd."""


def parse_record(text: str) -> list[SlurmRun]:
    """Parses the output of sacct. Omits jobs that have not started, and lines that cannot be parsed."""
    found: list[SlurmRun] = []
    for line in text.splitlines()[:ROWS_MAX]:
        with suppress(ValueError):
            found += [run] if (run := _parse(line)) is not None else []
    return found


def _parse(line: str) -> SlurmRun | None:
    """Parses one line. None for a job that has not started. Raises ValueError."""
    values = line.split("|")
    if len(values) != len(FIELDS):
        raise ValueError(f"{len(values)} fields instead of {len(FIELDS)}")
    fields = {name: one_line(value, LISTS.get(name, TEXT_MAX)) for name, value in zip(FIELDS, values, strict=True)}
    raw, elapsed = need_whole(fields["JobIDRaw"]), need_whole(fields["ElapsedRaw"])
    if fields["Start"] in NO_DATE:
        if elapsed:
            raise ValueError("the run has an elapsed time, but no start time")
        return None
    start, end = need_whole(fields["Start"]), whole(fields["End"], WHOLE_MAX)
    limit = real(fields["TimelimitRaw"])
    count = GPUS.search(fields["AllocTRES"])
    counts = [int(count[1])] if count else [int(each) for each in TYPED.findall(fields["AllocTRES"])]
    return SlurmRun(
        str(raw),
        fields["JobID"],
        fields["User"],
        fields["Account"],
        fields["Partition"],
        fields["QOS"],
        fields["State"].partition(" ")[0],  # "CANCELLED by 1000"
        fields["ExitCode"],
        start + 0.0,
        end + 0.0 if end else None,
        elapsed + 0.0,
        None if limit is None else 60.0 * limit,
        sum(counts) + 0.0,
        fields["NodeList"],
    )
