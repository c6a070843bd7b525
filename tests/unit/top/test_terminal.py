"""`top` at any terminal: texts of a hostile node, colours, unknown types, and JSON."""

from __future__ import annotations

import json

import pytest

from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.common.model.rows import BAD, GOOD, NEUTRAL, TONES, WARN, Row
from gpu_exporter.reports.top import terminal as top
from gpu_exporter.reports.top.nodes import ClusterReading, NodeRow, parse_node


def test_control_characters_from_a_node_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "read_nodes", lambda *_: ClusterReading([], 0, {"n\x1b1": "down\x1b]0;pwn\x07\nnext"}))
    assert top.print_once([parse_node("n1")], top.ViewOptions(), fetch_text) == 3
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.rstrip("\n").isprintable() and "down" in said.err


def test_the_json_has_each_node_with_its_problem_and_the_chosen_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(gpu: str, idle_s: float | None) -> NodeRow:
        return NodeRow("n1", Row(gpu, "H100", 0.5, None, None, 40.0, f"job {gpu}", "", 60.0, idle_s, "low", "w" * 300))

    reading = ClusterReading([row("0", None), row("1", 7.0), row("2", 9.0)], 1, {"n2": "Connection refused"})
    monkeypatch.setattr(top, "read_nodes", lambda *_: reading)
    nodes = [parse_node(name) for name in ("n1", "n2")]
    assert top.print_once(nodes, top.ViewOptions(words="job"), fetch_text, "json") == 4
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["nodes"] == [{"node": "n1", "problem": ""}, {"node": "n2", "problem": "Connection refused"}]
    assert [(each["node"], each["gpu"], each["idle_seconds"]) for each in found["rows"]] == [
        ("n1", "2", 9.0), ("n1", "1", 7.0), ("n1", "0", None),
    ]  # fmt: skip
    first = found["rows"][0]
    assert (first["utilization_ratio"], first["memory_used_bytes"], first["why"]) == (0.5, None, "w" * 300)
    assert said.err == "gpu-exporter: n2: Connection refused\n"


def luminance(colour: int) -> float:
    """Of a colour of xterm (0 to 7: as its default palette has them), by WCAG 2."""
    if colour < 8:
        levels = [(0xE5 if colour == 7 else 0xCD) * (colour >> bit & 1) for bit in (0, 1, 2)]
    else:
        levels = [(0, 95, 135, 175, 215, 255)[(colour - 16) // 6**power % 6] for power in (2, 1, 0)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (each / 255 for each in levels)]
    return sum(share * each for share, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("of_8", [False, True])
@pytest.mark.parametrize("tone", top.COLOURS)
def test_a_coloured_state_is_readable_whatever_the_background_of_the_terminal(tone: str, of_8: bool) -> None:
    """Its own background comes with it. The contrast is that which WCAG AA asks for."""
    text, back = top.COLOURS[tone][of_8]
    dark, light = sorted((luminance(text), luminance(back)))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_every_state_that_needs_a_look_has_a_colour() -> None:
    assert set(top.COLOURS) == {GOOD, WARN, BAD} == set(TONES.values()) - {NEUTRAL}
