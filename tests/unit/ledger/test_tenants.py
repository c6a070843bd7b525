"""Hours of tenants add up, even if holders are shorter than a poll, share a GPU, or exceed the number that is kept."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.ledger.tenants import KEEP_S, TENANTS_MAX, tenant_of
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey, TenantKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import TenantTotals
from gpu_exporter.common.model.units import UnitId

RULES = LedgerRules(5.0, 3, 0.1, 0.7, 60.0)
POLL_S = 5.0
UNIT = UnitId("GPU-0")
ML = TenantKey("kubernetes", "ml", "", "")
BOOT = "boot-1"


def pod(name: str, namespace: str = "ml") -> Holder:
    return Holder(HolderKey("kubernetes", f"uid-{name}"), namespace, name, "main")


def job(name: str, user: str = "ada", account: str = "phys") -> Holder:
    return Holder(HolderKey("slurm", name), job_id=name, user=user, account=account)


class Bench:
    """A ledger that is polled every five seconds. Every GPU is always at `ratio`."""

    def __init__(self, ledger: Ledger | None = None, now: float = 0.0) -> None:
        self.now = now
        self.ledger = ledger or Ledger(RULES, now)

    def poll(self, *held: Allocation, start: float | None = None, ratio: float = 0.5) -> None:
        before, self.now = self.now, self.now + POLL_S
        for unit in {allocation.unit for allocation in held}:
            self.ledger.record(Activity(unit, (Span(before, self.now, ratio),), witnesses=2))
            self.ledger.record_energy(unit, self.now, 100.0 * self.now, 700.0)
        self.ledger.charge_poll(self.now, self.now, [ConfirmedAllocation(each, self.now, start) for each in held])

    def total(self, key: TenantKey = ML) -> TenantTotals:
        return dict(self.ledger.tenants.totals())[key]


def test_a_tenant_gets_the_growth_of_its_holders_accounts() -> None:
    bench = Bench()
    for _ in range(20):
        bench.poll(Allocation(UNIT, pod("a")), Allocation(UnitId("GPU-1"), pod("b")))
    total = bench.total()
    assert total.held_s == pytest.approx(2 * 19 * POLL_S)  # from the first poll on: no source was asked before
    assert total.known_s == pytest.approx(total.held_s)
    assert total.busy_s == pytest.approx(total.held_s / 2)
    assert total.idle_s == 0.0
    assert total.energy_j == pytest.approx(100.0 * total.held_s)


def test_idle_seconds_of_a_tenant_are_those_of_its_holders() -> None:
    bench = Bench()
    for _ in range(11):
        bench.poll(Allocation(UNIT, pod("a")), ratio=0.0)
    assert (bench.total().idle_s, bench.total().busy_s) == (pytest.approx(50.0), 0.0)


def test_a_shared_gpu_counts_by_share_and_energy_counts_as_charged() -> None:
    bench = Bench()
    part = Allocation(UnitId("GPU-0", "MIG-1"), pod("a"), "mig", 0.25)
    for _ in range(11):
        bench.poll(part)
    assert bench.total().held_s == pytest.approx(12.5)
    assert bench.total().energy_j == pytest.approx(5000.0)


@pytest.mark.parametrize("seed", range(5))
def test_hours_of_pods_of_twenty_seconds_are_right_within_a_hundredth(seed: int) -> None:
    """2,000 pods start at any moment between two polls."""
    random.seed(seed)
    bench, truth, at = Bench(), 0.0, 3.0
    spans = []
    for number in range(2000):
        at += random.uniform(0.0, 20.0)
        length = random.uniform(15.0, 25.0)
        spans.append((at, at + length, pod(str(number))))
        truth += length
        at += length
    waiting = 0
    while bench.now < at + POLL_S:
        moment = bench.now + POLL_S
        while spans[waiting][1] <= moment and waiting + 1 < len(spans):
            waiting += 1
        begin, end, who = spans[waiting]
        bench.poll(*([Allocation(UNIT, who)] if begin <= moment < end else []))
    assert bench.total().held_s == pytest.approx(truth, rel=0.01)
    assert bench.total().known_s < bench.total().held_s


def test_a_new_tenant_is_published_as_0_for_its_first_minute_and_a_restored_one_never(tmp_path: Path) -> None:
    """increase() counts from the first value that was scraped. A tenant of the state file was published before."""
    bench, state = Bench(), StateFile(tmp_path, 10.0, BOOT)

    def published(by: Ledger) -> TenantTotals:
        return state.bound_tenant(ML, dict(by.tenants.totals(bench.now))[ML])

    bench.poll(Allocation(UNIT, pod("a")))
    assert published(bench.ledger) == TenantTotals(0.0, 0.0, 0.0, 0.0, None)  # before the first write too
    for _ in range(11):
        bench.poll(Allocation(UNIT, pod("a")))
        prepared = state.prepare(bench.ledger)
        state.adopt(prepared)
        assert published(bench.ledger) == TenantTotals(0.0, 0.0, 0.0, 0.0, 0.0)
    bench.poll(Allocation(UNIT, pod("a")))
    assert published(bench.ledger).held_s == 55.0
    state.commit(prepared)
    again = Ledger(RULES, bench.now)
    assert state.restore(again) == ""
    assert published(again).held_s == 55.0
    bench.now += KEEP_S
    bench.poll()
    bench.poll(Allocation(UNIT, pod("b")))  # it comes back after its series has ended
    assert published(bench.ledger).held_s == 0.0


def test_a_tenant_of_two_boards_of_which_one_counts_no_energy_has_no_energy() -> None:
    bench, other = Bench(), UnitId("GPU-1")
    key = TenantKey("kubernetes", "one", "", "")
    for _ in range(20):
        bench.ledger.record(Activity(other, (Span(bench.now, bench.now + POLL_S, 0.5),), witnesses=2))
        bench.ledger.record(Activity(UNIT, (Span(bench.now, bench.now + POLL_S, 0.5),), witnesses=2))
        bench.ledger.record_energy(UNIT, bench.now, 100.0 * bench.now, 700.0)
        bench.now += POLL_S
        held = [(UNIT, pod("a")), (other, pod("a")), (UnitId("GPU-2"), pod("c", "one"))]
        bench.ledger.record(Activity(UnitId("GPU-2"), (Span(bench.now - POLL_S, bench.now, 0.5),), witnesses=2))
        bench.ledger.record_energy(UnitId("GPU-2"), bench.now, 100.0 * bench.now, 700.0)
        bench.ledger.charge_poll(
            bench.now, bench.now, [ConfirmedAllocation(Allocation(*each), bench.now, None) for each in held]
        )
    assert bench.total().energy_j is None and bench.total().held_s == pytest.approx(190.0)
    assert bench.total(key).energy_j == pytest.approx(9500.0, rel=0.06)


def test_a_proven_start_gets_no_additional_estimate() -> None:
    bench = Bench()
    bench.poll()
    for _ in range(3):
        bench.poll(Allocation(UNIT, job("7")), start=6.0)
    key = TenantKey("slurm", "", "phys", "ada")
    assert bench.total(key).held_s == pytest.approx(20.0 - 6.0)
    bench.poll()
    assert bench.total(key).held_s == pytest.approx(20.0 - 6.0 + POLL_S / 2)


def test_a_holder_that_one_poll_missed_is_charged_for_its_time_once() -> None:
    bench = Bench()
    bench.poll()
    for _ in range(10):
        bench.poll(Allocation(UNIT, pod("a")))
    bench.poll()
    bench.poll(Allocation(UNIT, pod("a")))
    truth = 11 * POLL_S
    # With the estimate of half a poll before it was first seen; that for the end, which did not happen, is in the truth.
    assert bench.total().held_s == pytest.approx(truth + POLL_S / 2)


def test_an_outage_of_the_source_adds_no_held_time() -> None:
    bench = Bench()
    bench.poll(Allocation(UNIT, pod("a")))
    bench.now += 1000.0
    bench.poll(Allocation(UNIT, pod("b")))
    assert bench.total().held_s == 0.0


def test_tenants_are_kept_for_an_hour_after_their_last_holder() -> None:
    bench = Bench()
    bench.poll(Allocation(UNIT, pod("a")))
    bench.poll(Allocation(UNIT, pod("a")))
    bench.now += KEEP_S - 3 * POLL_S
    bench.poll()
    assert bench.total().held_s > 0
    bench.now += 3 * POLL_S
    bench.poll()
    bench.poll()
    assert dict(bench.ledger.tenants.totals()) == {}


def test_tenants_beyond_the_limit_share_one_account() -> None:
    bench = Bench()
    bench.poll()
    for number in range(TENANTS_MAX + 3):
        bench.poll(Allocation(UNIT, pod(str(number), f"ns-{number}")))
    totals = dict(bench.ledger.tenants.totals())
    assert len(totals) == TENANTS_MAX + 1
    # Each tenant was there at one poll only: half of the time before it and half of the time after it count.
    assert totals[TenantKey("kubernetes", "other", "", "")].held_s == pytest.approx(2.5 * POLL_S)
    bench.poll(Allocation(UNIT, job("7")))
    bench.poll(Allocation(UNIT, job("7")))
    assert TenantKey("slurm", "", "other", "") in dict(bench.ledger.tenants.totals())


def test_a_job_belongs_to_its_account_and_user() -> None:
    assert tenant_of(job("7")) == TenantKey("slurm", "", "phys", "ada")
    assert tenant_of(pod("a")) == ML


def test_hours_continue_after_a_restart_and_are_never_charged_twice(tmp_path: Path) -> None:
    state = StateFile(tmp_path, 10.0, BOOT)
    bench = Bench()
    for _ in range(20):
        bench.poll(Allocation(UNIT, pod("a")))
    prepared = state.prepare(bench.ledger)
    state.commit(prepared)
    state.adopt(prepared)
    published = state.bound_tenant(ML, bench.total())
    assert published == bench.total()
    before = bench.total().held_s

    again = Ledger(RULES, bench.now + 60.0)
    file = StateFile(tmp_path, 10.0, BOOT)
    assert file.restore(again) == ""
    assert dict(again.tenants.totals())[ML].held_s == before
    later = Bench(again, bench.now + 60.0)
    for _ in range(20):
        later.poll(Allocation(UNIT, pod("a")))
        bounded = file.bound_tenant(ML, later.total())
        assert bounded is not None and bounded.held_s == before  # until the next write
    # The minute of absence was held too. The 95 seconds before it were charged already.
    assert later.total().held_s == pytest.approx(before + 60.0 + 100.0, abs=1.0)


def test_a_kill_adds_to_no_tenant(tmp_path: Path) -> None:
    state = StateFile(tmp_path, 10.0, BOOT)
    bench = Bench()
    instance = Allocation(UnitId("GPU-0", "MIG-0"), pod("b", "small"), "mig", 1 / 7)
    whole = [Allocation(UnitId(f"GPU-{i}"), pod(f"a{i}")) for i in range(1, 8)]
    bench.poll(Allocation(UNIT, pod("gone", "gone")))
    for number in range(TENANTS_MAX - 3):
        bench.poll(*whole, instance, Allocation(UNIT, pod(f"c{number}", f"ns-{number}")))
    for number in range(2):  # no account is left for these
        bench.poll(*whole, instance, Allocation(UNIT, pod(f"d{number}", f"late-{number}")))
    state.commit(state.prepare(bench.ledger))
    again = Ledger(RULES, bench.now + 60.0)
    assert StateFile(tmp_path, 10.0, BOOT).restore(again) == ""
    assert dict(again.tenants.totals()) == dict(bench.ledger.tenants.totals())


def test_a_state_file_of_an_older_release_has_no_tenants(tmp_path: Path) -> None:
    import json
    import zlib

    state = StateFile(tmp_path, 10.0, BOOT)
    bench = Bench()
    for _ in range(3):
        bench.poll(Allocation(UNIT, pod("a")))
    header, _, body = state.prepare(bench.ledger).text.partition("\n")
    data = json.loads(body)
    del data["tenants"]
    body = json.dumps(data)
    state.path.write_text(f"{header.rsplit(' ', 1)[0]} {zlib.crc32(body.encode()):08x}\n{body}")
    again = Ledger(RULES, bench.now)
    assert StateFile(tmp_path, 10.0, BOOT).restore(again) == ""
    assert dict(again.tenants.totals()) == {}


def test_the_exact_end_after_a_restart_is_not_added_to_the_estimated_end(tmp_path: Path) -> None:
    before, held = Bench(), Allocation(UNIT, job("7"))
    for _ in range(3):
        before.poll(held, start=5.0)
    before.poll()
    key = tenant_of(held.holder)
    assert before.total(key).held_s == 12.5
    state = StateFile(tmp_path, 10.0, BOOT)
    state.commit(state.prepare(before.ledger))
    after = Bench(Ledger(RULES, before.now), before.now)
    assert state.restore(after.ledger) == ""
    after.ledger.charge_poll(25.0, 25.0, [], [ConfirmedAllocation(held, 19.0, 5.0)])
    assert after.total(key).held_s == 14.0


def test_no_end_is_estimated_while_a_source_does_not_answer_completely() -> None:
    """The job may still have its GPU, and its exact end may follow."""
    bench, held = Bench(), Allocation(UNIT, job("7"))
    for _ in range(3):
        bench.poll(held, start=5.0)
    bench.ledger.charge_poll(26.0, 26.0, [], is_complete=False)
    assert bench.total(tenant_of(held.holder)).held_s == 10.0
    bench.ledger.charge_poll(31.0, 31.0, [], [ConfirmedAllocation(held, 16.0, 5.0)])
    bench.poll()
    assert bench.total(tenant_of(held.holder)).held_s == 11.0


def test_an_end_is_estimated_once_all_sources_answer_and_only_up_to_the_next_holder() -> None:
    bench, first, second = Bench(), Allocation(UNIT, job("7")), Allocation(UNIT, job("8", "eve"))
    for _ in range(3):
        bench.poll(first, start=5.0)
    for now in (20.0, 25.0):
        entry = ConfirmedAllocation(second, now, 17.0)
        bench.ledger.charge_poll(now, now, [entry], is_complete=now > 20.0)
    found = {tenant.user: totals.held_s for tenant, totals in bench.ledger.tenants.totals()}
    assert found == {"ada": 11.0, "eve": 8.0}


def test_a_holder_that_appears_later_gets_no_time_of_an_estimated_end() -> None:
    bench, first, second = Bench(), Allocation(UNIT, job("7")), Allocation(UNIT, job("8", "eve"))
    for _ in range(3):
        bench.poll(first, start=5.0)
    bench.poll()
    bench.ledger.charge_poll(25.0, 25.0, [ConfirmedAllocation(second, 25.0, 16.0)])
    found = {tenant.user: totals.held_s for tenant, totals in bench.ledger.tenants.totals()}
    assert found == {"ada": 12.5, "eve": 7.5}


def test_holders_that_left_while_a_source_does_not_answer_fill_no_memory() -> None:
    bench, sizes = Bench(), []
    bench.poll()
    for number in range(3 * 200):
        now, entry = 10.0 + 5.0 * number, Allocation(UNIT, pod(str(number)))
        bench.ledger.charge_poll(now, now, [ConfirmedAllocation(entry, now, None)], is_complete=False)
        sizes.append(len(pickle.dumps(bench.ledger.tenants)))
    assert sizes[-1] < 1.1 * sizes[299]
