"""The screen of `top`: sort orders, filter words, and the size of the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.model.rows import NAMES, TONES, Row
from gpu_exporter.reports.top.nodes import ClusterReading, NodeRow, list_problems
from gpu_exporter.reports.top.screen import ORDERS, ViewOptions, choose, draw, move, summary, table


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
    closed = [
        each._replace(row=each.row._replace(state="closed")) if each.row.state == "free" else each for each in ROWS
    ]
    assert ", 0 free, 1 closed, 1 unknown, " in summary(ClusterReading(closed, 2, {}), 2)
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


def shown(reading: ClusterReading, wish: ViewOptions, nodes: int, height: int, width: int) -> list[str]:
    return [line.text for line in draw(reading, wish, nodes, height, width)]


REASON = (
    "idle for 2h; no process on the GPU, and the holder uses 0.0 CPUs; so it waits for a user who has gone home; " * 2
    + "!"
)
ADVICE = "end the job if its work is done; if it computes on CPUs, ask for a GPU only in the step that uses it"
WASTES = [
    row("1", holder="vision/augment-resnet50-2/main", owner="mira/phys", name="NVIDIA H100 80GB HBM3",
        cause="cpu_oversubscribed medium", advice=ADVICE, **(IDLE | {"state": "held_no_process", "why": REASON})),
    row("2", holder="vision/augment-resnet50-2/main", owner="mira/phys", name="NVIDIA H100 80GB HBM3",
        cause="cpu_oversubscribed medium", **(IDLE | {"state": "held_no_process", "why": REASON})),
]  # fmt: skip
WASTE = ClusterReading([NodeRow("gpu-01", each) for each in WASTES], 1, {})


@pytest.mark.parametrize(
    ("width", "order", "columns"),
    [
        (60, "waste", "GPU UTIL HOLDER IDLE STATE CAUSE"),
        (80, "waste", "GPU UTIL HOLDER IDLE STATE CAUSE"),
        (80, "temp", "GPU UTIL TEMP HOLDER IDLE STATE CAUSE"),
        (120, "waste", "GPU UTIL POWER HOLDER OWNER HELD IDLE STATE CAUSE"),
        (160, "waste", "GPU UTIL HOLDER OWNER IDLE STATE CAUSE WHY"),
        (160, "held", "GPU UTIL HOLDER OWNER HELD IDLE STATE CAUSE WHY"),
        (200, "waste", "GPU UTIL POWER HOLDER OWNER HELD IDLE STATE CAUSE WHY"),
        (400, "waste", " ".join(NAMES)),
    ],
)
def test_a_window_shows_the_columns_that_fit_and_the_one_that_rows_are_sorted_by(
    width: int, order: str, columns: str
) -> None:
    head, *rows = table(WASTE.rows, with_node=False, width=width, order=order)
    assert head.split() == columns.split()
    assert max(map(len, rows)) <= width
    assert all("held_no_process" in line and "cpu_over" in line for line in rows if width >= 80)
    if "WHY" in columns:
        assert len(rows[0]) >= width - 1 or ADVICE in rows[0], "no room is wasted"
        assert len(rows[0]) - head.index("WHY") >= (80 if width >= 200 else 30)


def test_a_holder_loses_its_middle_where_the_cause_would_not_fit() -> None:
    assert "vision/augment-resnet50-2/main" in table(WASTE.rows, with_node=False, width=90)[1]
    (line, _) = table(WASTE.rows, with_node=False, width=80)[1:]
    assert "vision/augme…snet50-2/main" in line and "cpu_oversubscribed" in line and "medium" not in line


def test_no_column_goes_where_every_line_fits() -> None:
    full = table(ROWS, with_node=True)
    width = max(map(len, full))
    assert table(ROWS, with_node=True, width=width) == full
    assert table(ROWS, with_node=True, width=width - 1) != full


@pytest.mark.parametrize("width", [80, 200])
def test_the_whole_reason_and_advice_of_the_chosen_row_are_at_the_bottom(width: int) -> None:
    for at in (0, 1):  # the advice is only in the first row of its holder
        lines = shown(WASTE, move(WASTE, ViewOptions(), at), 1, 24, width)
        said = " ".join(line.strip() for line in lines[4:-1])
        assert f"why: {REASON} to change: {ADVICE} NVIDIA H100" in said
        assert f"GPU {at + 1}: vision/augment-resnet50-2/main of mira/phys, held_no_process, cpu_" in said
        assert "util 0%, memory 1.0 GiB, power 300 W, temp 50 °C, held 2h30m, idle 0s" in said
        assert lines[-2] != "" and not any(line.endswith("…") for line in lines[4:-1])
    assert "GPU 1: ml/pod-1/main, held_idle" in " ".join(shown(READING, ViewOptions(chosen=CHOSEN), 2, 24, 80))


CHOSEN = ("n1", "1", "ml/pod-1/main")


def test_a_small_window_keeps_half_of_its_rows() -> None:
    lines = shown(WASTE, ViewOptions(), 1, 10, 40)
    assert lines[1].startswith("GPU") and lines[2].startswith("1 ") and lines[3].startswith("2 ")
    assert lines[-2].endswith("…")
    assert shown(WASTE, ViewOptions(), 1, 5, 40)[2].startswith("1 ")


def test_the_chosen_row_stays_chosen_where_another_reading_puts_it_elsewhere() -> None:
    wish = move(READING, ViewOptions(), 1)
    assert wish.chosen == CHOSEN
    later = [each._replace(row=each.row._replace(idle_s=99_999.0)) if each.row.gpu == "1" else each for each in ROWS]
    (first,) = [line for line in draw(ClusterReading(later, 2, {}), wish, 2, 24, 80) if line.style == "chosen"]
    assert first.text.split()[:2] == ["n1", "1"]
    gone = ClusterReading([each for each in ROWS if (each.node, each.row.gpu) != ("n1", "1")], 2, {})
    (second,) = [line for line in draw(gone, wish, 2, 24, 80) if line.style == "chosen"]
    assert second.text.split()[:2] == ["n1", "0"], "the row that took its place"
    assert move(READING, wish, -9).at == 0
    assert move(READING, wish, 99).at == len(ROWS) - 1
    assert move(READING, wish._replace(words="no such row"), 1).chosen is None


@pytest.mark.parametrize("state", [*TONES, "of a newer exporter"])
def test_the_state_of_a_row_is_marked_with_its_tone(state: str) -> None:
    reading = ClusterReading([NodeRow("n1", row("0", state=state))], 1, {})
    line = draw(reading, ViewOptions(), 1, 24, 120)[2]
    assert line.state is not None
    first, last, tone = line.state
    assert (line.text[first:last], tone) == (state, TONES.get(state, "neutral"))


def test_rows_that_do_not_fit_are_counted_and_can_be_chosen() -> None:
    lines = shown(READING, ViewOptions("gpu"), 2, 6, 200)
    assert lines[0].startswith("2 of 2 nodes") and lines[1].startswith("NODE") and lines[2].split()[:2] == ["n1", "0"]
    assert lines[-1].endswith("0 rows above, 4 below")
    wish = move(READING, ViewOptions("gpu"), 99)
    lines = shown(READING, wish, 2, 6, 200)
    assert lines[4].split()[:2] == ["n2", "6:1/0"] and lines[-1].endswith("4 rows above, 0 below")
    assert "with 'ml'" in shown(READING, ViewOptions(words="ml"), 2, 30, 200)[-1]


def test_silent_nodes_are_named_and_leave_room_for_the_table() -> None:
    problems = {f"n{i}": f"reason {i}\x1b[2J" for i in range(40)}
    lines = shown(ClusterReading(ROWS, 2, problems), ViewOptions(), 42, 24, 200)
    assert lines[1].startswith("n0: reason 0") and "\x1b" not in "".join(lines)
    assert lines[6] == "and 35 more problems of nodes"
    assert lines[7].startswith("NODE")


@given(
    st.integers(1, 60), st.integers(1, 300), st.sampled_from(list(ORDERS)), st.text(max_size=9), st.integers(-9, 99),
    st.booleans(),
)  # fmt: skip
def test_the_screen_never_exceeds_its_window(
    height: int, width: int, order: str, words: str, step: int, is_waste: bool
) -> None:
    reading = WASTE if is_waste else ClusterReading(ROWS, 1, {"n3": "x" * 300})
    wish = move(reading, ViewOptions(order, words), step)
    lines = draw(reading, wish, 3, height, width)
    assert len(lines) <= max(height, 1) and all(len(line.text) <= width and line.text.isprintable() for line in lines)
    rows = choose(reading.rows, wish)
    if rows and height - len(list_problems(reading)) >= 4:
        assert [line.style for line in lines].count("chosen") == 1
