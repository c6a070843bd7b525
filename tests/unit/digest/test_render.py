"""The output of a digest, with names that users choose."""

from __future__ import annotations

import json
import re

from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.digest.hours import Hours, IdleHolder, TenantName
from gpu_exporter.reports.digest.parts import Seen
from gpu_exporter.reports.digest.read import Digest, TenantCause
from gpu_exporter.reports.digest.render import render_html, render_json, render_text

EVIL = "<script>alert(1)</script>\x1b[31m\n"


def build() -> Digest:
    return Digest(
        0.0,
        7 * 86400.0,
        {
            TenantName("", "kubernetes", "ml", "", ""): Hours(
                100.0, 90.0, 40.0, 30.0, 12.0, 50.0, 15.0, 0.0, 5.0, 2.5, recorded=100.0
            ),
            TenantName("b", "slurm", "", EVIL, "ada"): Hours(
                10.0, 10.0, 1.0, 9.0, cost=1.0, recorded=9.0, unmetered=10.0
            ),
            TenantName("b", "slurm", "", EVIL, "eve"): Hours(10.0, 10.0, 9.0, 1.0, 1.0, 5.0, 0.5, recorded=10.0),
        },
        [(0.0, Hours(60.0, 50.0, 20.0, 20.0)), (86400.0, Hours(60.0, 60.0, 30.0, None))],
        Hours(200.0, 200.0, 100.0, 20.0),
        [IdleHolder(HolderName("slurm", "", "7"), "job 7", EVIL, 9.0)],
        ["money: 10 GPU-hours have no price (alerts/prices.example.yaml)"],
        causes=[TenantCause(TenantName("", "kubernetes", "ml", "", ""), "cpu_quota", 12.34)],
        currency="EUR",
        idle_short_s=600.0,
    )


def test_the_text_has_correct_sums_and_one_line_per_row() -> None:
    evil = "<script>alert(1)</script>\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    assert re.sub("  +", "  ", render_text(build())).splitlines() == [
        "1970-01-01 00:00 to 1970-01-08 00:00 UTC: 33% of the 120 GPU-hours held were idle (40.0, cost 15.5 EUR); 5.0 made no "
        "progress, cost 2.5 EUR; the period before: 10% of 200",
        "Seen: data of 2 of 2 days",
        "",
        "TENANT  HELD  USED  IDLE  STALLED  UNKNOWN  IDLE %  BUSY %  KWH  COST OF IDLE",
        "ml  100.0  55.0  30.0  5.0  10.0  30%  44%  12.0  15.00",
        f"b: {evil}: 2 users  20.0  10.0  10.0  0.0  0.0  50%  50%  -  -",
        f"b: {evil}/ada  10.0  1.0  9.0  0.0  0.0  90%  10%  -  -",
        f"b: {evil}/eve  10.0  9.0  1.0  0.0  0.0  10%  90%  1.0  0.50",
        "all  120.0  65.0  40.0  5.0  10.0  33%  45%  -  15.50",
        "",
        "HOLDER  OWNER  IDLE GPU-HOURS",
        f"job 7  {evil}  9.0",
        "",
        "TENANT  GPU-HOURS  CAUSE  IN WORDS  WHAT TO CHANGE",
        "ml  12.3  cpu_quota  the CPU quota runs out  ask for more CPUs (Kubernetes: limits.cpu; Slurm: --cpus-per-task)",
        "",
        "DAY FROM (UTC)  HELD  USED  IDLE  STALLED  UNKNOWN",
        "Thu 1970-01-01 00:00  60.0  30.0  20.0  0.0  10.0",
        "Fri 1970-01-02 00:00  60.0  -  -  0.0  0.0",
        "",
        "idle: utilization 0 and no other activity, for any time; in the list of holders for at least 10m (alerts.idle_short)",
        "cost: in EUR",
        "not shown: money: 10 GPU-hours have no price (alerts/prices.example.yaml)",
    ]


