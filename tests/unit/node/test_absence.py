"""Ends that a source reports: they are saved with the counters that include them, and none is lost without a count."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from tests.testbed.simulated_node import SimulatedNode
from tests.unit.node.node_bench import GPU

from gpu_exporter.agent.attribution.poller import GRANTS_MAX
from gpu_exporter.agent.attribution.source import Answer
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, PastEnds


class Source:
    """A source whose next answer a test sets."""

    name = "slurm"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.next = Answer(())

    def poll(self) -> Answer:
        answer, self.next = self.next, self.next._replace(ended=(), missed=0)
        return answer

    def end(self, job: str, device: str, seconds: float, ago: float) -> Grant:
        """The grant of a job that ran for this time, and ended so many seconds ago."""
        holder = Holder(HolderKey("slurm", f"lab/{job}/0/1"), job_id=job, user="ada", source="slurm")
        start = self.clock.wall() - ago - seconds
        return Grant("minor", device, holder, confirmed=self.clock.monotonic() - ago, start_here=start)


def node_with(source: list[Source], state: StateFile | None = None) -> SimulatedNode:
    def make(clock: Clock) -> Source:
        source.append(Source(clock))
        return source[0]

    return SimulatedNode(parse_scenario({"gpus": [GPU, GPU]}), state=state, make_source=make)


def held(node: SimulatedNode) -> float:
    return sum(totals.held_s for _, totals in node.state.ledger.tenants.totals())


def test_the_state_file_contains_the_ends_that_its_counters_include(tmp_path: Path) -> None:
    state, made = StateFile(tmp_path, 1.0, "boot"), list[Source]()
    node = node_with(made, state)
    (source,) = made
    assert (node.state.restore(), state.past) == ("no state file yet", None)
    node.state.write_state()
    assert StateFile(tmp_path, 1.0, "boot").past is None
    node.run(30)
    source.next = Answer((), ended=[source.end("7", "0", 9.0, 3.0)], reported=["1/7"])
    node.run(5)
    assert held(node) == pytest.approx(9.0)
    node.state.write_state()
    polled = node.state.ledger.polled
    for _ in range(2):  # a state file that is written before the first poll contains the same
        again = StateFile(tmp_path, 1.0, "boot")
        node.restart(20.0, again)
        assert again.past is not None and polled is not None
        assert again.past == PastEnds(["1/7"], pytest.approx(polled))
        node.state.write_state()
    node.sample()
    source.next = Answer((), ended=[source.end("8", "0", 4.0, 10.0)], reported=["1/7", "2/8"])
    node.poll()
    assert held(node) == pytest.approx(13.0)
    other = StateFile(tmp_path, 1.0, "next boot")
    node.state.write_state()
    node.restart(20.0, None)
    assert (other.restore(node.state.ledger), other.past) == ("state file of another boot", None)


def test_an_ended_job_whose_gpu_does_not_answer_is_missed(tmp_path: Path) -> None:
    made = list[Source]()
    node = node_with(made)
    (source,) = made
    node.run(30)
    ended = [source.end("7", "0", 9.0, 3.0), source.end("8", "6", 9.0, 3.0), source.end("8", "7", 9.0, 3.0)]
    source.next = Answer((), ended=ended, missed=2)
    node.run(10)
    assert held(node) == pytest.approx(9.0)
    assert [status.missed for status in node.poller.statuses()] == [3]


def test_an_answer_with_too_many_grants_loses_no_end() -> None:
    made = list[Source]()
    node = node_with(made)
    (source,) = made
    node.run(30)
    grants = [source.end("9", "1", 1.0, 0.0)] * (GRANTS_MAX + 1)
    source.next = Answer(grants, ended=[source.end("7", "0", 9.0, 3.0)], reported=["1/7"])
    node.poll()
    assert (held(node), node.poller.reported()) == (pytest.approx(9.0), ["1/7"])


def restored_with(directory: Path, old: str, new: str) -> tuple[str, StateFile]:
    """The reason that a restart gives for a state file with this change, and the file."""
    state, made = StateFile(directory, 1.0, "boot"), list[Source]()
    node = node_with(made, state)
    made[0].next = Answer((), reported=["1/7"])
    node.run(10)
    node.state.write_state()
    header, _, body = state.path.read_text().partition("\n")
    assert old in body
    body = body.replace(old, new)
    state.path.write_text(f"{header.rpartition(' ')[0]} {zlib.crc32(body.encode()):08x}\n{body}")
    again = StateFile(directory, 1.0, "boot")
    node.restart(20.0, None)
    return again.restore(node.state.ledger), again


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"reported":["1/7"]', '"reported":[7]'),
        ('"reported":["1/7"]', '"reported":"1/7"'),
        ('"polled":', '"polled":"x","was":'),
        ('"polled":', '"polled":true,"was":'),
    ],
)
def test_a_state_file_with_other_fields_is_not_read(tmp_path: Path, old: str, new: str) -> None:
    reason, again = restored_with(tmp_path, old, new)
    assert "fields of another version" in reason
    assert again.past is None


def test_a_state_file_of_an_earlier_version_knows_no_ends(tmp_path: Path) -> None:
    reason, again = restored_with(tmp_path, '"reported":["1/7"],', "")
    assert (reason, again.past) == ("", None)
