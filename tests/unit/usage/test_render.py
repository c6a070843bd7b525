"""The output of a report: goldens of each form, its sums, and names that users choose."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from tests.testbed.usage import EVIL, build_report, use

from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.reports.usage.model import PARTS, Capacity, Covered, GpuHours, ReportSource, UsageReport, Who
from gpu_exporter.reports.usage.render.forms import FORMS
from gpu_exporter.reports.usage.render.heat import week_of
from gpu_exporter.reports.usage.render.text import draw_bar, render_text
from gpu_exporter.reports.usage.render.to_json import render_json
from gpu_exporter.reports.usage.render.view import LEVELS, ReportView

DAY_S = 86400.0
ML = Who(scheduler="kubernetes", namespace="ml")


def phys(user: str, cluster: str = "") -> Who:
    return Who(cluster, "slurm", "", "phys", user)


def show(report: UsageReport, **view: object) -> str:
    """The text with single spaces between columns."""
    return re.sub("  +", "  ", render_text(report, ReportView(**view)))  # type: ignore[arg-type]


class Elements(HTMLParser):
    """Every element of a page, its attributes, and whether all of them are closed in order."""

    VOID = frozenset(("meta", "br"))

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("form", "name"),
    [("text", "report.txt"), ("json", "report.json"), ("csv", "report.csv"), ("html", "report.html"), ("mail", "report.mail.html")],
)  # fmt: skip
def test_each_form_matches_its_golden_file(form: str, name: str, golden: Callable[[str, str], None]) -> None:
    report = build_report()
    if form == "json":  # other hours have the same form; those of the third day are known, and unknown for a while
        report.hours = dict(list(report.hours.items())[48:72])
    golden(name, FORMS[form](report, ReportView()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by", LEVELS)
def test_the_same_report_gives_the_same_bytes_in_any_order_of_its_lines(form: str, by: str) -> None:
    report, other = build_report(), build_report()
    other.lines = dict(reversed(other.lines.items()))
    other.hours = dict(reversed(other.hours.items()))
    other.capacity.reverse()
    assert FORMS[form](report, ReportView(by)) == FORMS[form](other, ReportView(by))


@pytest.mark.parametrize("form", ["html", "mail"])
@pytest.mark.parametrize("by", LEVELS)
def test_a_page_is_well_formed_runs_nothing_and_loads_nothing(form: str, by: str) -> None:
    page = FORMS[form](build_report(), ReportView(by))
    found = Elements(page)
    assert found.open == []
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    assert not any(name.startswith("on") or name in ("src", "href", "xlink:href") for name in found.attributes)
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page
    assert "\x1b" not in page and "\u202e" not in page
    assert ("svg" in found.tags) == (form == "html"), "mail programs drop plots"
    assert "&lt;script&gt;alert(1)" in page


def test_the_headline_has_the_waste_its_owners_and_what_is_not_certain() -> None:
    lines = render_text(build_report(), ReportView()).splitlines()
    assert lines[:8] == [
        "GPU use, 2026-11-23 00:00 to 2026-11-30 00:00 UTC (7d)",
        "",
        "20% of the 10,988 GPU-hours held were idle: 2,147 GPU-hours, 8,017 of 45,135 EUR. The 7d before: 15% of 10,000.",
        "Idle most: vision 1,900 GPU-hours (7,500 EUR), phys 238 GPU-hours (476 EUR).",
        "Stalled: 1% of the hours held (96.0 GPU-hours, 432 EUR): fully busy, but without progress.",
        "To be investigated: 6% of the hours held (640 GPU-hours, 2,780 EUR): almost no activity was measured, which does not confirm that the GPU was idle.",
        "Unknown: 2% of the hours held (177 GPU-hours, 472 EUR), never counted as idle: no source measured the GPU.",
        "Seen: 6d19h of 7d, data of 6 of 7 days. 0.4% of the scrapes failed: lost hours are not counted. "
        "Sources: dcgm-exporter, kube-state-metrics.",
    ]


def test_a_source_of_gauges_alone_confirms_nothing() -> None:
    """All its zeros are to be investigated, and money is shown there only."""
    lines = {ML: use(4.0, None, used=6.0, unproven=4.0, idle=None, stalled=None, low=None)}
    text = show(UsageReport(0.0, DAY_S, lines=lines, currency="EUR"))
    first = "10.0 GPU-hours, 40.0 EUR were held. No source can confirm how many of them were idle."
    assert text.splitlines()[2:4] == [first, "To be investigated most: ml 4.0 GPU-hours (16.0 EUR)."]
    assert "NAME  HELD  TO INVESTIGATE  USED  BUSY %  HELD, EUR  OF THE HOURS HELD" in text
    assert "not shown separately: low, stalled, idle. The sources do not report these parts" in text
    page = FORMS["html"](UsageReport(0.0, DAY_S, lines=lines), ReportView())
    assert "no source reports it" in page and 'class="p-idle"' not in page.partition("</style>")[2]


def test_the_headline_names_capacity_that_nobody_holds_only_if_all_of_it_is_known() -> None:
    capacity = [Capacity("", "H100", 70.0, 40.0, 30.0), Capacity("", "A30", 30.0, 10.0, 20.0)]
    report = UsageReport(0.0, DAY_S, lines={ML: use(None, None, used=50.0)}, capacity=capacity)
    assert "No pod and no job held 50% of the 100 GPU-hours present." in render_text(report, ReportView())
    report.capacity[0] = capacity[0]._replace(free=None)
    assert "No pod" not in render_text(report, ReportView())


def test_members_are_below_their_group_and_the_rest_is_one_row() -> None:
    lines = {phys(f"u{at:02}"): use(None, 0.0, idle=10.0 + at, used=1.0) for at in range(20)}
    lines |= {Who(namespace=f"n{at}"): use(None, 0.0, idle=1.0 + at) for at in range(5)}
    names = [line.partition("  ")[0] for line in show(UsageReport(0.0, DAY_S, lines=lines), top=3).splitlines()]
    at = names.index("phys: 20 users")
    rows = render_text(UsageReport(0.0, DAY_S, lines=lines), ReportView(top=3)).splitlines()[at : at + 7]
    assert [re.sub("  +.*", "", row.strip()) for row in rows] == [
        *("phys: 20 users", "phys/u19", "19 others", "n4", "n3", "3 others", "all")
    ]


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("tenant", ["east: ml", "west: phys/ada"]),
        ("namespace", ["east: ml/train", "west: (no namespace)"]),
        ("account", ["east: (no account)", "west: phys/ada"]),
        ("user", ["east: (no user)", "west: ada"]),
        ("team", ["east: vision", "west: (no team)"]),
        ("workload", ["east: ml/train", "west: (no workload)"]),
        ("model", ["H100", "A30"]),
    ],
)
def test_groups_of_two_clusters_stay_apart(by: str, names: list[str]) -> None:
    lines = {
        Who("east", "kubernetes", "ml", "", "", "vision", "train", "ml/train-0", "H100"): use(None, 0.0, idle=2.0),
        Who("west", "slurm", "", "phys", "ada", "", "", "job 7", "A30"): use(None, 0.0, idle=1.0),
    }
    text = show(UsageReport(0.0, DAY_S, lines=lines), by=by)
    table = text.partition("OF THE HOURS HELD\n")[2].splitlines()[:2]
    assert [row.partition("  ")[0] for row in table] == names


def test_the_columns_of_a_row_add_up_to_the_hours_held() -> None:
    """Parts of few hours share a column, and hours that no source divides into parts are in it, too."""
    lines = {
        ML: use(None, 0.0, used=1000.0, idle=400.0, starting=1.0, low=None),
        phys("ada"): GpuHours(50.0, dict.fromkeys(PARTS)),
    }
    text = show(UsageReport(0.0, DAY_S, lines=lines))
    assert "NAME  HELD  OTHER  BUSY %" in text, "one unknown part makes the sum of a part unknown, never 0"
    del lines[phys("ada")]
    text = show(UsageReport(0.0, DAY_S, lines=lines))
    assert "NAME  HELD  IDLE  IDLE %  USED  OTHER  BUSY %" in text
    assert re.search(r"^ml  1,401  400  29%  1,000  1\.0 ", text, re.MULTILINE)
    assert "other: starting 1.0" in text.splitlines()


def test_money_is_shown_where_it_is_known_and_nothing_unknown_is_zero() -> None:
    lines = {ML: use(2.0, None, idle=50.0, used=50.0), phys("ada"): use(None, 5.0, idle=9.0, used=1.0)}
    text = show(UsageReport(0.0, DAY_S, lines=lines, currency="EUR"))
    assert re.search(r"^ml  100  50\.0  50%  100  50\.0  -  200 ", text, re.MULTILINE)
    assert re.search(r"^phys/ada  10\.0  9\.0  90%  -  1\.0  50%  - ", text, re.MULTILINE)
    assert re.search(r"^all  110  59\.0  54%  -  51\.0  -  - ", text, re.MULTILINE)
    assert "EUR" not in show(UsageReport(0.0, DAY_S, lines={phys("ada"): lines[phys("ada")]}, currency="EUR"))


def test_confirmed_holders_and_those_to_be_investigated_are_in_two_tables() -> None:
    text = render_text(build_report(), ReportView())
    idle = text.partition("Idle holders (confirmed)")[2].partition("\n\n")[0]
    possibly = text.partition("Holders to be investigated")[2].partition("\n\n")[0]
    assert "vision/train-resnet-3" in idle and "nlp/serving-0" not in idle
    assert "nlp/serving-0" in possibly and "vision/train-resnet-3" not in possibly
    assert "12,000" in possibly, "zero at all samples: their number"


def test_a_period_without_hours_causes_no_division_by_zero() -> None:
    for form, render in FORMS.items():
        shown = render(UsageReport(0.0, DAY_S), ReportView())
        assert form in ("json", "csv", "tsv") or "No GPU-hours were held." in shown


def test_a_day_without_data_is_no_day_of_zero_hours_and_the_first_lines_say_how_much_was_seen() -> None:
    """Prometheus has existed for 40 minutes of three days."""
    some = use(None, 1.1, used=1.22, idle=1.28)
    report = UsageReport(0.0, 3 * DAY_S, lines={ML: some}, days={0.0: None, DAY_S: None, 2 * DAY_S: some})
    report.covered = Covered(2400.0, 3 * DAY_S, 3 * DAY_S - 2400.0, 0.0123)
    text = show(report)
    assert text.splitlines()[2] == "51% of the 2.5 GPU-hours held were idle: 1.3 GPU-hours."
    seen = (
        "Seen: 40m of 3d, data of 1 of 3 days, since 1970-01-03 23:20Z: the whole period is known after 1970-01-06 23:20Z. "
        "1.2% of the scrapes failed: lost hours are not counted."
    )
    assert seen in text.splitlines()
    assert re.search(r"^Thu 1970-01-01 00:00( +-){3}$", text, re.MULTILINE)
    assert seen in FORMS["html"](report, ReportView()) and seen in FORMS["mail"](report, ReportView())
    data = json.loads(render_json(report, ReportView()))
    assert (data["days"][0]["held_hours"], data["days"][2]["held_hours"], data["before"]) == (None, 2.5, None)
    assert (data["seen"]["seconds"], data["seen"]["since"]) == (2400.0, "1970-01-03T23:20:00+00:00")
    report.covered = Covered(3 * DAY_S - 60.0, 3 * DAY_S, None, 0.0)
    assert "Seen: 3d of 3d, data of 1 of 3 days." in show(report).splitlines()


def test_json_has_the_numbers_of_the_text_and_null_where_the_text_has_a_dash() -> None:
    data = json.loads(render_json(build_report(), ReportView()))
    vision, phys_, _, evil, _ = data["groups"]
    assert (vision["namespace"], vision["idle_hours"], vision["cost_idle"]) == ("vision", 1900.0, 7500.0)
    assert (phys_["account"], phys_["idle_hours"], evil["namespace"]) == ("phys", 238.0, EVIL)
    assert {row["user"] for row in data["members"] if row["account"] == "phys"} == {"noor", "mira", "otto", "rhea"}
    assert data["capacity"][0]["free_hours"] is None
    assert data["causes"][0]["advice"] == CAUSES["cpu_quota"].owner
    assert [day["idle_hours"] for day in data["days"]][:3] == [300.0, 300.0, None]
    assert data["floors"][2] == {"floor": 0.01, "idle_hours": 2300.5}
    unknown = build_report()
    unknown.holders = unknown.oversized = unknown.before = unknown.covered = None
    unknown.currency = ""
    data = json.loads(render_json(unknown, ReportView()))
    assert [data[name] for name in ("holders", "oversized", "before", "seen", "currency")] == [None] * 5


def test_a_spreadsheet_runs_no_name_and_has_empty_cells_for_unknown_values() -> None:
    lines = {phys(name): GpuHours(1.0, dict.fromkeys(PARTS), None) for name in ("=1+1", "+1", "-1", "@x", 'a,"b"\n')}
    for form, delimiter in (("csv", ","), ("tsv", "\t")):
        rows = list(
            csv.DictReader(
                io.StringIO(FORMS[form](UsageReport(0.0, DAY_S, lines=lines), ReportView())), delimiter=delimiter
            )
        )
        assert {row["user"] for row in rows} == {"'=1+1", "'+1", "'-1", "'@x", 'a,"b"\N{REPLACEMENT CHARACTER}'}
        assert {row["held_hours"] for row in rows} == {"1.000000"}
        assert {row[name] for row in rows for name in ("idle_hours", "idle_ratio", "cost", "energy_kwh")} == {""}


@pytest.mark.parametrize(
    ("parts", "bar"),
    [
        ({"used": 10.0}, "uuuuuuuuuu"),
        ({"used": 5.0, "idle": 5.0}, "uuuuuIIIII"),
        ({"starting": 1.0, "used": 3.0, "low": 1.0, "stalled": 1.0, "idle": 1.0, "unproven": 1.0, "unknown": 1.0, "faulty": 1.0}, "suuul!I~?x"),
        ({"used": 0.01, "idle": 9.99}, "IIIIIIIIII"),
        ({"used": 1e308, "idle": 1e306}, "uuuuuuuuuu"),
        ({"used": 1e308, "idle": 1e308}, "          "),  # their sum is infinite
        ({}, "          "),
    ],
)  # fmt: skip
def test_a_bar_of_text_is_as_long_as_the_hours_held(parts: dict[str, float], bar: str) -> None:
    assert draw_bar(use(None, None, **parts), 10) == bar


@pytest.mark.parametrize(
    ("hours", "idle", "is_shown"), [(24, 1.0, True), (23, 1.0, False), (24, 0.0, False), (24, None, False)]
)
def test_the_week_is_drawn_if_a_day_of_it_is_known_and_some_gpu_was_idle(
    hours: int, idle: float | None, is_shown: bool
) -> None:
    known = {at * 3600.0: use(None, None, used=2.0, idle=idle, unproven=idle) for at in range(hours)}
    report = UsageReport(0.0, DAY_S, lines={ML: use(None, None, used=1.0)}, hours={**known, 30 * 3600.0: None})
    assert ("by hour of the week" in render_text(report, ReportView())) == is_shown
    assert ('class="week"' in FORMS["html"](report, ReportView())) == is_shown


def test_work_that_no_source_sees_is_named_beside_the_headline() -> None:
    source = ReportSource("dcgm-exporter", "utilization", ("a, b", "c"), "the work of video encoders and decoders")
    report = UsageReport(0.0, DAY_S, [source], lines={ML: use(None, None, idle=1.0)})
    text = render_text(report, ReportView())
    assert "Not seen: the work of video encoders and decoders, so such GPUs may look idle." in text.partition("\n\n")[2]
    assert re.findall(r"(?m)^(?:dcgm-exporter  utilization  |\s+)(a, b|c)$", text) == ["a, b", "c"], "a line each"


def test_a_report_of_less_than_a_week_has_only_its_days_in_the_plot() -> None:
    hours: dict[float, GpuHours | None] = {at * 3600.0: use(None, None, idle=1.0) for at in range(30)}
    report = UsageReport(0.0, 2 * DAY_S, lines={ML: use(None, None, idle=1.0)}, hours=hours)
    heat = week_of(report)
    assert heat is not None and list(heat.rows) == ["Thu", "Fri"]
    assert "Sat" not in render_text(report, ReportView())


def test_an_hour_of_several_weeks_is_their_mean_and_an_hour_without_data_is_blank() -> None:
    weeks = {at * 3600.0: use(None, None, idle=8.0 if at < 168 else 4.0) for at in range(2 * 168) if at != 1}
    del weeks[169 * 3600.0]  # Thursday 01:00 of the other week
    report = UsageReport(0.0, 14 * DAY_S, lines={ML: use(None, None, idle=1.0)}, hours=dict(weeks))
    heat = week_of(report)
    assert heat is not None and heat.most == 6.0
    assert (heat.rows["Thu"][0], heat.rows["Thu"][1], heat.rows["Wed"][23]) == (6.0, None, 6.0), (
        "1970-01-01 was a Thursday"
    )


def test_hours_that_no_source_tells_apart_are_a_gap_in_the_bar() -> None:
    parts = dict.fromkeys(PARTS, None) | {"idle": 4.0}
    assert draw_bar(GpuHours(10.0, parts), 10) == "IIII......"
