"""`gpu-exporter job` about simulated jobs in a real Prometheus: its numbers are those of the truth, and its text fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.promql.client import Client
from gpu_exporter.reports.jobs import run as job_run
from gpu_exporter.reports.jobs.model import JobReport, SlurmRun
from gpu_exporter.reports.jobs.names import AskedJob, parse_name
from gpu_exporter.reports.jobs.render import render_json, render_line, render_text
from gpu_exporter.reports.jobs.run import JobSources, gather
from gpu_exporter.reports.jobs.sacct import NoRecord
from tests.testbed.history import HOUR
from tests.testbed.history_servers import prometheus, write_blocks
from tests.testbed.history_worlds import END
from tests.testbed.job_series import Run, put_board, put_run
from tests.testbed.processes import Processes, run_exporter
from tests.testbed.site_series import ZERO, Site, pulses, steady

pytestmark = pytest.mark.servers
EXACT = 0.02
WEEK = 7 * 86400.0
OWN = {"user": "erin", "account": "chem", "partition": "gpu"}
QUARTER = pulses(3600, 900)
START = END - 24 * HOUR


class Truth(NamedTuple):
    """GPU-hours of a job: held, used, idle and unknown, and the number of its runs."""

    held: float
    used: float
    idle: float = 0.0
    unknown: float = 0.0
    runs: int = 1


TRUTH = {
    "104": Truth(16.0, 3.0, 13.0),  # runs
    "105": Truth(2.0, 0.2),  # ended
    "55": Truth(6.95, 3.6 + 2.36, runs=2),  # requeued on another node
    "56": Truth(6.95, 3.6 + 1.56, unknown=1.0, runs=2),  # requeued on the same GPU, an hour was not read
    "249": Truth(8.0, sum(0.16 * i / 60 for i in range(50) if i % 7), 8 * 0.16, runs=50),
    "249_3": Truth(0.16, 0.16 * 3 / 60),
    "300": Truth(112.0, 12 * 7 * 0.85 + 4 * 7 * 0.2),
    "400": Truth(4.0, 1.8, runs=2),  # both components
    "400+1": Truth(2.0, 1.4),
    "ml/fit-1": Truth(0.9, 0.09),
    "ml/fit": Truth(2.7, 0.27, 0.9, runs=3),  # the owner of the pods
}


def fill(site: Site) -> None:
    """Adds these jobs on four nodes of four GPUs, and another cluster with a job of the same id."""
    for gpu in range(16):
        put_board(site, f"n{gpu // 4}", gpu)
    for gpu in range(4):
        busy, states, causes = QUARTER, [("low", 20, 22), ("bursty", 22, 24.01)], [("too_few_workers", 20.5, 23)]
        if gpu == 3:
            busy, states, causes = ZERO, [("held_no_process", 20, 24.01)], []
        put_run(site, Run("104", "n0", gpu, 20, 24.01, busy, states=states, causes=causes, labels=OWN))
    for gpu in range(2):
        put_run(site, Run("105", "n3", 12 + gpu, 20, 21, steady(0.1), labels=OWN))
    put_run(site, Run("55", "n1", 4, 1, 5, steady(0.9), labels=OWN))
    put_run(site, Run("55", "n2", 8, 5.05, 8, steady(0.8), labels=OWN))
    put_run(site, Run("56", "n1", 5, 1, 5, steady(0.9), labels=OWN))
    put_run(site, Run("56", "n1", 5, 5.05, 8, steady(0.8), missed=((6, 7),), labels=OWN))
    for task in range(50):
        begin, load = 2 + 0.2 * task, steady(task / 60) if task % 7 else ZERO
        labels = {**OWN, "array_job_id": "249", "array_task_id": str(task)}
        put_run(
            site, Run(str(200 + task), f"n{task % 4}", 4 * (task % 4) + 2, begin, begin + 0.16, load, labels=labels)
        )
    for gpu in range(16):
        put_run(site, Run("300", f"n{gpu // 4}", gpu, 12, 19, steady(0.2 if gpu // 4 == 2 else 0.85), labels=OWN))
    for part in range(2):
        labels = {**OWN, "het_job_id": "400", "het_job_offset": str(part)}
        put_run(site, Run(str(400 + part), f"n{part}", 4 * part + 3, 9, 11, steady(0.5 * part + 0.2), labels=labels))
    for pod in range(3):
        labels = {"namespace": "ml", "pod": f"fit-{pod}", "container": "main"}
        put_run(site, Run("", "n3", 13, 14 + pod, 14.9 + pod, steady(0.1 * pod), labels=labels))
        owner = {"namespace": "ml", "pod": f"fit-{pod}", "workload": "fit", "workload_type": "Job"}
        site.add("allocation:owner:info", 1.0, 14 + pod, 14.9 + pod, **owner)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("job")
    site, other = Site(24, interval=15), Site(24, cluster="other", interval=15)
    fill(site)
    put_run(other, Run("700", "n0", 40, 1, 2, steady(0.5), labels=OWN))
    put_run(site, Run("700", "n0", 0, 1, 2, steady(0.5), labels=OWN))
    write_blocks(folder, site.lines, other.lines)
    with Processes(folder) as processes:
        yield prometheus(processes, folder).url


def ask(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch, record: list[SlurmRun] | None = None, matcher: str = ""
) -> tuple[JobReport, list[str]]:
    """The report at the end of the history."""

    def read_record(asked: AskedJob, since: float) -> list[SlurmRun]:
        if record is None:
            raise NoRecord("sacct is not on PATH")
        return record

    monkeypatch.setattr(job_run, "read_record", read_record)
    matcher = ",".join(filter(None, ('job="gpu-exporter"', matcher)))
    sources = JobSources(parse_address(url), matcher, Client(), [], Path("/nonexistent"), is_local=False)
    asked = parse_name(name)
    assert asked is not None
    return gather(asked, WEEK, sources, END)


@pytest.mark.parametrize("name", TRUTH)
def test_a_report_is_true_within_two_percent(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, problems = ask(url, name, monkeypatch)
    truth, use = TRUTH[name], report.use
    assert problems == []
    assert len(report.runs) == truth.runs
    scrape = len(report.gpus) * 15 / 3600  # the last one of each GPU may be that much before the end
    for hours, seconds in (
        (truth.held, use.held_s), (truth.used, use.busy_s), (truth.idle, use.idle_s), (truth.unknown, use.unknown_s),
    ):  # fmt: skip
        assert seconds / 3600 == pytest.approx(hours, rel=EXACT, abs=1.1 * scrape)
    assert use.energy_j is not None
    known = truth.held - truth.unknown
    assert use.energy_j / 3600 == pytest.approx(100 * known + 500 * truth.used, rel=EXACT, abs=700 * scrape)
    assert all(gpu.memory_max == 20 * 2**30 and gpu.memory_total == 80 * 2**30 for gpu in report.gpus)
    assert [run.is_running for run in report.runs] == [name == "104"] * truth.runs


def test_the_texts_are_those_of_the_golden_files_and_fit_into_80_columns(
    url: str, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    reports = [ask(url, name, monkeypatch)[0] for name in TRUTH]
    text = "\n".join(map(render_text, reports))
    assert max(map(len, text.splitlines())) <= 80
    golden("job.txt", text)
    golden("job.lines.txt", "".join(map(render_line, reports)))
    golden("job.json", render_json(reports[1]))


def slurm(raw: str, start: float, hours: float, gpus: float, state: str = "COMPLETED") -> SlurmRun:
    begin = START + start * HOUR
    end = None if state == "RUNNING" else begin + hours * HOUR
    return SlurmRun(raw, raw, "erin", "chem", "gpu", "", state, "0:0", begin, end, hours * HOUR, 8 * HOUR, gpus, "n1")


def test_slurms_record_has_the_hours_and_what_nobody_measured_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of three seconds between two scrapes, and the last seconds of the others."""
    record = [slurm("56", 1, 4.1, 1), slurm("56", 5.02, 3 / 3600, 1, "REQUEUED"), slurm("56", 5.05, 3, 1)]
    report, _ = ask(url, "56", monkeypatch, record)
    first, short, last = report.runs
    assert report.use.held_s == pytest.approx(7.1 * HOUR + 3)
    assert (short.gpus, short.use.mean, short.use.unknown_s) == ([], None, 3.0)
    assert first.use.unknown_s / HOUR == pytest.approx(0.1, abs=0.01)
    assert last.use.unknown_s / HOUR == pytest.approx(1.05, abs=0.01)
    assert report.use.idle_s == 0.0
    assert "1 of 3 runs were not measured" in report.notes[0]
    assert "more than the last readings" in report.notes[1]


