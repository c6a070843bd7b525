"""Text stays plain: tools/words.py finds nothing that cannot be correct, and prints what readers may have to read twice."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tests.limits import Advice
from tools import words


def test_no_text_has_wording_that_cannot_be_correct() -> None:
    """See CONTRIBUTING.md, Plain English."""
    wrong = []
    for path in words.list_files():
        for line, rule, text in words.find(path):
            found = f"{path.relative_to(words.ROOT)}:{line}: {text!r}: {rule}"
            if rule in words.WRONG:
                wrong.append(found)
            else:
                warnings.warn(found, Advice, stacklevel=1)
    assert wrong == []


WRONG = ["Read each 5 s.", "It runs since two hours.", "in the the file", "Two informations are missing."]
ODD = ["# Nobody has it.", "The rest is none.", "a fault of ours", "It is said once.", "The mark stands until then.", "left in peace", "it takes so long.", "Asked anew.", "If there is one.", "NVML allows to read it."]  # fmt: skip


@pytest.mark.parametrize("line", [*WRONG, *ODD])
def test_each_rule_finds_its_words(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{line}\n", "utf-8")
    assert [finding.rule in words.WRONG for finding in words.find(page)] == [line in WRONG]
    module = tmp_path / "module.py"
    module.write_text(f'"""{line}"""\nx = 1  # {line}\ny = f"{line}"\n', "utf-8")
    assert [finding.line for finding in words.find(module)] == [1, 2, 3]


def test_names_of_tests_are_text_and_other_names_are_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def test_nobody_is_there(): ...\nnobody = 1\n", "utf-8")
    assert [finding.line for finding in words.find(module)] == [1]


@pytest.mark.parametrize(
    "line",
    ["It is one of two.", "each of them, each GPU", "each time", "The fan stands still.", "Three spans, each 5 s long.", "read each second", "since two hours ago", "as of of-day 3"],
)  # fmt: skip
def test_other_uses_of_the_same_words_are_not_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{line}\n", "utf-8")
    assert words.find(page) == []


@pytest.mark.parametrize(
    "text",
    [
        "# Generated from alerts/src/owners.yaml by tools/rules.py: do not edit.\n# Read each 5 s.\n",
        "<!-- generated: table -->\nRead each 5 s.\n<!-- end -->\n",
    ],
)
def test_a_generated_text_is_looked_at_in_its_source_only(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert words.find(page) == []
    page.write_text(f"{text}Read each 6 s.\n".removeprefix("# Generated"), "utf-8")
    assert [finding.text for finding in words.find(page)][-1:] == ["each 6 s"]


def test_every_generated_file_is_known_as_one() -> None:
    """By its first lines, by the marks around its part, or since it is no text that people read."""
    from tools.generate import build

    read = {*words.list_files()}
    made = {path for files in build() for path in files} & read
    wrong = [
        path
        for path in made
        if not words.GENERATED.search((text := path.read_text("utf-8"))[: words.HEAD])
        and not words.GENERATED_PART.search(text)
    ]
    assert made and wrong == []
