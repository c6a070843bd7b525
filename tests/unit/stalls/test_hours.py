"""The hours of a holder by part, over runs of every length, restarts, kills and gaps: the whole node on its own clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.protocol import XidEvent
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.ledger.accounts import HolderAccount
from gpu_exporter.agent.ledger.spins import RunPart, book_busy, follow_run
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import TenantKey
from gpu_exporter.common.model.readings import HostProgress, Span
from gpu_exporter.common.model.views import AllocationView

JOB = {"gpu": 0, "kind": "job", "name": "48", "account": "phys", "user": "mira", "memory_gib": 40}
REST = [{"at": 0, "level": "rest"}]
TENANT = TenantKey("slurm", "", "phys", "mira")


class Node:
    """One GPU of a job, whose other GPU rests. Its host is quiet, and read every 30 s while a run lasts."""

    def __init__(
        self,
        tmp_path: Path,
        model: str,
        *stages: tuple[float, str],
        until: float = 1e9,
        other_from: float = 0.0,
        rests: bool = True,
    ) -> None:
        """`rests`: the job's other GPU always rests; otherwise only while this one hangs."""
        work = [{"at": at, "level": level} for at, level in stages]
        rest = REST if rests else [{"at": at, "level": level.replace("hang", "rest")} for at, level in stages]
        self._tmp_path, self._files = tmp_path, 0
        self.state = self._open()
        jobs = [
            {**JOB, "to": until},
            {**JOB, "gpu": 1, "to": until},
            *([{**JOB, "name": "49", "from": other_from}] if other_from else []),
        ]
        self.node = SimulatedNode(
            parse_scenario({"gpus": [{"model": model, "work": work}, {"model": model, "work": rest}], "holders": jobs}),
            None,
            self.state,
        )
        self.seen: list[Mapping[str, float]] = []

    def _open(self) -> StateFile:
        state = StateFile(self._tmp_path, 1.0, "boot")
        state.acquire()
        return state

    def run(self, seconds: int, *, sample: bool = True) -> AllocationView:
        for _ in range(seconds // 30):
            start = self.node.clock.monotonic()
            self.node.run(30, sample=sample)
            if sample:
                for suspect in self.node.state.list_suspects():
                    self.node.state.hear_host(suspect.who, HostProgress(start, start + 30, 0.0, False, 0.0, 0.0))
                self.node.state.write_state()
            self.check()
        return self.view()

    def view(self) -> AllocationView:
        (allocation,) = (each for each in self.node.view().allocations if each.gpu == 0)
        return allocation

    def check(self) -> None:
        """No counter falls, and the parts fit into the time that is known."""
        totals = self.view().totals
        fresh = {name: getattr(totals, name) for name in ("busy_s", "idle_s", "stalled_s", "observed_s")}
        if self.seen:
            assert all(fresh[name] >= self.seen[-1][name] for name in fresh)
        self.seen.append(fresh)
        parts = totals.busy_s + totals.idle_s + totals.stalled_s + totals.pending_s
        assert parts <= totals.observed_s + 1e-6

    def restart(self, away_s: float, *, kill: bool = False) -> None:
        if not kill:
            self.node.state.write_state()
        self.state.release()
        self.state = self._open()
        self.node.restart(away_s, self.state)

    def tenant(self) -> Mapping[str, float | None]:
        return dict(self.node.view().tenants)[TENANT]._asdict()


def test_a_lost_rank_is_a_stall_after_five_minutes_and_its_cause_is_on_both_gpus(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (930, "hang"), rests=False)
    node.run(930)
    other = node.node.view().allocations[1].allocation.unit.uuid
    node.node.state.xids.count(XidEvent(other, 79), node.node.clock.wall(), node.node.clock.monotonic())
    assert node.run(270).verdict.state == "healthy"
    named = node.run(120)
    assert (named.verdict.state, named.causes.found[0][:2]) == ("stalled", ("lost_rank", "high"))
    assert "gpu 1 reported XID 79; 1 of its 2 GPUs here wait for" in named.causes.found[0].evidence
    node.run(900)
    assert [each.causes.found[0].name for each in node.node.view().allocations] == ["lost_rank"] * 2


@pytest.mark.parametrize("code", [63, 900])
def test_an_xid_that_the_board_has_handled_or_that_no_catalogue_has_proves_nothing(tmp_path: Path, code: int) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (930, "hang"), rests=False)
    node.run(930)
    other = node.node.view().allocations[1].allocation.unit.uuid
    node.node.state.xids.count(XidEvent(other, code), node.node.clock.wall(), node.node.clock.monotonic())
    assert node.run(480).verdict.state == "healthy"