def test_names_are_escaped_in_html() -> None:
    page = render_html(build())
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_json_has_the_numbers_of_the_text_and_null_where_the_text_has_a_dash() -> None:
    data = json.loads(render_json(build()))
    ml, ada, eve = data["tenants"]
    assert (ml["held_hours"], ml["used_hours"], ada["account"], ada["user"]) == (100.0, 55.0, EVIL, "ada")
    assert (ada["cost"], ada["cost_idle"], ada["energy_kwh"], eve["cost_idle"]) == (None, None, None, 0.5)
    assert (data["total"]["cost_idle"], data["total"]["stalled_hours"], data["total"]["energy_kwh"]) == (
        15.5,
        5.0,
        None,
    )
    assert [(row["namespace"], row["account"], row["held_hours"]) for row in data["subtotals"]] == [
        ("ml", "", 100.0),
        ("", EVIL, 20.0),
    ]
    assert data["causes"] == [
        {"cluster": "", "scheduler": "kubernetes", "namespace": "ml", "account": "", "user": "", "cause": "cpu_quota", "hours": 12.34, "advice": CAUSES["cpu_quota"].owner}
    ]  # fmt: skip
    assert [day["idle_hours"] for day in data["days"]] == [20.0, None]
    assert (data["currency"], data["idle_short_seconds"], data["seen"]) == ("EUR", 600.0, None)
    unknown = build()
    unknown.holders = unknown.oversized = unknown.before = None
    unknown.currency = ""
    data = json.loads(render_json(unknown))
    assert [data[name] for name in ("holders", "oversized", "before", "currency")] == [None] * 4


def test_a_period_without_hours_causes_no_division_by_zero() -> None:
    assert "UTC: no GPU-hours were held" in render_text(Digest(0.0, 86400.0))


def test_a_day_without_data_is_no_day_of_zero_hours_and_the_first_lines_say_how_much_was_seen() -> None:
    """Prometheus has existed for 40 minutes of three days."""
    some = Hours(2.5, 2.5, 1.1, 1.28, cost=4.0, cost_idle=3.66, recorded=2.5)
    tenant = TenantName("", "kubernetes", "ml", "", "")
    digest = Digest(0.0, 3 * 86400.0, {tenant: some}, [(0.0, None), (86400.0, None), (2 * 86400.0, some)])
    digest.seen = Seen(2400.0, 3 * 86400.0, 3 * 86400.0 - 2400.0, 0.0123)
    first, second, *rest = render_text(digest).splitlines()
    assert first.endswith("51% of the 2.5 GPU-hours held were idle (1.3, cost 3.7)")
    assert second == (
        "Seen: 40m of 3d, data of 1 of 3 days, since 1970-01-03 23:20Z: the whole period is known from 1970-01-06 23:20Z on. "
        "1.2% of the scrapes failed: hours that no exporter counted are in no column"
    )
    assert re.search(r"^Thu 1970-01-01 00:00( +-){5}$", "\n".join(rest), re.MULTILINE)
    assert second.replace("&", "&amp;") in render_html(digest)
    data = json.loads(render_json(digest))
    assert (data["days"][0]["held_hours"], data["days"][2]["held_hours"], data["before"]) == (None, 2.5, None)
    assert (data["seen"]["seconds"], data["seen"]["since"]) == (2400.0, "1970-01-03T23:20:00+00:00")
    digest.seen = Seen(3 * 86400.0 - 60.0, 3 * 86400.0, None, 0.0)
    assert render_text(digest).splitlines()[1] == "Seen: 3d of 3d, data of 1 of 3 days"


def test_hours_by_one_witness_are_neither_used_nor_idle() -> None:
    tenants = {TenantName("", "kubernetes", "ml", "", ""): Hours(10.0, 10.0, 1.0, 2.0, unproven=5.0)}
    figures = json.loads(render_json(Digest(0.0, 86400.0, tenants)))["total"]
    assert (figures["unproven_hours"], figures["used_hours"], figures["idle_hours"]) == (5.0, 3.0, 2.0)
    note = "neither used nor idle: 5.0 GPU-hours at utilization 0, which no second witness confirms"
    assert note in render_text(Digest(0.0, 86400.0, tenants)).splitlines()
    assert "neither used" not in render_text(build())
