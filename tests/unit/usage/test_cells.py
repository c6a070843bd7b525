"""From cells to sums: whose hours they are, what they cost, how many are free; and the sums are sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.cli.reports.report import GROUPS
from gpu_exporter.reports.usage.attribute import SHORT_S, Cluster, attribute, short_name
from gpu_exporter.reports.usage.cells import WINDOW_S, Cell, HolderId, Unit
from gpu_exporter.reports.usage.collect import CellSums, HolderFacts, share_of
from gpu_exporter.reports.usage.model import FLOORS, PARTS, UsageReport
from gpu_exporter.reports.usage.prices import Prices, parse_price, read_prices
from gpu_exporter.reports.usage.sources.kube import PodName, workload_of

HOUR = WINDOW_S
KNOWN = ("used", "low", "idle", "unproven", "unknown")


def unit(number: int, node: str = "n1", **more: str) -> Unit:
    return Unit("", node, f"GPU-{number}", **{"model": "H100", **more})


def pod(name: str) -> HolderId:
    return HolderId("", "kubernetes", "ml", name)


def cell(of: Unit, holder: HolderId | None, start: float = 0.0, seconds: float = HOUR, **parts: float) -> Cell:
    made = Cell(of, holder, start, seconds, samples=round(seconds / 30), **parts)  # type: ignore[arg-type]
    return made if parts else made._replace(used=seconds, busy=seconds / 2, known=seconds)


def asked(*, offered: float | None = None, **pods: float) -> Cluster:
    """kube-state-metrics of an hour in which these pods requested so many GPU-seconds of n1. `offered`: its GPUs."""
    requests = {(PodName("", "ml", name), "n1"): {0.0: seconds} for name, seconds in pods.items()}
    offers = {} if offered is None else {("", "n1"): offered}
    return Cluster(requests, {}, {node: gpus * HOUR for node, gpus in offers.items()}, offers)


def free(cells: list[Cell]) -> list[Cell]:
    """What is not held is free, since kube-state-metrics knows the node."""
    return [each if each.holder else each._replace(is_free=True) for each in cells]


def by_holder(cells: Any) -> dict[str, Cell]:
    """Sums by the name of the pod, "" for free."""
    found: dict[str, Cell] = {}
    for each in cells:
        name = each.holder.name if each.holder else ""
        if name in found:
            old = found[name]
            each = old._replace(**{part: getattr(old, part) + getattr(each, part) for part in ("seconds", *KNOWN)})
        found[name] = each
    return found


# --- attribute


def test_a_pod_that_the_exporter_names_gets_nothing_more() -> None:
    cells = [cell(unit(0), pod("a")), cell(unit(1), None)]
    assert list(attribute(cells, asked(a=HOUR))) == free(cells)
    assert list(attribute(cells, None)) == cells
    assert list(attribute(cells, asked(a=HOUR + SHORT_S))) == free(cells)  # a lookback


def test_a_pod_that_has_all_gpus_of_a_node_has_their_use() -> None:
    cells = [cell(unit(n), None) for n in range(2)]
    found = by_holder(list(attribute(cells, asked(a=2 * HOUR))))["a"]
    assert (found.used, found.unknown) == (2 * HOUR, 0.0)


def test_pods_of_a_node_whose_gpus_are_all_zero_are_idle() -> None:
    cells = [cell(unit(n), None, idle=HOUR / 2, unproven=HOUR / 2) for n in range(4)]
    found = by_holder(list(attribute(cells, asked(a=HOUR, b=2 * HOUR))))
    assert (found["a"].idle, found["b"].idle, found["b"].unproven) == (HOUR / 2, HOUR, HOUR)


def test_a_pod_on_one_of_several_gpus_has_unknown_use() -> None:
    """One GPU works: it may be that of either pod."""
    cells = [cell(unit(0), None), *(cell(unit(n), None, idle=HOUR) for n in range(1, 4))]
    found = by_holder(list(attribute(cells, asked(a=HOUR, b=HOUR))))
    for name in "ab":
        assert (found[name].unknown, found[name].idle, found[name].is_seen) == (HOUR, 0.0, True)


def test_a_pod_without_any_sample_of_its_node_is_unknown_and_not_seen() -> None:
    """It has the model, and so the price, of the GPUs that its node shows in other hours."""
    other = [cell(unit(0), pod("a"), start=HOUR)]
    found = by_holder(each for each in attribute(other, asked(a=HOUR)) if each.start == 0.0)["a"]
    assert (found.unknown, found.idle, found.is_seen, found.unit.model) == (HOUR, 0.0, False, "H100")
    mixed = [*other, cell(unit(1, model="L4"), None, start=HOUR)]
    assert by_holder(each for each in attribute(mixed, asked(a=HOUR)) if each.start == 0.0)["a"].unit.model == ""


def test_units_that_were_not_seen_at_all_leave_the_pod_unknown() -> None:
    cells = [cell(unit(0), None, seconds=0.0)]
    assert by_holder(list(attribute(cells, asked(a=HOUR))))["a"].unknown == HOUR


def test_pods_that_share_one_of_several_gpus_have_their_parts_alone() -> None:
    """Their requests are larger than their parts, and the node has a free GPU: nothing of them is missing."""
    cells = [cell(unit(0), pod(name), seconds=HOUR / 2)._replace(wall=HOUR) for name in "ab"]
    cells.append(cell(unit(1), None))
    assert list(attribute(cells, asked(a=HOUR, b=HOUR, offered=8))) == free(cells)


def test_replicas_that_the_exporter_does_not_name_add_no_gpu() -> None:
    """Two GPUs with three pods each; the exporter names the last one of each GPU."""
    cells = [cell(unit(0), pod("c"), idle=HOUR), cell(unit(1), pod("f"))]
    found = by_holder(list(attribute(cells, asked(**dict.fromkeys("abcdef", HOUR)))))
    (capacity,) = fill(list(attribute(cells, asked(**dict.fromkeys("abcdef", HOUR))))).capacity
    assert (capacity.present, capacity.held, capacity.free) == pytest.approx((2.0, 2.0, 0.0))
    assert all(each.seconds == pytest.approx(HOUR / 3) for name, each in found.items() if name)
    assert found["c"].idle == pytest.approx(HOUR / 3), "no pod of a GPU at zero works"
    assert all(found[name].unknown == found[name].seconds for name in "abdef")


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from("abc-")), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 4 * HOUR), min_size=1),
    st.none() | st.floats(0, 16),
)
def test_the_parts_of_shared_gpus_add_up(
    given_units: list[tuple[float, float, str]], requests: dict[str, float], offered: float | None
) -> None:
    """Nothing of a GPU is lost, and no part of it counts twice; idle is only what the named pod was."""
    cells = [
        cell(unit(n), None if name == "-" else pod(name), seconds=HOUR * seen, used=HOUR * seen * part)._replace(
            idle=HOUR * seen * (1 - part)
        )
        for n, (seen, part, name) in enumerate(given_units)
    ]
    found = list(attribute(cells, asked(offered=offered, **requests)))
    for each in found:
        assert sum(getattr(each, part) for part in KNOWN) == pytest.approx(each.seconds)
    for number, before in enumerate(cells):
        assert sum(e.seconds for e in found if e.unit == unit(number)) == pytest.approx(before.seconds)
    shared = [each for each in found if each.is_shared]
    given_away = sum(e.seconds for e in found if e.unit.uuid and e.holder is None) - sum(
        e.seconds for e in cells if e.holder is None
    )
    if any(each.unit.uuid for each in shared):
        taken = sum(e.seconds for e in found if e.holder and e.is_seen and not e.unit.uuid)
        assert given_away <= taken * (1 + 1e-9) + 1e-6
        assert all(each.idle == each.unproven == 0.0 for each in shared if not each.unit.uuid)


@pytest.mark.parametrize(
    ("node", "name"),
    [("n1.example.org", "n1"), ("n1", "n1"), ("10.0.0.1", "10.0.0.1"), ("ip-10-0-0-1.ec2", "ip-10-0-0-1")],
)
def test_the_node_of_exporter_and_scheduler_may_differ_in_the_domain(node: str, name: str) -> None:
    assert short_name(node) == name


# --- sums


def fill(cells: list[Cell], prices: Mapping[str, float] | None = None, **more: Any) -> UsageReport:
    sums = CellSums(lambda model, cluster: (prices or {}).get(model))
    sums.add(cells)
    sums.know(more.pop("facts", {}))
    sums.end_chunk(more.pop("offers", None))
    report = UsageReport(0.0, 2 * HOUR)
    sums.fill(report)
    return report


@pytest.mark.parametrize(
    ("profile", "share"),
    [
        ("", 1.0),
        ("1g.5gb", 1 / 7),
        ("1g.10gb+me", 1 / 7),
        ("3g.20gb", 3 / 7),
        ("7g.80gb", 1.0),
        ("1g.6gb", 1 / 4),
        ("1g.6gb+me", 1 / 4),
        ("2g.12gb", 1 / 2),
        ("4g.24gb", 1.0),
        ("1g.24gb", 1 / 7),  # of a GPU with seven slices
        ("odd", 1 / 7),
        ("9g.1gb", 1 / 7),
    ],
)
def test_the_share_of_an_instance_in_its_gpu(profile: str, share: float) -> None:
    assert share_of(unit(0, profile=profile)) == pytest.approx(share)


def test_a_gpu_with_instances_is_one_gpu() -> None:
    """Two of seven slices are held: five are free, and the whole GPU is present once."""
    cells = [cell(unit(0, gi=str(n), profile="1g.5gb"), pod(f"p{n}") if n < 2 else None, idle=HOUR) for n in range(7)]
    (capacity,) = fill(cells).capacity
    assert capacity.present == pytest.approx(1.0)
    assert capacity.held == pytest.approx(2 / 7)
    assert capacity.free == pytest.approx(5 / 7)


def test_the_gpus_of_nodes_without_an_exporter_are_told() -> None:
    report = fill([cell(unit(0), pod("a"))], offers={("", "n1.example.org"): 8 * HOUR, ("", "n2"): 8 * HOUR})
    assert [line for line in report.left_out if "without a GPU exporter" in line] == [
        "8.0 GPU-hours of nodes without a GPU exporter: install gpu-exporter there"
    ]


def test_a_gap_is_told_and_is_in_no_column() -> None:
    sums = CellSums(lambda model, cluster: None)
    sums.add([cell(unit(0), pod("a"), start, seconds) for start, seconds in ((0, HOUR), (HOUR, 600), (3 * HOUR, HOUR))])
    sums.end_chunk()
    report = UsageReport(0.0, 4 * HOUR)
    sums.fill(report)
    assert report.left_out[0].startswith("1.8 GPU-hours between the first and the last sample")
    assert report.total.held == pytest.approx(2 + 1 / 6)
    assert report.hours[2 * HOUR] is None
    assert report.covered is not None
    assert (report.covered.seconds, report.covered.since) == (3 * HOUR, None)


def test_a_holder_of_a_single_sample_is_not_seen() -> None:
    report = fill(
        [cell(unit(0), pod("a")), cell(unit(1), pod("b"), seconds=30.0), cell(unit(2), pod("c"), seconds=60.0)]
    )
    assert {each.who.holder for each in report.holders or []} == {"ml/a", "ml/c"}
    assert "the use of 1 pods or jobs with a single sample: their 0.0 GPU-hours are unknown" in report.missing


def test_the_longest_idle_run_of_a_unit_that_two_targets_show_counts_once() -> None:
    hours = [cell(unit(0), pod("a"), at * HOUR, idle=HOUR / 2)._replace(seconds=HOUR / 2, wall=HOUR) for at in range(5)]
    (found,) = fill([*hours, *hours]).holders or []
    assert found.longest_idle_s == 5 * HOUR


def test_a_smaller_size_is_sufficient_only_for_a_holder_whose_memory_is_known() -> None:
    model = "NVIDIA H100 80GB HBM3"
    day = [cell(unit(0, model=model), pod("a"), at * HOUR, low=HOUR, busy=60.0, known=HOUR) for at in range(24)]
    (known,) = fill([day[0]._replace(peak_memory=4e9), *day[1:]]).holders or []
    (unknown,) = fill(day).holders or []
    assert (known.sufficient, unknown.sufficient) == ("1g.10gb", "")


def test_units_of_a_source_that_names_no_holder_are_held_by_one_that_is_not_known() -> None:
    report = fill([cell(unit(0), None), cell(unit(1), None, idle=HOUR)], {"H100": 2.0})
    assert report.holders == []
    ((who, use),) = report.lines.items()
    assert (who.holder, use.held, use.cost) == ("(holder not known)", 1.0, 2.0)
    assert "1.0 GPU-hours at zero of GPUs whose holders no source names" in report.left_out[0]
    assert report.capacity[0][2:] == (2.0, None, None)


def test_the_longest_idle_run_goes_over_hours_and_ends_with_work() -> None:
    quiet = {"idle": HOUR}
    cells = [
        cell(unit(0), pod("a"), n * HOUR, **(quiet if n not in (3,) else {"idle": HOUR / 4, "used": HOUR * 3 / 4}))
        for n in range(5)
    ]
    (holder,) = fill(cells).holders or []
    assert holder.longest_idle_s == 3 * HOUR, "within an hour with work, the longest run is unknown"
    apart = [cell(unit(0), pod("a"), n * HOUR, idle=HOUR) for n in (0, 2)]
    (holder,) = fill(apart).holders or []
    assert holder.longest_idle_s == HOUR


NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def cell_lists(draw: st.DrawFn) -> list[Cell]:
    """Cells as a source may have them: at most one hour of each unit in each hour."""
    cells = []
    for number in range(draw(st.integers(1, 5))):
        profile = draw(st.sampled_from(["", "1g.5gb", "3g.20gb"]))
        of = unit(number, gi="1" if profile else "", profile=profile, model=draw(st.sampled_from(["H100", "L4"])))
        for start in (0.0, HOUR):
            left = HOUR
            for _ in range(draw(st.integers(0, 3))):
                seconds = draw(st.floats(60.0, left)) if left > 60.0 else 0.0
                left -= seconds
                holder = draw(
                    st.none() | st.builds(pod, NAMES) | st.builds(lambda name: HolderId("", "slurm", "", name), NAMES)
                )
                weights = draw(st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(any))
                split = {part: seconds * weight / sum(weights) for part, weight in zip(KNOWN, weights, strict=True)}
                if seconds:
                    made = cell(of, holder, start, seconds, **split)
                    cells.append(made._replace(at_floors=(0.0, split["idle"], split["idle"] + split["unproven"])))
    return cells


@given(cell_lists())
def test_sums_are_sums(cells: list[Cell]) -> None:
    report = fill(cells, {"H100": 3.0, "L4": 1.0}, facts={pod("a"): HolderFacts("train", "blue")})
    total = report.total
    close = pytest.approx
    for each in (total, *report.lines.values(), *(holder.use for holder in report.holders or [])):
        assert sum(each.parts[part] or 0.0 for part in KNOWN) == close(each.held)
        assert each.cost == close(sum(each.costs[part] or 0.0 for part in KNOWN) if each.costs else each.cost)
    for name in GROUPS:
        names = ("cluster", "namespace", "account") if name == "tenant" else (name,)
        groups = report.by(*names)
        assert sum(use.held for use in groups.values()) == close(total.held)
        for part in KNOWN:
            assert sum(use.parts[part] or 0.0 for use in groups.values()) == close(total.parts[part])
        if total.cost is not None:
            assert sum(use.cost or 0.0 for use in groups.values()) == close(total.cost)
    assert sum(use.held for use in report.hours.values() if use is not None) == close(total.held)
    if any(each.held is None for each in report.capacity):
        assert not any(each.holder for each in cells)
    else:
        for each in report.capacity:  # the rest was in use without a holder
            assert each.held + each.free <= each.present * (1 + 1e-9)  # type: ignore[operator]
        assert sum(each.held or 0.0 for each in report.capacity) == close(total.held)
    if report.floors:
        assert report.floors[FLOORS[1]] == close(total.parts["idle"])
    assert set(PARTS) == set(total.parts)


def test_the_same_cells_in_another_order_of_units_give_the_same_sums() -> None:
    cells = [cell(unit(n), pod(name), seconds=HOUR / (n + 1)) for n, name in enumerate("abc")]
    one, other = fill(cells, {"H100": 1.1}), fill(cells[::-1], {"H100": 1.1})
    assert one == other


# --- prices and workloads


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.5", ("", 2.5)),
        ("NVIDIA L4=0.8", ("NVIDIA L4", 0.8)),
        (" A=b = 1e1", ("A=b", 10.0)),
        ("0", ("", 0.0)),
    ],
)
def test_a_price(text: str, price: tuple[str, float]) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "x", "=", "L4=", "L4", "-1", "nan", "inf", "L4=-0.1", "L4=nan", "1,5", "2.5 EUR"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ValueError, match="is not a price of a GPU-hour"):
        parse_price(text)


@given(st.text())
def test_any_text_is_a_price_or_a_value_error(text: str) -> None:
    try:
        _, price = parse_price(text)
    except ValueError:
        return
    assert 0.0 <= price < float("inf")


class Recorded:
    def __init__(self, *rows: tuple[dict[str, str], float]) -> None:
        self.rows, self.queries = rows, 0

    def ask_now(self, name: str, expression: str, at: float) -> list[tuple[tuple[tuple[str, str], ...], float]]:
        self.queries += 1
        return [(tuple(sorted(labels.items())), value) for labels, value in self.rows]


def test_the_given_prices_come_before_those_that_the_site_records() -> None:
    rows = Recorded(({"name": "H100", "currency": "EUR"}, 3.0), ({"name": "L4", "currency": "EUR"}, 1.0))
    found = read_prices(rows, 0.0, [], "")  # type: ignore[arg-type]
    assert (found.of("H100"), found.of("L4"), found.of("A100"), found.currency) == (3.0, 1.0, None, "EUR")
    given_ones = read_prices(rows, 0.0, [("", 2.0), ("L4", 0.5)], "USD")  # type: ignore[arg-type]
    assert (given_ones.of("H100"), given_ones.of("L4"), given_ones.currency) == (2.0, 0.5, "USD")
    assert rows.queries == 1


def test_prices_in_two_currencies_are_no_prices() -> None:
    rows = Recorded(({"name": "H100", "currency": "EUR"}, 3.0), ({"name": "L4", "currency": "USD"}, 1.0))
    assert not read_prices(rows, 0.0, [], "")  # type: ignore[arg-type]
    assert not Prices({})


@pytest.mark.parametrize(
    ("kind", "name", "workload"),
    [
        ("ReplicaSet", "ranker-5d4f8c7b9", "ranker"),
        ("ReplicaSet", "ranker-v2-5d4f8c7b9", "ranker-v2"),
        ("ReplicaSet", "ranker", "ranker"),  # made by a person
        ("ReplicaSet", "my-app-xyz", "my-app-xyz"),  # too short for a hash
        ("Job", "nightly-28913460", "nightly"),
        ("Job", "fit-7", "fit-7"),
        ("StatefulSet", "train-12345678", "train-12345678"),
        ("", "x", "x"),
    ],
)
def test_the_name_that_people_gave(kind: str, name: str, workload: str) -> None:
    assert workload_of(kind, name) == workload


@given(st.text(), st.text())
def test_a_workload_is_a_beginning_of_its_name(kind: str, name: str) -> None:
    assert name.startswith(workload_of(kind, name))
