"""The state file: a restored counter is never below a published value, and an invalid file means starting at 0."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.agent.ledger.state import HEADER, VERSION, StateFile, StateInUse
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-0")
POD = Holder(HolderKey("kubernetes", "uid-1/main"), pod="train-0")
ALLOCATION = Allocation(UNIT, POD)
RULES = LedgerRules(5.0, 3, 0.1, 0.7, 60.0)
BOOT = "boot-1"


def run(ledger: Ledger, now: float, seconds: int, ratio: float) -> float:
    """Observe and poll for a while. Returns the time afterwards."""
    for i in range(seconds):
        now += 1.0
        ledger.record(Activity(UNIT, (Span(now - 1.0, now, ratio),), 2))
        if i % 5 == 4:
            ledger.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
    return now


def write(state: StateFile, ledger: Ledger) -> None:
    prepared = state.prepare(ledger)
    state.commit(prepared)
    state.adopt(prepared)


def fresh(now: float) -> Ledger:
    ledger = Ledger(RULES, now)
    ledger.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
    return ledger


@pytest.mark.parametrize("limit", [400.0, None])
def test_the_energy_of_a_holder_continues_after_a_kill(tmp_path: Path, limit: float | None) -> None:
    now, ledger, state = 1_000.0, fresh(1_000.0), StateFile(tmp_path, 10.0, BOOT)
    for second in range(20):
        ledger.record_energy(UNIT, now, 5_000.0 + 300.0 * second, limit)
        now = run(ledger, now, 1, 1.0)
        ledger.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
    write(state, ledger)
    totals = ledger.holder_totals(ALLOCATION, now, 1e9)
    assert totals is not None
    assert totals.energy_j
    assert totals.energy_j > 1_000.0
    assert state.bound_holder(UNIT, POD.key, totals).energy_j == totals.energy_j
    assert state.bound_holder(UNIT, POD.key, totals._replace(energy_j=1e9)).energy_j == totals.energy_j
    again, file = Ledger(RULES, now), StateFile(tmp_path, 10.0, BOOT)
    assert file.restore(again) == ""
    again.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
    restored = again.holder_totals(ALLOCATION, now, 1e9)
    assert restored is not None
    assert file.bound_holder(UNIT, POD.key, restored).energy_j == totals.energy_j


@pytest.mark.parametrize("limit", [400.0, None])
def test_unattributed_counters_continue_after_a_kill(tmp_path: Path, limit: float | None) -> None:
    now, ledger, state = 1_000.0, Ledger(RULES, 1_000.0), StateFile(tmp_path, 10.0, BOOT)
    for second in range(60):
        now += 1.0
        ledger.record(Activity(UNIT, (Span(now - 1.0, now, 0.5),), 2))
        ledger.record_energy(UNIT, now, 5_000.0 + 300.0 * second, limit)
        ledger.charge_poll(now, 1e9 + now, [])
    write(state, ledger)
    totals = ledger.unit_totals(UNIT, now, 1e9)
    assert totals is not None and totals.unattributed_j
    assert totals.unattributed_s > 20.0
    assert totals.unattributed_j > 10_000.0
    assert state.bound_unit(UNIT, totals) == totals
    beyond = totals._replace(unattributed_s=1e9, unattributed_j=1e9)
    bounded = state.bound_unit(UNIT, beyond)
    assert bounded.unattributed_s == totals.unattributed_s
    assert bounded.unattributed_j == totals.unattributed_j
    again, file = Ledger(RULES, now), StateFile(tmp_path, 10.0, BOOT)
    assert file.restore(again) == ""
    again.record(Activity(UNIT, (Span(now, now + 1.0, 0.5),), 2))
    restored = again.unit_totals(UNIT, now + 1.0, 1e9)
    assert restored is not None
    assert restored.unattributed_s == pytest.approx(bounded.unattributed_s)
    assert restored.unattributed_j == pytest.approx(bounded.unattributed_j)


def test_the_state_directory_is_made(tmp_path: Path) -> None:
    StateFile(tmp_path / "a" / "b", 10.0, BOOT).acquire()
    assert (tmp_path / "a" / "b" / "lock").is_file()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.4, 1.0]), st.booleans()), min_size=1, max_size=25),
    st.floats(0, 300),
)
def test_after_a_kill_no_counter_resumes_below_its_published_value(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float, bool]], outage: float
) -> None:
    state = StateFile(tmp_path_factory.mktemp("state"), 10.0, BOOT)
    now = 1_000.0
    ledger = fresh(now)
    write(state, ledger)
    published: dict[str, float] = {}
    for seconds, ratio, writes in steps:
        now = run(ledger, now, seconds, ratio)
        unit = ledger.unit_totals(UNIT, now, 1e9)
        holder = ledger.holder_totals(ALLOCATION, now, 1e9)
        assert holder is not None
        bounded = state.bound_holder(UNIT, POD.key, holder)
        published |= {f"h.{n}": getattr(bounded, n) for n in ("held_s", "busy_s", "observed_s", "idle_s", "low_s")}
        if unit is not None:
            bounded_unit = state.bound_unit(UNIT, unit)
            published |= {f"u.{n}": getattr(bounded_unit, n) for n in ("busy_s", "observed_s", "idle_s")}
        if writes:
            write(state, ledger)
    # kill -9 here: the following code sees only the file
    exact = ledger.holder_totals(ALLOCATION, now, 1e9)
    assert exact is not None
    now += outage
    again = Ledger(RULES, now)
    assert StateFile(state.path.parent, 10.0, BOOT).restore(again) == ""
    again.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
    again.record(Activity(UNIT, (Span(now, now + 1, 1.0),), 2))
    unit, holder = again.unit_totals(UNIT, now, 1e9), again.holder_totals(ALLOCATION, now, 1e9)
    assert holder is not None
    for name, value in published.items():
        record = holder if name.startswith("h.") else unit
        assert getattr(record, name[2:]) >= value, name
    assert holder.busy_s + holder.idle_s <= holder.observed_s + 1e-6 <= holder.held_s + 2e-6
    assert exact.held_s + outage - 1e-6 <= holder.held_s <= now - 1_000.0 + 1e-6  # held time grows during the outage
    for name in ("busy_s", "observed_s", "idle_s", "low_s", "high_s"):
        assert getattr(holder, name) <= getattr(exact, name) + 1e-6, name
    assert (holder.idle_run_s or 0.0) <= (exact.idle_run_s or 0.0) + 1e-6


LIFE = st.tuples(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from([0.0, 0.4, 1.0]), st.booleans()), max_size=6),
    st.floats(0, 20),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(LIFE, min_size=1, max_size=6))
def test_no_kill_adds_to_a_counter(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[list[tuple[int, float, bool]], float, bool]]
) -> None:
    """One life: what is observed between writes, the outage after its end, and whether a poll precedes a write."""
    directory = tmp_path_factory.mktemp("state")
    began = now = 1_000.0
    names = ("held_s", "busy_s", "observed_s", "idle_s")
    published, true = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for kills, (steps, outage, polled_first) in enumerate(lives):
        ledger, state = Ledger(RULES, now), StateFile(directory, 1.0, BOOT)
        assert bool(state.restore(ledger)) == (kills == 0)
        if not polled_first and kills:
            write(state, ledger)
        ledger.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
        if polled_first or not kills:
            write(state, ledger)
        for seconds, ratio, writes in [(0, 0.0, False), *steps]:
            now = run(ledger, now, seconds, ratio)
            ledger.charge_poll(now, 1e9 + now, [ConfirmedAllocation(ALLOCATION, now, None)])
            true["busy_s"] += seconds * ratio
            true["observed_s"] += seconds
            true["idle_s"] += seconds * (ratio == 0.0)
            true["held_s"] = now - began
            totals = ledger.holder_totals(ALLOCATION, now, 1e9)
            assert totals is not None
            bounded = state.bound_holder(UNIT, POD.key, totals)
            for name in names:
                assert getattr(bounded, name) >= published[name] - 1e-6, name
                assert getattr(totals, name) <= true[name] + 1e-6, name
                published[name] = getattr(bounded, name)
            assert totals.held_s >= true["held_s"] - 1e-6
            if writes:
                write(state, ledger)
        now += outage


def test_an_idle_run_survives_a_short_outage_and_ends_with_a_long_outage(tmp_path: Path) -> None:
    for outage, expected in ((30.0, 100.0), (61.0, None)):
        ledger = fresh(1_000.0)
        now = run(ledger, 1_000.0, 100, 0.0)
        state = StateFile(tmp_path, 10.0, BOOT)
        write(state, ledger)
        again = Ledger(RULES, now + outage)
        state.restore(again)
        again.charge_poll(now + outage, 1e9, [ConfirmedAllocation(ALLOCATION, now + outage, None)])
        totals = again.holder_totals(ALLOCATION, now + outage, 1e9)
        assert totals is not None
        assert totals.idle_run_s == (None if expected is None else pytest.approx(expected))


def test_activity_that_the_driver_buffered_ends_a_restored_idle_run(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    now = run(ledger, 1_000.0, 100, 0.0)
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    again = Ledger(RULES, now + 30)
    state.restore(again)
    again.record(Activity(UNIT, (Span(now + 10, now + 11, 0.3),), 2))  # while the exporter did not run
    again.charge_poll(now + 30, 1e9, [ConfirmedAllocation(ALLOCATION, now + 30, None)])
    totals = again.holder_totals(ALLOCATION, now + 30, 1e9)
    assert totals is not None
    assert totals.idle_run_s == 0.0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace("observed_s", "observed_x", 1), "damaged"),
        (lambda text: "gpu-exporter-state 99 " + text.partition(" ")[2].partition(" ")[2], "another version"),
        (lambda text: "", "damaged"),
    ],
    ids=["torn", "altered", "other version", "empty"],
)
def test_an_invalid_file_restores_nothing(tmp_path: Path, spoil, reason: str) -> None:
    ledger = fresh(1_000.0)
    run(ledger, 1_000.0, 50, 0.5)
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    state.path.write_text(spoil(state.path.read_text("utf-8")), encoding="utf-8")
    again = Ledger(RULES, 2_000.0)
    assert reason in StateFile(tmp_path, 10.0, BOOT).restore(again)
    assert not again.units
    assert not again.holdings


def test_a_file_of_another_boot_restores_nothing(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    write(StateFile(tmp_path, 10.0, BOOT), ledger)
    again = Ledger(RULES, 50.0)
    assert StateFile(tmp_path, 10.0, "boot-2").restore(again) == "state file of another boot"
    assert StateFile(tmp_path, 10.0, "").restore(again) == "state file of another boot"


def test_a_holder_known_only_by_name_is_not_restored(tmp_path: Path) -> None:
    named = Holder(HolderKey("kubernetes", "ml/train-0/main"), identity="name")
    allocation = Allocation(UNIT, named)
    ledger = Ledger(RULES, 1_000.0)
    ledger.charge_poll(1_000.0, 1e9, [ConfirmedAllocation(allocation, 1_000.0, None)])
    ledger.charge_poll(1_010.0, 1e9, [ConfirmedAllocation(allocation, 1_010.0, None)])
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    again = Ledger(RULES, 1_020.0)
    state.restore(again)
    again.charge_poll(1_020.0, 1e9, [ConfirmedAllocation(allocation, 1_020.0, None)])
    totals = again.holder_totals(allocation, 1_020.0, 1e9)
    assert totals is not None
    assert totals.held_s == 0.0


def test_no_value_beyond_the_written_value_is_published(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    now = run(ledger, 1_000.0, 5, 1.0)
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    now = run(ledger, now, 50, 1.0)  # the writer is late
    unit, holder = ledger.unit_totals(UNIT, now, 1e9), ledger.holder_totals(ALLOCATION, now, 1e9)
    assert unit is not None
    assert holder is not None
    assert state.bound_unit(UNIT, unit).busy_s == pytest.approx(5.0)
    assert state.bound_holder(UNIT, POD.key, holder).held_s == pytest.approx(5.0)


def test_a_holder_that_is_not_written_yet_publishes_only_a_jobs_held_time(tmp_path: Path) -> None:
    """A value that is published before it is written would fall with a kill."""
    state, job = StateFile(tmp_path, 10.0, BOOT), Holder(HolderKey("slurm", "lab/7/0/1"), job_id="7")
    write(state, Ledger(RULES, 1_000.0))
    ledger = fresh(1_000.0)
    run(ledger, 1_000.0, 10, 1.0)
    totals = ledger.holder_totals(ALLOCATION, 1_010.0, 1e9)
    unit = ledger.unit_totals(UNIT, 1_010.0, 1e9)
    assert totals is not None and unit is not None and min(totals.held_s, totals.busy_s, unit.busy_s) > 5.0
    assert state.bound_unit(UNIT, unit).busy_s == 0.0
    bounded = state.bound_holder(UNIT, POD.key, totals)
    assert (bounded.held_s, bounded.busy_s, bounded.observed_s) == (0.0, 0.0, 0.0)
    bounded = state.bound_holder(UNIT, job.key, totals)
    assert (bounded.held_s, bounded.busy_s, bounded.observed_s) == (totals.held_s, 0.0, 0.0)


def test_restored_counters_do_not_increase_until_a_write_succeeds(tmp_path: Path) -> None:
    """If the disk is full after the restart, counters must not exceed the values on the disk."""
    ledger = fresh(1_000.0)
    now = run(ledger, 1_000.0, 50, 1.0)
    write(StateFile(tmp_path, 10.0, BOOT), ledger)
    state = StateFile(tmp_path, 10.0, BOOT)
    again = Ledger(RULES, now)
    state.restore(again)
    again.charge_poll(now, 1e9, [ConfirmedAllocation(ALLOCATION, now, None)])
    now = run(again, now, 50, 1.0)
    unit, holder = again.unit_totals(UNIT, now, 1e9), again.holder_totals(ALLOCATION, now, 1e9)
    assert unit is not None
    assert holder is not None
    assert unit.busy_s > state.bound_unit(UNIT, unit).busy_s == pytest.approx(50.0)
    assert holder.held_s > state.bound_holder(UNIT, POD.key, holder).held_s == pytest.approx(50.0)


def test_published_parts_never_exceed_the_whole_while_the_writer_is_late(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    now = run(ledger, 1_000.0, 10, 0.0)
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    now = run(ledger, now, 50, 1.0)
    now = run(ledger, now, 50, 0.0)
    unit, holder = ledger.unit_totals(UNIT, now, 1e9), ledger.holder_totals(ALLOCATION, now, 1e9)
    assert unit is not None
    assert holder is not None
    for totals in (state.bound_unit(UNIT, unit), state.bound_holder(UNIT, POD.key, holder)):
        assert totals.busy_s + totals.idle_s <= totals.observed_s + 1e-9


def test_a_file_with_unknown_fields_restores_nothing(tmp_path: Path) -> None:
    body = json.dumps({"boot_id": BOOT, "units": [{"unit": UNIT, "colour": 1}], "holders": []})
    (tmp_path / "state").write_text(f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}", encoding="utf-8")
    assert "fields of another version" in StateFile(tmp_path, 10.0, BOOT).restore(Ledger(RULES, 1.0))


def test_written_counters_are_exact(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    run(ledger, 1_000.0, 50, 0.5)
    state = StateFile(tmp_path, 10.0, BOOT)
    write(state, ledger)
    unit = json.loads(state.path.read_text("utf-8").partition("\n")[2])["units"][0]
    assert unit["busy_s"] == pytest.approx(25.0)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = StateFile(tmp_path, 10.0, BOOT), StateFile(tmp_path, 10.0, BOOT)
    first.acquire()
    with pytest.raises(
        StateInUse, match="another gpu-exporter uses this state directory: stop it, or set another --state.directory"
    ):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_the_units_of_holders_numbers_survive_a_restart(tmp_path: Path) -> None:
    state = StateFile(tmp_path, 10.0, BOOT)
    numbers = {(POD.key, "1"): UnitId("GPU-7"), (POD.key, "IDX 2"): UnitId("GPU-7", "MIG-1")}
    state.commit(state.prepare(fresh(1_000.0), numbers))
    again = StateFile(tmp_path, 10.0, BOOT)
    assert again.restore(Ledger(RULES, 1_000.0)) == ""
    assert again.numbers == numbers
    assert StateFile(tmp_path, 10.0, "boot-2").restore(Ledger(RULES, 1_000.0)) == "state file of another boot"


GOOD = {"unit": ["GPU-0", ""], "covered_until": 0.0}


@pytest.mark.parametrize(
    "data",
    [
        "not json",
        "[" * 100_000,
        [1],
        {"boot_id": BOOT, "units": ["x"], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": None, "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [{**GOOD, "busy_s": "x"}], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [{**GOOD, "busy_s": None}], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [{**GOOD, "busy_s": float("nan")}], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [{**GOOD, "idle_s": float("inf")}], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [{"unit": [["GPU-0"], ""], "covered_until": 0.0}], "holders": [], "numbers": []},
        {"boot_id": BOOT, "units": [], "holders": [], "numbers": [[["slurm", "a"], "IDX 0", ["GPU-0"]]]},
        {"boot_id": BOOT, "units": [], "holders": [], "numbers": [[["other", "a"], "IDX 0", ["GPU-0", ""]]]},
    ],
)
def test_a_file_with_a_valid_checksum_and_invalid_content_restores_nothing(tmp_path: Path, data: object) -> None:
    body = data if isinstance(data, str) else json.dumps(data)
    (tmp_path / "state").write_text(f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}", encoding="utf-8")
    ledger, state = Ledger(RULES, 1.0), StateFile(tmp_path, 10.0, BOOT)
    assert "fields of another version" in state.restore(ledger)
    assert (ledger.units, ledger.holdings, dict(state.numbers)) == ({}, {}, {})
    state.commit(state.prepare(ledger))


def test_every_written_field_is_restored(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    run(ledger, 1_000.0, 50, 0.5)
    account = ledger.holders()[UNIT, POD.key]
    account.working, account.last_active_wall = math.inf, (1.0, 2.0)
    state = StateFile(tmp_path, 10.0, BOOT)
    state.commit(state.prepare(ledger))
    again = Ledger(RULES, 1_100.0)
    assert StateFile(tmp_path, 10.0, BOOT).restore(again) == ""
    assert again.holders(HolderPresence.ABSENT) == {(UNIT, POD.key): account}


def test_counters_continue_after_a_long_absence_although_the_first_poll_fails(tmp_path: Path) -> None:
    ledger = fresh(1_000.0)
    now = run(ledger, 1_000.0, 100, 1.0)
    state = StateFile(tmp_path, 10.0, BOOT)
    state.commit(state.prepare(ledger))
    again = Ledger(RULES, now + 3_600.0)
    StateFile(tmp_path, 10.0, BOOT).restore(again)
    again.charge_poll(now + 3_600.0, 1e9, [])
    later = now + 3_605.0
    again.charge_poll(later, 1e9, [ConfirmedAllocation(ALLOCATION, later, None)])
    totals = again.holder_totals(ALLOCATION, later, 1e9)
    assert totals is not None
    assert totals.held_s == pytest.approx(3_705.0, abs=6.0)
    assert totals.busy_s == pytest.approx(100.0, abs=6.0)
