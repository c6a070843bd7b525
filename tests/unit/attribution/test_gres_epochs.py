"""Which order of GPUs gave a job its numbers: the present file proves nothing about an older job."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.slurm.gres.conf import GpuOrder
from gpu_exporter.agent.attribution.slurm.gres.epochs import (
    BEFORE,
    EPOCHS_MAX,
    FILE,
    GAP_S,
    SKEW_S,
    Epochs,
    GresContent,
)

A = GpuOrder("minor", ("0", "1", "2", "3"))
B = GpuOrder("minor", ("3", "2", "1", "0"))
START = 1_800_000_000.0


def same(order: GpuOrder = A, since: float = START) -> GresContent:
    return GresContent(order, since, path="gres.conf")


def edited(order: GpuOrder, at: float) -> GresContent:
    """The file was changed while slurmd ran."""
    return GresContent(order, None, at, "gres.conf")


def fresh(directory: Path | None = None) -> Epochs:
    return Epochs(directory, "n0")


def test_a_job_that_began_before_slurmd_is_not_resolved_by_the_present_file() -> None:
    epochs = fresh()
    now = epochs.note(same(), START, START + 100)
    assert epochs.at(START + 50, now) == A
    assert epochs.at(START + 105, now) == A, "the clock of slurmctld is ahead"
    assert (epochs.at(START - 1, now).kind, epochs.at(START - 1, now).problem) == ("unknown", BEFORE)
    assert epochs.at(None, now) == A


def test_a_file_from_before_the_boot_resolves_every_job_of_this_boot() -> None:
    """The exporter is installed after slurmd has restarted."""
    boot = START - 5_000
    found = same()._replace(boot=boot)
    epochs = fresh()
    now = epochs.note(found, START, START + 100)
    assert epochs.at(boot + 60, now) == epochs.at(START + 50, now) == A
    assert epochs.at(boot - 1, now).kind == "unknown"
    # The exporter has stored that the order applies since slurmd's start.
    epochs = fresh()
    epochs.note(same(), START, START + 100)
    now = epochs.note(found, START, START + 200)
    assert epochs.at(boot + 60, now) == A


def test_an_order_that_was_seen_after_the_boot_counts_more_than_the_date_of_a_file() -> None:
    """A directory was renamed, which changes no date of the file in it."""
    boot = START - 5_000
    epochs = fresh()
    epochs.note(same(B, boot + 100), boot + 100, START - 100)
    now = epochs.note(same()._replace(boot=boot), START, START + 100)
    assert epochs.at(START - 1_000, now) == B
    assert epochs.at(boot + 50, now).kind == "unknown"
    assert epochs.at(START + SKEW_S, now) == A


def test_a_touched_file_with_the_same_content_loses_no_holder() -> None:
    epochs = fresh()
    epochs.note(same(), START, START + 100)
    now = epochs.note(edited(A, START + 200), START, START + 205)
    assert now == epochs.at(START + 50, now) == epochs.at(START + 300, now) == A


def test_another_order_counts_for_no_job_until_slurmd_has_read_it() -> None:
    epochs = fresh()
    epochs.note(same(), START, START + 100)
    now = epochs.note(edited(B, START + 200), START, START + 205)
    assert now.kind == "unknown" and "another order than when slurmd started: restart slurmd" in now.problem
    assert epochs.at(START + 50, now) == A, "slurmd cannot have read it before it was there"
    assert epochs.at(START + 201, now) == now
    # slurmd may have read the other order, and the file has the old order again: nothing shows which order applies.
    now = epochs.note(edited(A, START + 300), START, START + 305)
    assert now.kind == "unknown"
    later = START + 400
    now = epochs.note(same(B, later), later, later + 60)
    assert now == epochs.at(later + SKEW_S, now) == B
    assert epochs.at(START + 50, now) == A, "a job runs across a restart of slurmd"
    for start in (START - 1, START + 199, START + 250, later + 1):
        assert epochs.at(start, now).problem == BEFORE
    assert epochs.at(None, now).kind == "unknown"


def test_a_file_date_ahead_of_the_clock_resolves_no_later_job(tmp_path: Path) -> None:
    """The file came from a host whose clock is ahead, and slurmd has read it since."""
    epochs = fresh()
    epochs.note(same(), START, START + 90)
    ahead = START + 700
    epochs.note(edited(B, ahead), START, START + 100)
    now = epochs.note(edited(B, ahead), START + 110, START + 200)
    assert epochs.at(START + 190, now).kind == "unknown"
    assert epochs.at(START + 50, now) == A


def test_a_file_that_changed_before_the_first_look_proves_nothing() -> None:
    epochs = fresh()
    now = epochs.note(edited(A, START + 200), START, START + 205)
    assert "was changed after slurmd started, and its earlier content is unknown" in now.problem
    assert epochs.at(START + 300, now) == now
    assert epochs.note(same(), None, START).kind == "unknown"
    assert epochs.note(GresContent(GpuOrder("unknown", problem="no file")), START, START).problem == "no file"


def test_after_a_restart_of_slurmd_with_the_same_order_every_job_keeps_its_gpus() -> None:
    epochs = fresh()
    epochs.note(same(), START, START + 1000)
    again = START + 1000 + GAP_S - 1
    now = epochs.note(same(A, again), again, again + 5)
    assert all(epochs.at(start, now) == A for start in (START + 1, START + 1100, again + 1))
    late = again + 5 + GAP_S + 1
    now = epochs.note(same(A, late), late, late + 5)
    assert epochs.at(START + 1, now) == epochs.at(late + 1, now) == A
    assert epochs.at(late - 1, now).kind == "unknown", "slurmd may have used another file in between"


def test_orders_survive_a_restart_of_the_exporter_and_only_the_daemon_writes_them(tmp_path: Path) -> None:
    for name in ("touched", "edited", "restarted", "other"):
        (tmp_path / name).mkdir()
        fresh(tmp_path / name).note(same(), START, START + 100)
    later = fresh(tmp_path / "touched")
    now = later.note(edited(A, START + 4000), START, START + 9000)
    assert now == later.at(START + 50, now) == later.at(START + 8000, now) == A
    assert fresh(tmp_path / "edited").note(edited(B, START + 4000), START, START + 9000).kind == "unknown"
    restarted = START + 500  # after the last look; the file was changed later, so what slurmd read was not seen
    assert fresh(tmp_path / "restarted").note(edited(A, START + 600), restarted, START + 9000).kind == "unknown"
    assert Epochs(tmp_path / "other", "n1").note(edited(A, START + 400), START, START + 500).kind == "unknown"
    reader = Epochs(tmp_path / "none", "n0", writes=False)
    reader.note(same(), START, START + 100)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 2}', '{"version":1,"node":"n0","epochs":[{}]}', "\xff", "9" * 300_000]
    + [
        '{"version":1,"node":"n0","epochs":[{"since":1,"seen":2,"is_over":false,"order":' + order + "}]}"
        for order in (
            '{"kind":"x","minors":[],"total":0,"caps":[]}',
            '{"kind":"minor","minors":[1],"total":0,"caps":[]}',
        )
    ],
)
def test_a_remembered_file_that_is_not_understood_is_ignored(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    epochs = fresh(tmp_path)
    assert epochs.at(START - 1, epochs.note(same(), START, START + 1)).kind == "unknown"
    assert epochs.at(START + 1, A) == A
    assert fresh(tmp_path).at(START + 1, A) == A, "the file is written again"


def test_an_unwritable_directory_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    epochs = fresh(tmp_path / "none")
    with caplog.at_level(logging.WARNING):
        for second in range(0, 1000, 100):
            assert epochs.note(same(), START, START + second) == A
    assert caplog.text.count("a restart of the exporter loses") == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "edit", "restart", "reread", "exporter"]),
        st.sampled_from([A, B]),
        st.floats(SKEW_S + 1, 2 * GAP_S),
    ),
    max_size=25,
)


@given(STEPS)
def test_no_job_is_ever_resolved_by_an_order_that_did_not_apply_when_it_began(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, GpuOrder, float]]
) -> None:
    """slurmd and its file are edited, restarted and read again at any time. A job starts at each step."""
    directory = tmp_path_factory.mktemp("epochs")
    epochs, now = fresh(directory), START
    file, file_at, force, slurmd_start = A, START - 10, A, START
    jobs: list[tuple[float, GpuOrder]] = []
    for what, order, seconds in steps:
        now += seconds
        if what == "edit":
            file, file_at = order, now
        elif what == "restart":
            force, slurmd_start = file, now
        elif what == "reread":  # scontrol reconfigure of Slurm before 23.11
            force = file
        elif what == "exporter":
            epochs = fresh(directory)
        jobs.append((now + 1, force))
        found = same(file, slurmd_start) if file_at < slurmd_start else edited(file, file_at)
        found = found._replace(boot=START - 5 if file_at < START - 5 else None)
        found_now = epochs.note(found, slurmd_start, now + 2)
        for start, truth in jobs:
            said = epochs.at(start, found_now)
            assert said.kind == "unknown" or said == truth
    assert len(epochs._epochs) <= EPOCHS_MAX
