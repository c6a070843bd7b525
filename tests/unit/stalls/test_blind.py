"""A fully busy GPU whose progress nothing shows is not healthy: where no stall can be seen, its state is unknown."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.common.model.readings import Effort, HostProgress, Span
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.stalls.floor import BoardFloor
from gpu_exporter.diagnosis.stalls.rules import StallRules
from gpu_exporter.diagnosis.stalls.watch import SpinWatch
from gpu_exporter.diagnosis.stalls.work import WorkHistory
from gpu_exporter.diagnosis.state import StateRules, Window, judge_state

RULES = StateRules(600.0, 0.8, 0.5, 0.1, 0.7, 0.1)
MINUTES = 20
H100, GB10, RTX, T4 = "NVIDIA H100 80GB HBM3", "NVIDIA GB10", "NVIDIA GeForce RTX 4090", "Tesla T4"


def watch_for(
    product: str,
    watts: float,
    limit_w: float | None,
    ratio: float = 1.0,
    host: dict[str, Any] | None = None,
    swing_w: float = 0.0,
    moves_memory: bool = False,
    floor: BoardFloor | None = None,
    **seen: Any,
) -> Spin:
    """Twenty minutes at one level; the host is read every 30 s if it is given."""
    watch = SpinWatch(StallRules(), product, floor or BoardFloor(), WorkHistory())
    for second in range(MINUTES * 60):
        now_w = watts + swing_w * (second // 20 % 2)
        memory = 2e9 + (1e6 * (second // 300) if moves_memory else 0.0)
        effort = Effort(second, second + 1.0, now_w, now_w, limit_w, limit_w, memory, **seen)
        watch.read(effort, (Span(second, second + 1.0, ratio),), "")
        if host is not None and second % 30 == 29:
            watch.hear(HostProgress(second - 29.0, second + 1.0, **host))
    return watch.report()


@pytest.mark.parametrize(
    ("product", "watts", "limit_w", "why"),
    [
        (GB10, 22.0, None, "the board reports no default power limit"),
        (GB10, 58.0, None, "the board reports no default power limit"),
        (T4, 40.0, 70.0, "the board's limit is 70 W, so its power does not show whether it works or waits"),
        (RTX, 120.0, 450.0, "the power of this board at rest is unknown"),
        (H100, 100.0, 700.0, "since its start, the exporter has only seen this GPU fully busy at low power"),
    ],
    ids=["no-limit", "no-limit-at-work", "small-board", "unknown-rest", "busy-since-the-start"],
)
def test_a_spin_that_cannot_be_judged_is_unknown(product: str, watts: float, limit_w: float | None, why: str) -> None:
    """An engine that deadlocked on a GB10 kept its GPU at 96 % and 22 W for hours; at work it drew 45 W."""
    spin = watch_for(product, watts, limit_w)
    assert spin.is_blind and not spin.is_stall
    verdict = judge_state(Window([1.0] * 10, 3600.0, 0.0, spin=spin), RULES)
    assert verdict.state == "unknown"
    assert verdict.evidence.startswith(f"mean 100%, but it is unknown whether the holder makes progress: {why}")
    assert judge_state(Window([0.9, *[1.0] * 9], 3600.0, 0.0, spin=spin), RULES).state == "healthy"


def test_a_board_without_a_limit_says_what_it_drew_at_rest() -> None:
    """The engine on the GB10 drew 22 W while it was deadlocked, and 16 to 27 W at rest."""
    floor = BoardFloor()
    assert "drew" not in watch_for(GB10, 22.0, None, floor=floor).unknown
    watch_for(GB10, 18.0, None, ratio=0.0, floor=floor)
    spin = watch_for(GB10, 22.0, None, floor=floor)
    assert spin.is_blind and spin.unknown.endswith("works or waits; at utilization 0 it drew 18 W")


@pytest.mark.parametrize(("product", "learned"), [(RTX, True), (H100, False)])
def test_the_evidence_says_that_the_power_at_rest_was_learned_here(product: str, learned: bool) -> None:
    """A board without a published power at rest is watched as soon as it was seen at rest."""
    watch = SpinWatch(StallRules(), product, BoardFloor(), WorkHistory())
    for second in range(MINUTES * 60):
        ratio, watts = (0.0, 72.0) if second < 60 else (1.0, 80.0)
        effort = Effort(second, second + 1.0, watts, watts, 450.0, 450.0, 2e9, pcie=0.0, nvlink=0.0)
        watch.read(effort, (Span(second, second + 1.0, ratio),), "")
    assert ("(at rest 72 W as seen here)" if learned else "(at rest 72 W)") in watch.report().evidence


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ((GB10, 22.0, None), {"pcie": 5e8}),
        ((GB10, 22.0, None), {"sm": 0.5, "pipes": 0.2, "dram": 0.1}),
        ((GB10, 22.0, None), {"ratio": 0.9}),
        ((GB10, 22.0, None), {"host": {"steps": 3}}),
        ((GB10, 22.0, None), {"host": {"loaders_cores": 0.8}}),
        ((RTX, 300.0, 450.0), {}),
        ((T4, 66.0, 70.0), {}),
        ((T4, 45.0, 70.0), {"swing_w": 6.0}),
        ((GB10, 45.0, None), {"swing_w": 6.0}),
        ((T4, 45.0, 70.0), {"moves_memory": True}),
        ((H100, 600.0, 700.0), {}),
    ],
    ids=[
        "traffic",
        "arithmetic",
        "not-full",
        "steps",
        "loaders",
        "power-above-half",
        "near-the-limit",
        "unsteady",
        "unsteady-without-limit",
        "memory",
        "judged",
    ],
)
def test_any_sign_of_progress_keeps_a_busy_gpu_healthy(
    level: tuple[str, float, float | None], seen: dict[str, Any]
) -> None:
    spin = watch_for(*level, **seen)
    assert not spin.is_blind
    assert judge_state(Window([1.0] * 10, 3600.0, 0.0, spin=spin), RULES).state == "healthy"
