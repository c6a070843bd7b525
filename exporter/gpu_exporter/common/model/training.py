"""The claims of a holder's training loop about itself. The job writes them, so alone they prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

Fact: TypeAlias = int | float | bool | str


class RankReport(NamedTuple):
    """One process of a training, as it describes itself (docs/torch.md).

    `run`: another value after each start of the loop; `process`: the same for all loops of one process, "" if unknown.
    `gpus`: UUIDs that it names, also of MIG instances. `steps`:
    so far; `measured`: those that the seconds cover. `step_s`, `wait_s`: seconds of all of these, and of waiting for
    data in them. `starved_s`, `worked_s`: of the GPU's own time line: without work because the loop waited for data,
    and with work. `phases`: seconds by name, the GPU's where `is_gpu`. `facts`: settings of the loop. None is unknown.
    `is_between`: the loop has come to the end of its data, and may begin again.
    `age_s`: since the file was written, which happens every `interval_s` at least while the loop makes steps.
    """

    run: str
    steps: int
    age_s: float = 0.0
    process: str = ""
    interval_s: float = 10.0
    has_ended: bool = False
    is_between: bool = False
    rank: int | None = None
    world_size: int | None = None
    gpus: tuple[str, ...] = ()
    measured: int = 0
    step_s: float | None = None
    wait_s: float | None = None
    starved_s: float | None = None
    worked_s: float | None = None
    phases: Mapping[str, float] = MappingProxyType({})
    is_gpu: bool = False
    facts: Mapping[str, Fact] = MappingProxyType({})


class TrainingPace(NamedTuple):
    """The last minutes of the running ranks of a holder on one node; the shares are of the time of their steps, 0 to 1.

    `steps`: how many measured steps were made in this time, of the rank with the fewest; `step_s`: their mean length.
    `seen`: steps of all ranks between the looks of this time, also of ranks that measure none. `wait`: share
    that waits for data, of the rank that waits longest; `waiting_rank`: this rank. `is_gpu`: the share is the GPU's, so
    it counts only what the GPU had no work in. `phases`: by name, mean of the ranks that have placed the phase.
    `silent_s`: since the last step that is known of. `late`: the rank that the others wait for and by which share of a
    step, as a text; "" without one. `late_share`: this share, None if the ranks cannot be compared. `facts`: settings
    that all ranks have in common.
    """

    ranks: int
    world_size: int | None
    steps: int
    step_s: float | None
    wait: float | None
    waiting_rank: int | None
    is_gpu: bool
    phases: Mapping[str, float]
    silent_s: float
    late: str = ""
    late_share: float | None = None
    facts: Mapping[str, Fact] = MappingProxyType({})
    seen: int = 0


class TrainingView(NamedTuple):
    """What is published of the training on one allocation. `steps`, `seconds`: what its ranks did since the exporter
    knows them; `seconds` by phase, with `step` for all of it and `wait` for waiting for data. `rank`: the lowest one on
    this allocation. `pace`: of the whole holder on this node. `contradiction`: why the claim cannot be true, "" if it
    can.
    """

    steps: int
    seconds: Mapping[str, float]
    rank: int | None
    step_s: float | None
    pace: TrainingPace
    contradiction: str = ""
