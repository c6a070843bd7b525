"""Three nights of a server in a cluster without a reconciler, in promtool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rules.cases_servers import nights
from tests.rules.promtool import build, merge, run
from tests.testbed.servers import require

pytestmark = pytest.mark.servers


def test_no_night_of_a_server_is_reported_where_kube_state_metrics_shows_it(tmp_path: Path) -> None:
    require("promtool")
    rules = build(tmp_path / "rules", {})
    for path in rules.iterdir():  # three days of all rules would take minutes
        if path.stem not in ("seam", "owners"):
            path.unlink()
    holds, text = run(merge(list(nights())), tmp_path, rules)
    assert holds, text[:20_000]
