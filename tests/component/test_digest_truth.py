"""A digest of a simulated fleet in a real Prometheus: each number is the truth within 1 %, or is missing.

The fleet is a table of what each tenant does at each minute. The truth sums this table. Prometheus gets the counters that
exporters would have published, through restarts, a lost state, a gap, two targets of one exporter and a change of
address; its recordings are those of alerts/rules, evaluated by promtool.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.testbed.processes import GPU_EXPORTER, Processes
from tests.testbed.servers import Prometheus, require

pytestmark = pytest.mark.servers
ROOT = Path(__file__).resolve().parents[2]
MINUTE, HOUR, DAY = 60, 3600, 86400
DAYS = 3
AHEAD = 20 * MINUTE  # of history beyond the start of the test, so that the digest of a slow machine has an end
EXACT = 0.01


class Work(NamedTuple):
    """What a tenant does on a node in one minute, in GPUs: held >= known >= busy + idle; and its watts."""

    held: float = 0.0
    known: float = 0.0
    busy: float = 0.0
    idle: float = 0.0
    watts: float = 0.0


class Place(NamedTuple):
    """A tenant on a node. `work`: by seconds before the end of the history."""

    cluster: str
    node: str
    tenant: str
    work: Callable[[float], Work]


def night(ago: float) -> bool:
    return int(ago // (6 * HOUR)) % 2 == 0


ML = 'scheduler="kubernetes",namespace="ml"'
ADA, BOB = (f'scheduler="slurm",account="phys",user="{user}"' for user in ("ada", "bob"))
EVE = 'scheduler="slurm",account="chem",user="eve"'
OLD = 'scheduler="slurm",account="old",user="zoe"'
FLEET = [
    Place("east", "e1", ML, lambda ago: Work(2, 2, 0.5, 1, 600) if night(ago) else Work(2, 2, 1.5, 0, 900)),
    Place("east", "e1", ADA, lambda ago: Work(1, 0.5, 0.25, 0, 200) if ago < 2 * DAY else Work(3, 3, 1, 2, 400)),
    Place("east", "e2", BOB, lambda ago: Work(4, 4, 3, 0.5, 1200)),
    Place("east", "e2", EVE, lambda ago: Work(1, 1, 0, 1, 70) if 9 * HOUR < ago < 40 * HOUR else Work()),
    Place("west", "w1", ML, lambda ago: Work(8, 8, 6, 2, 3000)),  # as in east, also by the name of the pod
    Place("west", "w2", OLD, lambda ago: Work(1, 1, 1, 0, 300)),
]
UNMETERED = {OLD}  # on a GPU without an energy counter
COUNTERS = ("held", "known", "busy", "idle")


def is_running(place: Place, ago: float) -> bool:
    """Whether the exporter runs. That of e1 did not for a quarter of an hour, and kept its state."""
    return not (place.node == "e1" and 30 * HOUR < ago < 30 * HOUR + 16 * MINUTE)


def is_scraped(place: Place, ago: float) -> bool:
    """Whether Prometheus scraped: not that of west for three hours at the border between two days of the digest."""
    return not (place.cluster == "west" and DAY - 2 * HOUR < ago < DAY + HOUR)


def targets(place: Place, ago: float) -> Iterator[str]:
    """The instances: that of w1 got another address, and both were scraped for ten hours."""
    if place.node != "w1" or ago > 30 * HOUR:
        yield f"{place.node}:1"
    if place.node == "w1" and ago < 40 * HOUR:
        yield f"{place.node}:2"


def price(ago: float) -> float:
    return 2.0 if ago > 30 * HOUR else 5.0


def write_history(path: Path, end: int) -> None:
    families: dict[str, list[str]] = {}

    def put(name: str, labels: str, at: int, value: float) -> None:
        families.setdefault(name, []).append(f"{name}{{{labels}}} {value:.3f} {at}")

    for place in FLEET:
        counted = dict.fromkeys((*COUNTERS, "joules"), 0.0)
        for at in range(end - (2 * DAYS + 1) * DAY, end + 1, MINUTE):
            ago = float(end - at)
            if place.node == "e2" and ago == 20 * HOUR:
                counted = dict.fromkeys(counted, 0.0)  # a restart that lost the state
            if is_running(place, ago):
                work = place.work(ago)
                for name in COUNTERS:
                    counted[name] += getattr(work, name) * MINUTE
                counted["joules"] += work.watts * MINUTE
            for instance in targets(place, ago) if is_scraped(place, ago) else ():
                target = f'job="gpu-exporter",cluster="{place.cluster}",node="{place.node}",instance="{instance}"'
                if place.tenant in (ML, BOB, OLD):  # once for each target
                    put("up", target, at, is_running(place, ago))
                if not is_running(place, ago):
                    continue
                if place.tenant in (ML, BOB, OLD):
                    put("gpu_exporter_build_info", target, at, 1)
                    put("gpu_info", f'{target},gpu="0",uuid="GPU-{place.node}",name="H100"', at, 1)
                for name in COUNTERS:
                    put(f"gpu_tenant_{name}_gpu_seconds_total", f"{target},{place.tenant}", at, counted[name])
                put("gpu_tenant_stalled_gpu_seconds_total", f"{target},{place.tenant}", at, 0)
                if place.tenant not in UNMETERED:
                    put("gpu_tenant_energy_joules_total", f"{target},{place.tenant}", at, counted["joules"])
            if place.tenant == ML and ago <= DAYS * DAY and place.work(ago).idle and is_scraped(place, ago):
                key = f'cluster="{place.cluster}",{ML},pod="train-0",node="{place.node}",uuid="GPU-0"'
                put("allocation:gpu_share:part", f'{key},part="idle_long"', at, place.work(ago).idle)
                put(
                    "allocation:owner:info",
                    f'cluster="{place.cluster}",{ML},pod="train-0",team="{place.cluster}"',
                    at,
                    1,
                )
    for at in range(end - DAYS * DAY - HOUR, end + 1, MINUTE):
        put("model:gpu_price:per_hour", 'name="H100",currency="EUR"', at, price(float(end - at)))
    with path.open("w", encoding="utf-8") as out:
        for name in sorted(families):
            out.writelines(f"{row}\n" for row in families[name])
        out.write("# EOF\n")


def record(server: Prometheus, directory: Path, names: tuple[str, ...], end: int) -> None:
    """Evaluate these rules of alerts/rules for the period, as if Prometheus had had them."""
    (group,) = yaml.safe_load((ROOT / "alerts/rules/tenants.yaml").read_text("utf-8"))["groups"]
    group["rules"] = [rule for rule in group["rules"] if rule["record"] in names]
    assert len(group["rules"]) == len(names)
    rules = directory / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "rules", f"--url={server.url}"]
    command += [f"--start={end - DAYS * DAY - HOUR}", f"--end={end}", f"--output-dir={directory / 'data'}", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, int]]:
    """The server, and the end of its history (Unix seconds)."""
    require("prometheus", "promtool")
    directory = tmp_path_factory.mktemp("fleet")
    end = int(time.time()) // MINUTE * MINUTE + AHEAD
    write_history(directory / "history.txt", end)
    source = [str(directory / "history.txt"), str(directory / "data")]
    subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", *source], check=True, capture_output=True)
    with Processes(directory) as processes:
        for names in (
            ("node_tenant:gpu_gpus:rate5m", "node:gpu_price_per_hour:max"),
            ("tenant:gpu_gpus:rate5m", "tenant:gpu_cost:rate", "tenant:gpu_unpriced:rate5m"),
            (),
        ):  # rules that read other rules need their blocks, which a start loads
            server = Prometheus(processes, directory, {}, flags=["--storage.tsdb.retention.time=60d"])
            if names:
                record(server, directory, names, end)
                server.running.stop()
        yield server, end


def digest(server: Prometheus, *flags: str) -> dict[str, Any]:
    command = [*GPU_EXPORTER, "digest", f"--source.prometheus={server.url}", f"--since={DAYS}d", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)) if "--format=json" in flags else {"text": done.stdout}


def truth(end: int, first: float, last: float, wanted: Callable[[Place], bool]) -> dict[str, float]:
    """GPU-hours, energy and cost of these places between two moments (Unix seconds), from the table alone."""
    sums = dict.fromkeys(("held", "known", "busy", "idle", "kwh", "cost", "cost_idle"), 0.0)
    for place in filter(wanted, FLEET):
        for at in range(int(first) // MINUTE * MINUTE + MINUTE, int(last) + 1, MINUTE):
            ago = float(end - at)
            if not is_running(place, ago):
                continue  # no exporter counted
            work = place.work(ago)
            for name in COUNTERS:
                sums[name] += getattr(work, name) / 60
            sums["kwh"] += work.watts / 60 / 1000
            sums["cost"] += work.held / 60 * price(ago)
            sums["cost_idle"] += work.idle / 60 * price(ago)
    return sums


NAMES = {"energy_kwh": "kwh", "cost": "cost", "cost_idle": "cost_idle"} | {f"{name}_hours": name for name in COUNTERS}


def compare(row: Mapping[str, Any], true: Mapping[str, float], *, missing: frozenset[str] = frozenset()) -> None:
    """Each number is the truth within 1 %, or null if it is one of `missing`."""
    for shown, name in NAMES.items():
        if shown in missing:
            assert row[shown] is None, f"{shown} of {row}"
        else:
            assert row[shown] == pytest.approx(true[name], rel=EXACT, abs=0.02), f"{shown} of {row}"
    assert row["used_hours"] == pytest.approx(true["known"] - true["idle"], rel=2 * EXACT, abs=0.02)
    assert row["unknown_hours"] == pytest.approx(true["held"] - true["known"], rel=2 * EXACT, abs=0.3)
    for ratio in ("idle_ratio", "busy_ratio"):
        assert 0.0 <= row[ratio] <= 1.0


MONEY = frozenset(("cost", "cost_idle"))


def span(data: Mapping[str, Any]) -> tuple[float, float]:
    start, end = (datetime.fromisoformat(data[name]).timestamp() for name in ("start", "end"))
    return start, end


def test_every_number_of_a_cluster_without_a_gap_is_the_truth(fleet: tuple[Prometheus, int]) -> None:
    """Through a restart, a lost state, a new tenant, and a change of the price."""
    server, end = fleet
    data = digest(server, "--format=json", '--source.matcher=job="gpu-exporter",cluster="east"')
    first, last = span(data)

    def expect(wanted: Callable[[Place], bool], begin: float = first, until: float = last) -> dict[str, float]:
        return truth(end, begin, until, lambda place: place.cluster == "east" and wanted(place))

    compare(data["total"], expect(lambda place: True))
    tenants = {(row["namespace"], row["user"]): row for row in data["members"]}
    assert set(tenants) == {("ml", ""), ("", "ada"), ("", "bob"), ("", "eve")}
    for key, tenant in ((("ml", ""), ML), (("", "ada"), ADA), (("", "bob"), BOB), (("", "eve"), EVE)):
        compare(tenants[key], expect(lambda place, tenant=tenant: place.tenant == tenant))  # type: ignore[misc]
    groups = {row["namespace"] or row["account"]: row for row in data["groups"]}
    compare(groups["phys"], expect(lambda place: place.tenant in (ADA, BOB)))
    assert set(groups) == {"ml", "phys", "chem"} and "user" not in groups["phys"]
    for at, day in enumerate(data["days"]):
        begin = first + at * DAY
        true = expect(lambda place: True, begin, begin + DAY)
        for name in COUNTERS:
            assert day[f"{name}_hours"] == pytest.approx(true[name], rel=EXACT)
    true = expect(lambda place: True, first - DAYS * DAY, first)
    assert data["before"]["held_hours"] == pytest.approx(true["held"], rel=EXACT)
    assert data["before"]["idle_hours"] == pytest.approx(true["idle"], rel=EXACT)
    (holder,) = data["holders"]
    idle = expect(lambda place: place.tenant == ML)["idle"]
    assert (holder["cluster"], holder["holder"], holder["team"]) == ("east", "ml/train-0", "east")
    assert holder["idle_hours"] == pytest.approx(idle, rel=EXACT)
    assert (data["currency"], data["missing"]) == ("EUR", [])
    assert data["seen"]["seconds"] == pytest.approx(DAYS * DAY, rel=EXACT)
    assert data["seen"]["failed_scrapes_ratio"] == pytest.approx(15 / (2 * DAYS * 24 * 60), rel=0.1)
    text = digest(server, '--source.matcher=job="gpu-exporter",cluster="east"')["text"].splitlines()
    failed = "0.2% of the scrapes failed: lost hours are not counted"
    assert f"Seen: 3d of 3d, data of 3 of 3 days. {failed}. Sources: gpu-exporter." in text
    assert any(line.startswith("east: phys: 2 users ") for line in text)
    assert "not counted: idle runs shorter than 10m (alerts.idle_short), in the list of holders only" in text
    assert any(" IDLE, EUR " in line and line.startswith("NAME ") for line in text)
    assert " EUR. The 3d before: " in text[2]


def test_growth_over_a_gap_counts_and_what_cannot_be_told_is_missing(fleet: tuple[Prometheus, int]) -> None:
    """West: three hours without a scrape where a day ends, and two targets of one exporter for ten hours before."""
    server, end = fleet
    data = digest(server, "--format=json", '--source.matcher=job="gpu-exporter",cluster="west"')
    first, last = span(data)
    for row, tenants in (
        (data["total"], {ML, OLD}),
        *((row, {ML if row["namespace"] else OLD}) for row in data["members"]),
    ):
        true = truth(end, first, last, lambda place: place.cluster == "west" and place.tenant in tenants)  # noqa: B023
        missing = MONEY | ({"energy_kwh"} if OLD in tenants else set())
        compare(row, true, missing=missing)
    shown = [day["held_hours"] for day in data["days"]]
    assert shown == [pytest.approx(9 * 24.0, rel=EXACT), None, None], "the growth over the gap is of two days"
    assert data["holders"] is None and data["oversized"] is None, "the rules have not recorded the gap"
    assert any("the rules recorded" in text for text in data["missing"])
    assert any(text.startswith("possibly some hours of w1") for text in data["missing"])
    assert data["seen"]["seconds"] == pytest.approx(DAYS * DAY - 3 * HOUR, rel=EXACT)
    text = digest(server, '--source.matcher=job="gpu-exporter",cluster="west"')["text"].splitlines()
    assert "Seen: 2d21h of 3d, data of 1 of 3 days. Sources: gpu-exporter." in text


def test_two_clusters_with_a_pod_of_one_name_stay_two(fleet: tuple[Prometheus, int]) -> None:
    server, end = fleet
    data = digest(server, "--format=json")
    first, last = span(data)
    for cluster in ("east", "west"):
        (row,) = (each for each in data["members"] if (each["cluster"], each["namespace"]) == (cluster, "ml"))
        true = truth(end, first, last, lambda place: place.cluster == cluster and place.tenant == ML)  # noqa: B023
        compare(row, true, missing=MONEY if cluster == "west" else frozenset())
    compare(data["total"], truth(end, first, last, lambda place: True), missing=MONEY | {"energy_kwh"})
