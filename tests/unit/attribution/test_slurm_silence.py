"""Jobs that begin and end while slurmctld or a command of Slurm does not answer get their hours, each second once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.attribution.slurm_silence import Job, Silence, SilentNode

ALL = ("sinfo", "squeue", "show")
WORDS = {
    "slurmctld": ALL,
    "squeue": ("squeue",),
    "scontrol": ("show",),
    "steps": ("listpids",),
    "all": (*ALL, "listpids"),
}
TIMES = (  # of the jobs of each GPU: into the silence, out of it, through it, one after the other
    ((12.2, 30.3),),
    ((28.4, 70.2),),
    ((10.1, 70.2),),
    ((10.1, 26.2), (26.4, 29.1), (29.3, 33.9), (34.1, 60.4)),
)
SILENCE = (20.0, 45.0)
KINDS = {
    "whole": ("", "whole", 1),
    "gang": ("", "whole", 2),
    "shard": ("shard", "shard", 1),
    "beside mps": ("mps", "whole", 1),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def make_node(directory: Path, kind: str, silent: str, late_s: float = 0.1) -> SilentNode:
    shared, part, nodes = KINDS[kind]
    jobs = [
        Job(10 * gpu + number, begin + late_s * number, end + late_s * number, part, nodes, late_s, gpu)
        for gpu, times in enumerate(TIMES)
        for number, (begin, end) in enumerate(times, 1)
    ]
    return SilentNode(directory, jobs, [Silence(*SILENCE, WORDS[silent])], shared)


def check(node: SilentNode) -> None:
    """Each job has the time between its prolog and its epilog, or up to the next job. Their dates are whole seconds."""
    held = node.held()
    for user, (begin, end) in node.spans.items():
        nexts = [first for other, (first, _) in node.spans.items() if other[:-1] == user[:-1] and first > begin]
        assert -0.3 <= held.get(user, 0.0) - (min([end, *nexts]) - begin) <= 1.0, (user, held, node.spans)
    assert (node.missed, sum(held.values())) == (0, pytest.approx(sum(held[user] for user in node.spans)))


@pytest.mark.parametrize("late_s", [0.1, 12.0], ids=["", "slow epilogs"])
@pytest.mark.parametrize("silent", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_jobs_around_a_silence_get_their_hours(tmp_path: Path, kind: str, silent: str, late_s: float) -> None:
    node = make_node(tmp_path, kind, silent, late_s)
    node.run_until(140.0)
    check(node)
    node.stop(saves=False)


@pytest.mark.parametrize("saves", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("silent", ["slurmctld", "squeue"])
@pytest.mark.parametrize("kind", ["whole", "shard"])
def test_jobs_around_a_silence_in_which_the_exporter_restarts_get_their_hours(
    tmp_path: Path, kind: str, silent: str, saves: bool
) -> None:
    node = make_node(tmp_path, kind, silent)
    node.run_until(14.0)
    node.node.state.write_state()
    node.run_until(24.0)
    node.stop(saves=saves)
    node.clock.advance(6.0)
    node.start()
    node.run_until(100.0)
    check(node)
    node.stop(saves=False)