@pytest.mark.slow
def test_a_stall_takes_its_first_minutes_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"), (6000, "train"))
    before = node.run(1500)
    assert before.totals.busy_s == pytest.approx(1200, abs=10)
    pending = node.run(600)
    assert (pending.verdict.state, pending.totals.stalled_s) == ("healthy", 0.0)
    assert pending.totals.pending_s == pytest.approx(600, abs=10)
    assert pending.totals.busy_s == pytest.approx(1200, abs=1)
    stalled = node.run(600)
    assert stalled.verdict.state == "stalled" and "medium confidence" in stalled.verdict.evidence
    assert stalled.totals.stalled_s == pytest.approx(1200, abs=10)
    after = node.run(4200)
    assert after.verdict.state != "stalled"
    assert after.totals.stalled_s == pytest.approx(4500, rel=0.01)
    assert after.totals.busy_s == pytest.approx(2100, rel=0.01)
    assert after.totals.pending_s == 0.0
    tenant = node.tenant()
    assert tenant["stalled_s"] == pytest.approx(4500, rel=0.01)
    assert tenant["busy_s"] == pytest.approx(2100, rel=0.01)


def test_a_run_that_ends_a_second_early_is_busy(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"), (2399, "train"))
    after = node.run(3000)
    assert (after.totals.stalled_s, after.totals.pending_s) == (0.0, 0.0)
    assert after.totals.busy_s == pytest.approx(2700, abs=10)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["H100", "A100"])
@pytest.mark.parametrize("kill", [False, True])
def test_restarts_keep_the_parts_apart(tmp_path: Path, model: str, kill: bool) -> None:
    """Pending and stalled seconds survive; the time without an exporter is unknown."""
    node = Node(tmp_path, model, (0, "rest"), (300, "train"), (1500, "hang"), (6000, "train"))
    node.run(1950)
    node.restart(20, kill=kill)  # during the first 15 minutes
    node.run(1500)
    assert node.view().verdict.state == "stalled"
    node.restart(30, kill=kill)  # during the stall
    node.run(4000)
    totals = node.view().totals
    assert totals.stalled_s + totals.busy_s == pytest.approx(7500 - 300 - 50, rel=0.01)
    assert totals.stalled_s == pytest.approx(4450, rel=0.01)


@pytest.mark.slow
def test_after_learned_waits_a_run_is_busy_until_it_is_named_and_a_restart_forgets_neither(tmp_path: Path) -> None:
    """Three waits of 16 minutes: the next one is named after 48 minutes, and only the seconds from then on are stalled."""
    rounds = [(600 + at + 1200 * i, level) for i in range(3) for at, level in ((0, "hang"), (960, "train"))]
    node = Node(tmp_path, "H100", (0, "rest"), (60, "train"), *rounds, (4200, "hang"), rests=False)
    taught = node.run(4200).totals
    node.run(600)
    node.restart(20)
    node.run(1500)
    node.restart(20)
    assert node.run(600).verdict.state != "stalled"
    totals = node.run(1320).totals  # 4060 s of the run, with two restarts
    assert node.view().verdict.state == "stalled"
    assert totals.stalled_s - taught.stalled_s == pytest.approx(4060 - 3 * 960, abs=120)


