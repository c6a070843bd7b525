"""The suggested policy: the shortest window that is seldom wrong, and a file that the reconciler accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.config.load import load_config
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.backtest.lives import HolderLife, PastGang, Tenure
from gpu_exporter.reports.backtest.model import suggest
from gpu_exporter.reports.backtest.render import one_line_of
from gpu_exporter.reports.backtest.replay import Replayed
from gpu_exporter.reports.backtest.sums import DIMENSIONS, WINDOWS_S, Sums, Tally
from gpu_exporter.reports.usage.model import FLOORS


def decided(number: int, fate: str, namespace: str = "ml", kind: str = "Job", account: str = "") -> list[Replayed]:
    name = HolderName("kubernetes", namespace, "a") if namespace else HolderName("slurm", "", "7")
    unit = Tenure("n1", "GPU-1", "", "H100", 0.0, 7200.0, "left", ((),) * 3)
    life = HolderLife("", name, [unit], f"ada/{account}", facts={"account": frozenset([account])})
    back = {"returned": 60.0, "later": 7200.0}.get(fate)
    return [
        Replayed(0.0, PastGang([life], owner_kinds=(kind,) if kind else ()), (life,), "", 3600.0, fate, back)
    ] * number


def lines(by_window: dict[float, list[Replayed]]) -> list[str]:
    grid = {}
    sums = Sums([], 0.0, lambda _model, _cluster: 2.0)
    for window in WINDOWS_S:
        tally = Tally()
        for each in by_window.get(window, []):
            sums.add(tally.total, each)
            for name, of in DIMENSIONS.items():
                sums.add(tally.rows[name][of(each)], each)
        grid |= {(window, floor): tally for floor in FLOORS}
    return [one_line_of(line) for line in suggest(grid, 0.001)]


def test_the_shortest_window_with_little_regret() -> None:
    found = lines(
        {
            3600.0: decided(90, "idle") + decided(10, "returned"),
            7200.0: decided(700, "idle") + decided(260, "later") + decided(40, "returned"),
            10800.0: decided(60, "ended"),
        }
    )
    assert found == [
        "policy:",
        "  candidate_after: 1h",
        "  underused_after: 2h  # regret 4.0% of 1,000 decisions, 30% ever worked again, 1,000 idle GPU-hours after them",
    ]


def test_a_window_from_which_most_work_again_is_never_suggested() -> None:
    """A pod that works every five hours is still idle an hour after each decision of a short window."""
    found = lines({window: decided(40, "idle") + decided(60, "later") for window in WINDOWS_S})
    assert found[-2:] == ["policies:", "- {name: warn-only, ceiling: candidate}"]
    assert "# 30m: regret 0.0% of 100 decisions, 60% ever worked again, 100 idle GPU-hours after them" in found


def test_a_share_that_may_be_larger_by_chance_is_no_reason() -> None:
    found = lines({window: decided(96, "idle") + decided(4, "returned") for window in WINDOWS_S})
    assert found[-1] == "- {name: warn-only, ceiling: candidate}"
    assert lines({window: decided(30, "idle") for window in WINDOWS_S})[-1] == found[-1]


def test_no_longer_window_is_wrong() -> None:
    """Else the short one is right only because holders begin to work more than an hour later."""
    right, wrong = decided(90, "idle") + decided(10, "later"), decided(90, "idle") + decided(10, "returned")
    assert lines({1800.0: right, 3600.0: right, 14400.0: wrong})[-1] == "- {name: warn-only, ceiling: candidate}"
    assert "  underused_after: 3h" in lines({1800.0: right, 7200.0: wrong, 10800.0: right})[2]


def test_few_decisions_are_no_reason() -> None:
    found = lines({window: decided(19, "idle") for window in WINDOWS_S})
    assert found[-2:] == ["policies:", "- {name: warn-only, ceiling: candidate}"]


def test_unknown_ends_are_neither_right_nor_wrong() -> None:
    found = lines({7200.0: decided(40, "idle") + decided(80, "taken") + decided(80, "lost") + decided(80, "unknown")})
    assert found[2].startswith("  underused_after: 2h  # regret 0.0% of 40 decisions")


@pytest.mark.parametrize(("later", "line"), [("idle", "underused_after: 4h"), ("returned", "ceiling: candidate")])
def test_a_namespace_that_is_often_wrong_gets_a_longer_window_or_a_ceiling(later: str, line: str) -> None:
    most = decided(970, "idle")
    found = lines(
        {7200.0: most + decided(30, "returned", "web", "ReplicaSet"), 14400.0: most + decided(40, later, "web")}
    )
    text = "\n".join(found)
    assert "match: {namespaces: ['web']}" in text and "match: {owner_kinds: ['ReplicaSet']}" in text
    assert f"  {line}" in text


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suggested") / "policy.yaml"


@given(st.text(min_size=1, max_size=40), st.booleans())
def test_any_name_of_an_account_or_namespace_gives_a_valid_file(path: Path, name: str, is_pod: bool) -> None:
    given = ("", "Job", name) if not is_pod else (name, "Job", "")
    found = lines({7200.0: decided(1000, "idle") + decided(30, "returned", *given)})
    path.write_text("\n".join(found) + "\n", "utf-8", errors="surrogatepass")
    config = load_config(path)
    assert config.settings.policy.underused_after == 7200.0
    assert len(config.rules) >= 1
