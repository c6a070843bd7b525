"""docs/causes.md: every cause has its section, and misses are published."""

from __future__ import annotations

import re
from pathlib import Path

from gpu_exporter.diagnosis.causes.rules import RULES

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "causes.md").read_text("utf-8")


def test_every_cause_has_a_section_that_links_can_reach() -> None:
    sections = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert sections == list(RULES)
    for name in RULES:
        assert f"[{name}](#{name})" in PAGE


def test_the_page_publishes_its_misses() -> None:
    assert "The misses:\n\n| job |" in PAGE
    assert "| one unnamed loader cannot keep up | too_few_workers | low | (too_few_workers) |" in PAGE
    assert "expected precision if 30 % of jobs are faulty" in PAGE
