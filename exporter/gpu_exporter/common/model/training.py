"""Reports of a holder's training loop. The job writes its own reports, so a report alone is no proof."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

Fact: TypeAlias = int | float | bool | str


class RankReport(NamedTuple):
    """One process of a training, as it describes itself (docs/torch.md). None is unknown.

    - `run`: an id that is new after each start of the loop. `process`: an id that all loops of one process share, "" if
      unknown.
    - `gpus`: UUIDs of the GPUs or MIG instances that the process names.
    - `steps`: steps since the loop's start. `measured`: the number of measured steps, to which the seconds below apply.
    - `step_s`: duration of all measured steps. `wait_s`: the part of `step_s` in which the loop waited for data.
    - `starved_s`, `worked_s`: measured on the GPU: seconds without work because the loop waited for data, and seconds
      with work.
    - `phases`: seconds by name, measured on the GPU if `is_gpu`. `facts`: settings of the loop.
    - `is_between`: the loop has come to the end of its data, and may begin again.
    - `age_s`: seconds since the file was written. While the loop makes steps, it writes at least every `interval_s`.
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
    """Means of the last minutes over a holder's running ranks on one node. Shares (0 to 1) are of the time of these
    steps.

    - `steps`: the measured steps of the rank that has the fewest. `step_s`: mean seconds of a step.
    - `seen`: steps of all ranks, measured or not.
    - `wait`: the largest share of its time that any rank waits for data. `waiting_rank`: that rank. If `is_gpu`, only
      time without work on the GPU counts.
    - `phases`: by name, the mean share of the ranks that measure the phase.
    - `silent_s`: seconds since the last known step.
    - `late`: names the rank for which the others wait, and their wait as a share of a step; "" without such a rank.
      `late_share`: this share, None if the ranks cannot be compared.
    - `facts`: settings that all ranks have in common.
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
    """The training on one allocation, as published.

    - `steps`: steps of its ranks since the first report that the exporter read.
    - `seconds`: seconds of these steps by phase. The phase `step` is the whole time, `wait` is waiting for data.
    - `rank`: the lowest rank on this allocation. `pace`: the pace of the whole holder on this node.
    - `contradiction`: why the report cannot be true, "" if it can.
    """

    steps: int
    seconds: Mapping[str, float]
    rank: int | None
    step_s: float | None
    pace: TrainingPace
    contradiction: str = ""
