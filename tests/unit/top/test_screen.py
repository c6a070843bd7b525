"""The screen of `top`: sort orders, filter words, and the size of the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.model.rows import Row
from gpu_exporter.reports.top.nodes import ClusterReading, NodeRow
from gpu_exporter.reports.top.screen import DROPPED, ORDERS, REASON_MIN, ViewOptions, choose, draw, summary, table


def row(gpu: str, **more: object) -> Row:
    known = {"name": "H100", "utilization": 0.5, "memory_bytes": 2.0**30, "power_w": 300.0, "temperature_celsius": 50.0}
    held = {
        "holder": f"ml/pod-{gpu}/main",
        "owner": "",
        "held_s": 9000.0,
        "idle_s": 0.0,
        "state": "healthy",
        "why": "mean 50%",
    }
    return Row(**{"gpu": gpu, **known, **held, **more})  # type: ignore[arg-type]


IDLE = {"utilization": 0.0, "state": "held_idle", "why": "idle for 2h"}
FREE = {"holder": "", "held_s": None, "idle_s": None, "state": "free", "why": "", "utilization": 0.0}
ROWS = [
    NodeRow("n1", row("0")),
    NodeRow("n1", row("1", idle_s=7200.0, **IDLE)),
    NodeRow("n1", row("2", **FREE)),
    NodeRow("n2", row("0", idle_s=9000.0, **IDLE)),
    NodeRow(
        "n2", row("1", utilization=None, idle_s=None, state="unknown", why="the GPU does not answer", owner="ada/phys")
    ),
    NodeRow("n2", row("6", holder="", held_s=None, idle_s=None, state="mig", why="")),
    NodeRow("n2", row("6:1/0", name="1g.10gb", power_w=400.0, utilization=0.9)),
]
READING = ClusterReading(ROWS, 2, {})


def places(wish: ViewOptions) -> list[str]:
    return [f"{each.node}/{each.row.gpu}" for each in choose(ROWS, wish)]


def test_the_longest_idle_row_is_first_and_unknown_rows_do_not_count_as_idle() -> None:
    assert places(ViewOptions())[:2] == ["n2/0", "n1/1"]
    assert places(ViewOptions("util"))[0] == "n2/6:1/0"
    assert places(ViewOptions("util"))[-1] == "n2/1"
    assert places(ViewOptions("gpu")) == [f"{each.node}/{each.row.gpu}" for each in ROWS]
    for order in ORDERS:
        assert sorted(places(ViewOptions(order))) == sorted(places(ViewOptions()))


@pytest.mark.parametrize(
    ("words", "found"),
    [("ADA", ["n2/1"]), ("n1 idle", ["n1/1"]), ("1g.10gb", ["n2/6:1/0"]), ("n1 n2", []), ("  ", 7)],
)
def test_a_shown_row_contains_all_words(words: str, found: list[str] | int) -> None:
    assert (
        len(places(ViewOptions(words=words))) == found
        if isinstance(found, int)
        else places(ViewOptions(words=words)) == found
    )


def test_the_summary_counts_each_gpu_and_its_power_once() -> None:
    said = summary(READING, 2)
    assert said == "2 of 2 nodes, 6 GPUs and instances, 5 held, 2 idle, 1 free, 1 unknown, 1.8 kW"
    assert summary(ClusterReading(ROWS[:1], 1, {}), 1).startswith("1 GPUs and instances, 1 held")
    shared = [NodeRow(node, row("3", holder=f"ml/{name}")) for node, name in (("n1", "a"), ("n1", "b"), ("n2", "c"))]
    assert (
        summary(ClusterReading(shared, 1, {}), 1) == "2 GPUs and instances, 2 held, 0 idle, 0 free, 0 unknown, 0.6 kW"
    )


def test_the_summary_does_not_contradict_the_idle_time_of_rows_without_a_state() -> None:
    """In the first minutes the rows show how long a GPU has been idle, and no state yet."""
    early = [NodeRow("n1", row(str(gpu), state="unknown", idle_s=idle)) for gpu, idle in enumerate((660.0, 3.0, None))]
    assert "3 held, 0 idle, 0 free, 3 unknown (1 idle so far), " in summary(ClusterReading(early, 1, {}), 1)


def test_the_node_is_shown_if_there_are_several_nodes() -> None:
    assert table(ROWS, with_node=True)[0].startswith("NODE  GPU")
    assert table(ROWS, with_node=False)[0].startswith("GPU")


def test_columns_make_room_for_the_reason_but_not_the_one_that_rows_are_sorted_by() -> None:
    reason = "idle for 2h; no process on the GPU, and the holder uses 0.0 CPUs"
    reading = ClusterReading([NodeRow("n1", row("1", why=reason, name="NVIDIA H100 80GB HBM3"))], 1, {})
    for width, order, missing in (
        (200, "waste", set()),
        (150, "waste", {"TEMP", "MEMORY"}),
        (140, "waste", {"TEMP", "MEMORY", "NAME"}),
        (140, "temp", {"MEMORY", "NAME"}),
        (40, "held", set(DROPPED) - {"HELD"}),
    ):
        head, line = draw(reading, ViewOptions(order), 1, 24, width)[1:3]
        names = table(reading.rows, with_node=False)[0].split()
        assert head.split() == [each for each in names if each not in missing][: len(head.split())], (width, order)
        assert (reason[:50] in line) == (width > 40), (width, order, line)


def test_no_column_goes_where_every_line_fits() -> None:
    full = table(ROWS, with_node=True)
    width = max(map(len, full))
    assert width - full[0].index("WHY") < REASON_MIN, "by the reason alone, columns would go"
    assert draw(READING, ViewOptions("gpu"), 2, 24, width)[1 : 1 + len(full)] == full
    assert draw(READING, ViewOptions("gpu"), 2, 24, width - 1)[1 : 1 + len(full)] != full


def test_rows_that_do_not_fit_are_counted_and_can_be_scrolled_to() -> None:
    lines = draw(READING, ViewOptions("gpu"), 2, 6, 200)
    assert lines[0].startswith("2 of 2 nodes") and lines[1].startswith("NODE") and lines[2].split()[:2] == ["n1", "0"]
    assert lines[-1].endswith("4 more")
    assert draw(READING, ViewOptions("gpu", skip=2), 2, 6, 200)[2].split()[:2] == ["n1", "2"]
    assert draw(READING, ViewOptions("gpu", skip=99), 2, 6, 200)[4].split()[:2] == ["n2", "6:1/0"], (
        "scrolling stops at the end"
    )
    assert "with 'ml'" in draw(READING, ViewOptions(words="ml"), 2, 30, 200)[-1]


def test_silent_nodes_are_named_and_leave_room_for_the_table() -> None:
    problems = {f"n{i}": "connection refused\x1b[2J" for i in range(40)}
    lines = draw(ClusterReading(ROWS, 2, problems), ViewOptions(), 42, 24, 200)
    assert lines[1].startswith("n0: connection refused") and "\x1b" not in "".join(lines)
    assert lines[6] == "and 35 more nodes with problems"
    assert lines[7].startswith("NODE")


@given(st.integers(1, 60), st.integers(1, 200), st.sampled_from(list(ORDERS)), st.text(max_size=9), st.integers(0, 99))
def test_the_screen_never_exceeds_its_window(height: int, width: int, order: str, words: str, skip: int) -> None:
    lines = draw(ClusterReading(ROWS, 1, {"n3": "x" * 300}), ViewOptions(order, words, skip), 3, height, width)
    assert len(lines) <= max(height, 1) and all(len(line) <= width and line.isprintable() for line in lines)
