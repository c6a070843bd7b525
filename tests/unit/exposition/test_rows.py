"""Rows for people: a reason is one short sentence, and loses nothing that changes its meaning."""

from __future__ import annotations

import pytest

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.rows import WHY_MAX, Row
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.state import Window, judge_state, state_rules


def short(why: str) -> str:
    return Row("0", "H100", None, None, None, None, "job 7", "", None, None, "stalled", why).short_why


@pytest.mark.parametrize(("confidence", "which"), [("medium", "it waits or hangs"), ("high", "it hangs")])
def test_the_reason_of_a_stalled_row_says_whether_it_waits_or_hangs_however_long_its_evidence_is(
    confidence: str, which: str
) -> None:
    spin = Spin(1500.0, confidence, "100 % busy; at 100 W, flat within 2 W (at rest 70 W); " + "much more; " * 40)
    verdict = judge_state(Window([1.0] * 10, 7200.0, None, spin=spin), state_rules(Settings()))
    assert verdict.state == "stalled"
    why = short(verdict.evidence)
    assert len(why) <= WHY_MAX
    assert why.startswith(f"no progress for 25m, {which} ({confidence} confidence): 100 % busy")
    assert short("word " * 100).endswith("word…") and len(short("word " * 100)) <= WHY_MAX
