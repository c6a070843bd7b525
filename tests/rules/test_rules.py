"""The rules in promtool: what fires, and what does not, in every world of cases.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rules.cases import all_cases
from tests.rules.promtool import Case, build, run
from tests.testbed.servers import require

PARTS = 8  # promtool takes a second for a case, on one core


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bool, str]]:
    require("promtool")
    cases: dict[tuple[str, tuple[tuple[str, str], ...]], list[Case]] = {}
    for case in all_cases():
        cases.setdefault((case.optional, tuple(case.settings.items())), []).append(case)

    def run_part(part: tuple[str, dict[str, str], list[Case]]) -> tuple[bool, str]:
        optional, settings, same = part
        directory = tmp_path_factory.mktemp("cases")
        return run(same, directory, build(directory / "rules", settings, optional))

    parts = [
        (optional, dict(settings), same[part::PARTS])
        for (optional, settings), same in cases.items()
        for part in range(min(PARTS, len(same)))
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_part, parts))


def test_every_case_fires_what_it_names_and_nothing_else(outcomes: list[tuple[bool, str]]) -> None:
    assert all(holds for holds, _ in outcomes), "\n".join(text for holds, text in outcomes if not holds)[:20_000]