def test_without_slurms_record_an_array_may_have_more_tasks(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "without sacct and slurmdbd, tasks and components of less than five minutes are not found by"
    notes = {name: " ".join(ask(url, name, monkeypatch)[0].notes) for name in ("249", "249_3", "104")}
    assert {name: text in note for name, note in notes.items()} == {"249": True, "249_3": False, "104": False}
    sources = JobSources(parse_address(url), "", Client(), [], Path("/nonexistent"), is_local=False)
    assert job_run.report_job(AskedJob("77"), WEEK, sources, "text") == Exit.NO_DATA
    assert text in capsys.readouterr().err


def test_the_time_limit_that_is_left_is_in_the_text(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = ask(url, "104", monkeypatch, [slurm("104", 20, 4, 4, "RUNNING")])
    assert "4h of 8h, 4h left, RUNNING" in render_text(report)


def test_jobs_of_two_clusters_are_not_mixed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, problems = ask(url, "700", monkeypatch)
    assert report.runs == []
    assert 'several clusters have job 700: choose one with --source.matcher: cluster="", cluster="other"' in problems[0]
    report, problems = ask(url, "700", monkeypatch, matcher='cluster="other"')
    assert problems == [] and report.use.held_s / HOUR == pytest.approx(1.0, abs=0.01)


def test_the_exit_code_tells_found_from_not_found_and_from_no_answer(url: str, tmp_path: Path) -> None:
    """The command itself: the history is older than a week, so it needs a longer one."""

    def run(name: str, address: str, *flags: str) -> tuple[int, str, str]:
        done = run_exporter("job", name, f"--source.prometheus={address}", f"--records={tmp_path}", *flags)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run("104", url)
    assert (code, out) == (Exit.NO_DATA, "")
    assert "no run in the last 7d, asked of" in err
    code, out, err = run("104", "http://127.0.0.1:9")
    assert (code, out) == (Exit.NO_DATA, "")
    assert "Connection refused" in err and "the sources that answered know no run in the last 7d" in err
