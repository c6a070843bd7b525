"""The hours of an account by Slurm's record and on the nodes: each reason explains what it can, and no more."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.common import commands
from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reports.accounting import compare as accounting
from gpu_exporter.reports.accounting.reasons import EPILOG_S, AccountTime, SeenNodes
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.jobs import sacct
from gpu_exporter.reports.jobs.model import SlurmRun
from gpu_exporter.reports.jobs.sacct import PART_S
from gpu_exporter.reports.usage.model import GpuHours, UsageReport, Who

START = 1_800_000_000.0
RUN = SlurmRun(
    "7", "7", "erin", "chem", "gpu", "", "COMPLETED", "0:0", START, START + 100.0, 100.0, None, 2.0, "n[1-2]"
)


def reasons_of(held: float, *runs: SlurmRun, unseen: float = 0.0, parts: float = 0.0) -> dict[str, float]:
    """The reasons with a value, in whole GPU-seconds."""
    account = AccountTime(held=held, parts=parts)
    for run in runs:
        account.add(run, unseen)
    assert sum(reason.gpu_seconds for reason in account.reasons()) == pytest.approx(account.difference)
    assert max(len(reason.text) for reason in account.reasons()) <= 57, "with an account of 8 letters, a line has 80"
    return {reason.name: round(reason.gpu_seconds) for reason in account.reasons() if abs(reason.gpu_seconds) >= 0.5}


@pytest.mark.parametrize(
    ("held", "run", "unseen", "parts", "reasons"),
    [
        (200.0, RUN, 0.0, 0.0, {}),
        (202.0, RUN, 0.0, 0.0, {"whole_seconds": 2}),
        (198.0, RUN, 0.0, 0.0, {"whole_seconds": -2}),
        (260.0, RUN._replace(end=START + 130.0), 0.0, 0.0, {"suspended": 60}),
        (100.0, RUN, 0.5, 0.0, {"unseen": -100}),
        (0.0, RUN._replace(end=START + 130.0), 1.0, 0.0, {"suspended": 60, "unseen": -260}),
        (29.0, RUN, 0.0, -171.0, {"parts": -171}),
        (208.0, RUN, 0.0, 0.0, {"whole_seconds": 3, "epilog": 5}),
        (240.0, RUN, 0.0, 0.0, {"whole_seconds": 3, "epilog": 10, "rest": 27}),
        (150.0, RUN, 0.0, 0.0, {"whole_seconds": -3, "rest": -47}),
        (0.0, RUN._replace(gpus=0.0), 0.0, 0.0, {}),
    ],
)
def test_each_reason_has_its_part_of_the_difference(
    held: float, run: SlurmRun, unseen: float, parts: float, reasons: dict[str, int]
) -> None:
    assert reasons_of(held, run, unseen=unseen, parts=parts) == reasons


@given(st.floats(0.0, 1e9), st.lists(st.tuples(st.integers(0, 64), st.integers(0, 10**6)), max_size=20))
def test_dates_and_epilogs_explain_no_more_than_they_can(held: float, runs: list[tuple[int, int]]) -> None:
    account = AccountTime(held=held)
    for gpus, elapsed in runs:
        account.add(RUN._replace(gpus=float(gpus), elapsed_s=float(elapsed), end=START + elapsed), 0.0)
    reasons = {reason.name: reason.gpu_seconds for reason in account.reasons()}
    assert 0.0 <= reasons["epilog"] <= EPILOG_S * account.gpus
    assert abs(reasons["whole_seconds"]) <= 1.5 * account.gpus
    assert sum(reasons.values()) == pytest.approx(account.difference, abs=1e-3)


@pytest.mark.parametrize(
    ("seen", "nodes", "unseen"),
    [
        ({"n1": (0.0, 1e12), "n2": (0.0, 1e12)}, "n[1-2]", 0.0),
        ({"n1.example.org": (0.0, 1e12)}, "n[1-2]", 0.5),
        ({"n1": (START + 40.0, 1e12), "n2": (0.0, START + 80.0)}, "n[1-2]", 0.3),  # first installed, and died
        ({"n1": (START + 200.0, 1e12)}, "n1", 1.0),
        ({"n1": (0.0, 1e12)}, "n[1-", 0.0),
    ],
)
def test_time_on_a_node_without_an_exporter_is_unseen(
    seen: dict[str, tuple[float, float]], nodes: str, unseen: float
) -> None:
    assert SeenNodes(seen).unseen(RUN._replace(nodes=nodes)) == pytest.approx(unseen)


NO_SERVER = History(parse_address("http://127.0.0.1:1"), lambda *_: "")


class Sacct:
    """Answers one part of a period after the other, each after `takes_s`. Later parts are empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *parts: list[SlurmRun | str], takes_s: float = 0.0) -> None:
        self.clock = ManualClock(wall=START + 3 * PART_S)
        self.asked: list[tuple[float, float]] = []
        self._parts, self._takes_s = iter(parts), takes_s
        monkeypatch.setattr(sacct, "run_slurm", self._run)

    def _run(self, command: Sequence[str], within_s: float, most_bytes: int) -> commands.Done:
        assert {"--truncate", "--allusers", "--local"} <= set(command)
        ago = {word.partition("=now-")[0]: float(word.partition("=now-")[2]) for word in command if "=now-" in word}
        now = self.clock.wall()
        self.asked.append((now - ago["--starttime"], now - ago["--endtime"]))
        self.clock.advance(self._takes_s)
        lines = (line if isinstance(line, str) else text_of(line) for line in next(self._parts, []))
        return commands.Done(0, "".join(f"{line}\n" for line in lines), "")

    def compare(self, report: UsageReport) -> accounting.AccountHours:
        return accounting.compare(report, NO_SERVER, "", is_own=False, clock=self.clock)


