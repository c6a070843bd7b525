"""The output of a digest, with names that users choose."""

from __future__ import annotations

import json
import re

from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.digest.read import Digest, Hours, IdleHolder, TenantCause, TenantName
from gpu_exporter.reports.digest.render import render_html, render_json, render_text

EVIL = "<script>alert(1)</script>\x1b[31m\n"


def build() -> Digest:
    return Digest(
        0.0,
        7 * 86400.0,
        {
            TenantName("", "kubernetes", "ml", "", ""): Hours(100.0, 90.0, 40.0, 30.0, 12.0, 50.0, 15.0, 0.0, 5.0, 2.5),
            TenantName("b", "slurm", "", EVIL, "ada"): Hours(10.0, 10.0, 1.0, 9.0),
        },
        [(0.0, Hours(60.0, 50.0, 20.0, 20.0)), (86400.0, Hours(50.0, 50.0, 21.0, 19.0))],
        Hours(200.0, 200.0, 100.0, 20.0),
        [IdleHolder(HolderName("slurm", "", "7"), "job 7", EVIL, 9.0)],
        ["money: 10 GPU-hours have no price (alerts/prices.example.yaml)"],
        causes=[TenantCause(TenantName("", "kubernetes", "ml", "", ""), "cpu_quota", 12.34)],
    )


def test_the_text_has_correct_sums_and_one_line_per_row() -> None:
    assert re.sub("  +", "  ", render_text(build())).splitlines() == [
        "1970-01-01 00:00 to 1970-01-08 00:00 UTC: 35% of the 110 GPU-hours held were idle (39.0, cost 15.0); 5.0 made no "
        "progress, cost 2.5; the period before: 10% of 200",
        "",
        "TENANT  HELD  USED  IDLE  STALLED  UNKNOWN  IDLE %  BUSY %  KWH  COST OF IDLE",
        "ml  100.0  55.0  30.0  5.0  10.0  30%  44%  12.0  15.00",
        "b: <script>alert(1)</script>\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}/ada  10.0  1.0  9.0  0.0  0.0  90%  10%  -  -",
        "all  110.0  56.0  39.0  5.0  10.0  35%  41%  12.0  15.00",
        "",
        "HOLDER  OWNER  IDLE GPU-HOURS",
        "job 7  <script>alert(1)</script>\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}  9.0",
        "",
        "TENANT  CAUSE  GPU-HOURS WITH THIS CAUSE",
        "ml  cpu_quota  12.3",
        "",
        "DAY FROM (UTC)  HELD  USED  IDLE  STALLED  UNKNOWN",
        "Thu 1970-01-01 00:00  60.0  30.0  20.0  0.0  10.0",
        "Fri 1970-01-02 00:00  50.0  31.0  19.0  0.0  0.0",
        "",
        "not shown: money: 10 GPU-hours have no price (alerts/prices.example.yaml)",
    ]


def test_names_are_escaped_in_html() -> None:
    page = render_html(build())
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_json_has_all_values() -> None:
    data = json.loads(render_json(build()))
    assert data["tenants"][0]["held_hours"] == 100.0
    assert data["tenants"][1]["account"] == EVIL
    assert (data["total"]["cost_idle"], data["total"]["stalled_hours"]) == (15.0, 5.0)
    assert data["causes"] == [
        {"cluster": "", "scheduler": "kubernetes", "namespace": "ml", "account": "", "user": "", "cause": "cpu_quota", "hours": 12.34}
    ]  # fmt: skip
    assert [day["idle_hours"] for day in data["days"]] == [20.0, 19.0]


def test_a_period_without_hours_causes_no_division_by_zero() -> None:
    assert "UTC: no GPU-hours were held" in render_text(Digest(0.0, 86400.0))


def test_a_day_without_data_is_no_day_of_zero_hours_and_the_sentence_agrees_with_the_table() -> None:
    """Prometheus has existed for 40 minutes of three days."""
    some = Hours(2.5, 2.5, 1.1, 1.28, cost=4.0, cost_idle=3.66)
    tenant = TenantName("", "kubernetes", "ml", "", "")
    digest = Digest(0.0, 3 * 86400.0, {tenant: some}, [(0.0, None), (86400.0, None), (2 * 86400.0, some)])
    text = render_text(digest)
    assert "51% of the 2.5 GPU-hours held were idle (1.3, cost 3.7). Data of 1 of 3 days\n" in text
    assert re.search(r"^Thu 1970-01-01 00:00( +-){5}$", text, re.MULTILINE)
    data = json.loads(render_json(digest))
    assert (data["days"][0]["held_hours"], data["days"][2]["held_hours"], data["before"]) == (None, 2.5, None)