@pytest.mark.slow
def test_after_a_long_gap_the_pending_seconds_are_busy_and_a_new_run_must_last(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"))
    node.run(2100)
    node.run(120, sample=False)
    gone = node.run(600)
    assert gone.totals.stalled_s == 0.0
    assert gone.totals.busy_s == pytest.approx(1800, abs=15)
    assert node.run(600).totals.stalled_s == pytest.approx(1200, abs=30)


@pytest.mark.slow
def test_a_low_confidence_counts_as_busy_and_is_shown_in_json_only(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "integer"))
    view = node.run(3000)
    assert view.spin is not None
    assert (view.spin.confidence, view.stalled_run_s, view.totals.stalled_s) == ("low", None, 0.0)
    assert view.totals.busy_s == pytest.approx(2700, abs=10)
    assert view.verdict.state == "healthy"


def test_a_holder_that_leaves_during_a_run_leaves_it_as_busy(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"), until=2100.0)
    node.run(2070)
    assert node.tenant()["busy_s"] == pytest.approx(1200, abs=10)
    node.node.run(40)
    node.node.state.write_state()
    assert not node.node.view().allocations
    assert node.tenant()["busy_s"] == pytest.approx(1800, abs=15)


@pytest.mark.slow
def test_a_gpu_that_is_shared_since_a_restart_books_no_stalled_seconds(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"), (3000, "train"), other_from=3005.0)
    node.run(3000)
    assert node.view().totals.stalled_s == pytest.approx(1500, abs=15)
    node.restart(20)
    for _ in range(60):  # the first poll is late
        node.node.clock.advance(1.0)
        node.node.sample()
    node.node.run(900)
    node.node.state.write_state()
    for allocation in node.node.view().allocations:
        assert allocation.totals.stalled_s < 1510.0
        assert allocation.totals.pending_s == 0.0


def test_pending_seconds_are_never_more_than_what_is_observed(tmp_path: Path) -> None:
    """The other counters are bounded by what the file holds."""
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"))
    node.run(2100)
    node.node.run(60)
    totals = node.view().totals
    assert totals.busy_s + totals.idle_s + totals.stalled_s + totals.pending_s <= totals.observed_s + 1e-6


def test_work_after_a_stall_is_published_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, "H100", (0, "rest"), (300, "train"), (1500, "hang"), (3000, "train"))
    node.run(3000)
    assert node.view().verdict.state == "stalled"
    node.run(60)
    assert node.view().verdict.state == "healthy"


def test_a_shared_gpu_is_not_watched(tmp_path: Path) -> None:
    holders = [JOB, {**JOB, "name": "49"}]
    work = [{"at": 0, "level": "rest"}, {"at": 300, "level": "hang"}]
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "work": work}], "holders": holders}))
    view = node.run(1800)
    assert [each.spin for each in view.allocations] == [None, None]


times = st.floats(0.1, 50.0)


@given(st.lists(st.tuples(times, st.sampled_from(["book", "begin", "again", "stall", "end"])), max_size=60))
@settings(deadline=None)
def test_no_second_of_a_run_is_lost_or_counted_twice(steps: list[tuple[float, str]]) -> None:
    account = HolderAccount(0.0, 0.0, 0.0, 0.0, known_until=0.0)
    now, total, before = 0.0, 0.0, (0.0, 0.0)
    part: RunPart | None = None
    for length, step in steps:
        if step == "book":
            book_busy(account, Span(now, now + length, 1.0))
            now, total = now + length, total + length
        elif (step == "begin" and part is None) or step == "again":
            part = RunPart(now, is_stall=False)
        elif step == "stall" and part is not None:
            part = part._replace(is_stall=True)
        elif step == "end":
            part = None
        follow_run(account, part, now)
        assert account.busy_s + account.stalled_s + account.pending_s == pytest.approx(total)
        assert account.busy_s >= before[0] - 1e-9 and account.stalled_s >= before[1] - 1e-9
        assert account.pending_s >= -1e-9 and (part is not None or account.pending_s == 0.0)
        before = account.busy_s, account.stalled_s
