"""`gpu-exporter job`: collects the data of all sources about a job, and prints the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.plain import REASON_MAX, one_line, shorten
from gpu_exporter.common.promql.client import Client
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.jobs.entries import merge_exact, read_exporters, read_records
from gpu_exporter.reports.jobs.history import JobHistory
from gpu_exporter.reports.jobs.model import JobReport, JobRun, SlurmRun, add_slurm, leave_out_others, sort_runs
from gpu_exporter.reports.jobs.names import AskedJob
from gpu_exporter.reports.jobs.render import render_json, render_line, render_text
from gpu_exporter.reports.jobs.sacct import NoRecord, read_record

FORMS = {"text": render_text, "json": render_json, "line": render_line}
NO_TASKS = (
    "without sacct and slurmdbd, tasks and components of less than five minutes are not found by the id of their array "
    "or leader"
)
NEAR_ALL = 0.02  # of the held time: a smaller unknown part needs no reason


class JobSources(NamedTuple):
    """The sources to query.

    - `prometheus`, `client`: None without a PromQL API. `exporters`: addresses of status pages.
    - `is_local`: these addresses are the default, so a missing exporter is no problem. `records`: directory of this
      node's records.
    """

    prometheus: Address | None
    matcher: str
    client: Client
    exporters: Sequence[Address]
    records: Path
    is_local: bool


def report_job(asked: AskedJob, since_s: float, sources: JobSources, form: str) -> int:
    """Prints the report. Returns the exit code: NO_DATA if no source knows the job; PARTIAL if a source failed, or if
    the use was not measured at all.
    """
    now = SYSTEM_CLOCK.wall()
    report, problems = gather(asked, since_s, sources, now)
    for problem in problems:
        print(f"gpu-exporter job: {one_line(problem)}", file=sys.stderr)  # noqa: T201
    if not report.runs:
        known = "; ".join(_asked_of(sources, has_record=report.has_record))
        knows = "the sources that answered know no" if problems else "no"
        text = f"{asked.text}: {knows} run in the last {describe_duration(since_s)}, asked of {known}"
        print(f"gpu-exporter job: {one_line(text)}", file=sys.stderr)  # noqa: T201
        return Exit.NO_DATA
    sys.stdout.write(FORMS[form](report))
    return Exit.PARTIAL if problems or report.use.mean is None else Exit.DONE


def gather(asked: AskedJob, since_s: float, sources: JobSources, now: float) -> tuple[JobReport, list[str]]:
    """Collects the report. Also returns a text for each source that failed."""
    problems: list[str] = []
    record, has_record = _read_slurm(asked, since_s, problems) if asked.number else ([], True)
    asked = asked._replace(raws=frozenset(run.raw for run in record))
    runs: list[JobRun] = []
    if sources.prometheus is not None:
        history = History(sources.prometheus, sources.client)
        try:
            runs = JobHistory(history, sources.matcher, since_s, now).read(asked)
        except AnswerError as exc:
            problems.append(str(exc))
        problems += filter(None, [history.describe_skipped()])
    elif sources.exporters:
        try:
            runs, silent = read_exporters(asked, sources.exporters, sources.client)
            problems += [] if sources.is_local else silent
        except AnswerError as exc:
            problems.append(str(exc))
    records, unread = read_records(asked, sources.records)
    runs, problems = merge_exact(runs, records), problems + unread
    runs = [run for run in runs if run.end >= now - since_s]  # an id may return, after years
    runs = add_slurm(runs, record) if record else sort_runs(runs)
    own = leave_out_others(runs)
    report = JobReport(asked.text, own, now, incomplete=bool(problems), has_record=has_record)
    if others := len(runs) - len(own):
        report.notes.append(f"{others} earlier runs with this id belong to another user, and are not shown")
    report.notes += _explain_unknown(report, record)
    if not has_record and not asked.mark and any("_" in run.name for run in own):
        report.notes.append(f"More tasks may have run: {NO_TASKS}")
    return report, problems


def _read_slurm(asked: AskedJob, since_s: float, problems: list[str]) -> tuple[list[SlurmRun], bool]:
    try:
        return read_record(asked, since_s), True
    except NoRecord:
        return [], False
    except AnswerError as exc:
        problems.append(str(exc))
        return [], True


def _explain_unknown(report: JobReport, record: Sequence[SlurmRun]) -> list[str]:
    """Returns texts about the reasons why a part of the time was not measured."""
    use, notes = report.use, list[str]()
    if not record:
        return notes
    missed = [run for run in report.runs if not run.gpus and run.slurm is not None and run.slurm.gpus]
    if missed:
        nodes = sorted({run.slurm.nodes for run in missed if run.slurm is not None})
        where = f" ({shorten(', '.join(nodes), REASON_MAX)})" if nodes else ""
        notes.append(
            f"{len(missed)} of {len(report.runs)} runs were not measured: they began and ended between two scrapes, or "
            f"their nodes had no exporter. The records of their nodes{where} have runs that ended there: run "
            f"`gpu-exporter job` on the node"
        )
    late = sum(run.use.held_s - run.use.measured_s for run in report.runs if run.gpus and not run.is_running)
    if late > NEAR_ALL * use.held_s:
        notes.append(
            f"Slurm counts {describe_duration(late)} of GPU time more than the last readings: the time after the last "
            "scrape of each run is only in the records of its nodes"
        )
    return notes


def _asked_of(sources: JobSources, *, has_record: bool) -> list[str]:
    places = [sources.prometheus] if sources.prometheus is not None else sources.exporters[:3]
    return [*map(str, places), f"the records in {sources.records}", "sacct" if has_record else NO_TASKS]
