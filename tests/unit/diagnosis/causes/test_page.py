"""docs/causes.md: every cause has its section, and misses are published."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_exporter.diagnosis.causes.rules import RULES

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "causes.md").read_text("utf-8")


def test_every_cause_has_a_section_that_links_can_reach() -> None:
    sections = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert sections == [rule.name for rule in RULES]
    for rule in RULES:
        assert f"[{rule.name}](#{rule.name})" in PAGE


def test_the_page_publishes_its_misses() -> None:
    assert "| miss |" in PAGE
    assert "expected precision if 30 % of jobs are faulty" in PAGE