def text_of(run: SlurmRun) -> str:
    end = "Unknown" if run.end is None else f"{run.end:.0f}"
    times = f"{run.start:.0f}|{end}|{run.elapsed_s:.0f}|60"
    owner = f"{run.user}|{run.account}|{run.partition}|{run.qos}"
    return f"{run.raw}|{run.name}|{owner}|{run.state}|0:0|{times}|gres/gpu={run.gpus:.0f}|{run.nodes}"


def held_by(held: float, length_s: float = 3600.0, account: str = "chem") -> UsageReport:
    report = UsageReport(START, START + length_s)
    report.lines[Who(scheduler="slurm", account=account)] = GpuHours(held=held / 3600.0)
    return report


def test_a_run_in_several_parts_of_the_period_counts_once_and_a_second_run_of_the_job_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = RUN._replace(gpus=1.0, end=START + PART_S, elapsed_s=PART_S)
    again = whole._replace(
        start=START + PART_S + 1.0, end=START + 2 * PART_S, elapsed_s=PART_S - 1.0
    )  # one second late
    requeued = whole._replace(start=START + 2 * PART_S + 300.0, end=START + 3 * PART_S, elapsed_s=PART_S - 300.0)
    found = Sacct(monkeypatch, [whole], [again], [requeued]).compare(held_by(3 * PART_S - 301.0, 3 * PART_S))
    assert (found.total.runs, found.total.gpus, found.total.recorded) == (2, 2.0, 3 * PART_S - 301.0)


def test_a_run_that_was_suspended_for_a_whole_part_of_the_period_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    first = RUN._replace(gpus=1.0, end=START + PART_S, elapsed_s=PART_S)
    stopped = first._replace(start=START + PART_S, end=START + 2 * PART_S, elapsed_s=0.0, state="SUSPENDED")
    found = Sacct(monkeypatch, [first], [stopped]).compare(held_by(2 * PART_S, 2 * PART_S))
    assert (found.total.suspended, found.total.reasons()[-1].gpu_seconds) == (PART_S, 0.0)


def test_the_parts_of_a_period_have_no_gap_while_sacct_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Sacct(monkeypatch, [RUN], takes_s=90.0)
    source.compare(held_by(1.0, 2.5 * PART_S))
    assert source.asked == [(START + at * PART_S, START + min(at + 1, 2.5) * PART_S) for at in range(3)]


@pytest.mark.parametrize(
    "odd", [text_of(RUN)[:-30], text_of(RUN._replace(account="a|b")), text_of(RUN).replace("18", "2026-11-18")]
)
def test_lines_of_sacct_that_cannot_be_read_are_named(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = RUN._replace(raw="8", user="bob")
    for more, notes in (([], []), ([odd], ["1 lines of sacct cannot be read"])):
        found = Sacct(monkeypatch, [RUN, *more, other]).compare(held_by(400.0))
        assert [note[:31] for note in found.notes] == notes
    with pytest.raises(AnswerError, match="0 runs in this period; 1 lines of sacct cannot be read"):
        Sacct(monkeypatch, [odd]).compare(held_by(200.0))


def test_a_job_of_an_exporter_without_accounts_has_the_account_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Sacct(monkeypatch, [RUN, RUN._replace(raw="8", account="phys", gpus=1.0)])
    usage = UsageReport(START, START + 3600.0)
    for job, seconds in (("7", 180.0), ("8", 100.0), ("9", 5.0)):
        usage.lines[Who(scheduler="slurm", holder=f"job {job}")] = GpuHours(held=seconds / 3600.0)
    usage.lines[Who(scheduler="kubernetes", namespace="ml", holder="ml/train")] = GpuHours(held=1.0)
    accounts = source.compare(usage).accounts
    found = {account: (time.recorded, time.held) for account, time in accounts.items()}
    assert found == {"chem": (200.0, 180.0), "phys": (100.0, 100.0), "": (0.0, 5.0)}


def test_hashes_of_accounts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for account, notes in (("chem", []), ("0123456789abcdef", ["accounts are hashes"])):
        found = Sacct(monkeypatch, [RUN, RUN._replace(user="bob")]).compare(held_by(3600.0, account=account))
        assert [note[:19] for note in found.notes] == notes


def test_series_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Sacct(monkeypatch, [RUN, RUN._replace(user="bob")])
    series = [{"metric": {"node": name}, "values": values} for name, values in (("n1", []), ("n2", "odd"))]
    answer = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}})
    history = History(parse_address("http://127.0.0.1:1"), lambda *_: answer)
    found = accounting.compare(UsageReport(START, START + 3600.0), history, "", is_own=True, clock=source.clock)
    assert "1 series that cannot be read" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--floor=0", "cannot be combined with --floor"), ("--format=csv", "has the formats text and json")],
)
def test_flags_without_an_effect_on_the_comparison_are_refused(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        COMMANDS["report"].run(["--against=sacct", "--source.prometheus=http://127.0.0.1:1", flag])
    assert text in capsys.readouterr().err


def test_hours_of_two_clusters_are_not_compared_with_those_of_one() -> None:
    usage = UsageReport(START, START + 3600.0)
    for cluster in ("east", "west"):
        usage.lines[Who(cluster, "slurm", account="chem")] = GpuHours(held=1.0)
    with pytest.raises(AnswerError, match="the hours are of the clusters east, west, but sacct knows one"):
        accounting.compare(usage, NO_SERVER, "", is_own=False)
