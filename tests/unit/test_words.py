"""Text stays plain: no file has more findings of tools/words.py than it had."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import words

FILES = words.list_files()


def test_no_file_has_more_findings_than_its_baseline_and_the_baseline_goes_down() -> None:
    baseline = words.read_baseline()
    counts = {path.relative_to(words.ROOT).as_posix(): words.find(path) for path in FILES}
    more = {path: found for path, found in counts.items() if len(found) > baseline.get(path, 0)}
    assert more == {}, "see CONTRIBUTING.md, Plain English"
    fewer = {path for path, count in baseline.items() if len(counts.get(path, ())) < count}
    assert fewer == set(), "lower the baseline: python -m tools.words --update"


@pytest.mark.parametrize(
    "line",
    ["# Nobody has it.", "Read each 5 s.", "The rest is none.", "a fault of ours", "It is said once.", "The mark stands until then.", "left in peace", "it takes so long.", "Asked anew.", "If there is one."],
)  # fmt: skip
def test_each_rule_finds_its_words(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{line}\n", "utf-8")
    assert len(words.find(page)) == 1
    module = tmp_path / "module.py"
    module.write_text(f'"""{line}"""\nx = 1  # {line}\ny = f"{line}"\n', "utf-8")
    assert len(words.find(module)) == 3


def test_names_of_tests_are_text_and_other_names_are_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def test_nobody_is_there(): ...\nnobody = 1\n", "utf-8")
    assert [finding.line for finding in words.find(module)] == [1]


@pytest.mark.parametrize("line", ["It is one of two.", "each of them, each GPU", "each time"])  # fmt: skip
def test_other_uses_of_the_same_words_are_not_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{line}\n", "utf-8")
    assert words.find(page) == []
