"""Names that users depend on change only together with a line of the changelog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tools.names import list_names, update

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "names.txt"


def test_the_golden_list_has_every_public_name_and_the_changelog_names_each_change(
    golden: Callable[[str, str], None],
) -> None:
    """`make golden` writes the list only if CHANGELOG.md names what is new and what is gone, below Unreleased."""
    before = GOLDEN.read_text("utf-8") if GOLDEN.exists() else ""
    text, unnamed = update(before, list_names(), (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert "\n".join(unnamed) == "", "name them in CHANGELOG.md below Unreleased, in backquotes"
    golden("names.txt", text)


LOG = "# Changelog\n\n## [Unreleased]\n\n{}\n"
RELEASED = LOG + "\n## [0.2.0] - 2027-01-01\n\n{}\n\n## [0.1.0] - 2026-12-01\n\n- `gpu_old_ratio`\n"
BEFORE = ["flag top --filter", "metric gpu_old_ratio{gpu}", "value agent.a"]
AFTER = ["flag top --filter", "metric gpu_new_ratio{gpu}", "value agent.a"]
RENAMED = ["+ metric gpu_new_ratio{gpu}", "- metric gpu_old_ratio{gpu}"]


@pytest.fixture
def first() -> str:
    """The first list, which needs no changelog."""
    text, unnamed = update("", BEFORE, LOG.format(""))
    assert unnamed == [] and text.splitlines()[1:] == BEFORE
    return text


def test_a_new_name_for_a_metric_is_two_changes(first: str) -> None:
    assert update(first, AFTER, LOG.format("- A metric has another name."))[1] == RENAMED
    assert update(first, AFTER, LOG.format("- `gpu_new_ratio` is new."))[1] == RENAMED[1:]
    text, unnamed = update(first, AFTER, LOG.format("- `gpu_new_ratio` replaces `gpu_old_ratio`."))
    assert unnamed == []
    assert text.splitlines()[1:] == [BEFORE[0], *RENAMED, BEFORE[2]]
    assert update(text, AFTER, LOG.format(""))[1] == RENAMED, "the line of the changelog has to remain"
    assert update(text, BEFORE, LOG.format("")) == (first, []), "taken back"


def test_labels_are_part_of_a_name_and_a_star_names_several(first: str) -> None:
    labelled = [*BEFORE[:1], "metric gpu_old_ratio{gpu,uuid}", "value agent.b.c"]
    assert len(update(first, labelled, LOG.format(""))[1]) == 4
    assert update(first, labelled, LOG.format("- `gpu_old_ratio`: `uuid`. `agent.*`"))[1] == []
    assert update(first, ["flag top --find", *BEFORE[1:]], LOG.format("- `--find`, was `top --filter`"))[1] == []


def test_a_release_makes_the_changes_plain(first: str) -> None:
    text, _ = update(first, AFTER, LOG.format("- `gpu_new_ratio` replaces `gpu_old_ratio`."))
    assert update(text, AFTER, RELEASED.format("", "- Nothing."))[1] == RENAMED
    released, unnamed = update(text, AFTER, RELEASED.format("", "- `gpu_new_ratio` replaces `gpu_old_ratio`."))
    assert unnamed == [] and released.splitlines()[1:] == sorted(AFTER)
    _, unnamed = update(released, BEFORE, RELEASED.format("", "- `gpu_new_ratio` replaces `gpu_old_ratio`."))
    assert unnamed == ["- metric gpu_new_ratio{gpu}", "+ metric gpu_old_ratio{gpu}"], "older sections do not count"
