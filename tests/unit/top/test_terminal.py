"""`top --once`: texts of a hostile node reach the terminal only without control characters."""

from __future__ import annotations

import pytest

from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reports.top import terminal as top
from gpu_exporter.reports.top.nodes import ClusterReading, parse_node


def test_control_characters_from_a_node_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "read_nodes", lambda *_: ClusterReading([], 0, {"n\x1b1": "down\x1b]0;pwn\x07\nnext"}))
    assert top.print_once([parse_node("n1")], top.ViewOptions(), fetch_text) == 3
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.rstrip("\n").isprintable() and "down" in said.err
