"""Evidence from both sources: the same facts, and refusals of what is partial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.evidence.client import fetch_text
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, complete_url
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.promql import FACTS, PromQLSource
from gpu_exporter.reconciler.evidence.records import Evidence, EvidenceError, HolderName, HostLimits
from gpu_exporter.reconciler.evidence.vector import HOLDER_LABELS, MATCHER_MAX, parse_vector, restrict

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "demo.prom"
NOW = 1_700_001_800.0
PLACE = 'gpu="0",uuid="GPU-0",scheduler="slurm",job_id="42"'


def page(
    idle_run: float, held: float, observed: float, last_sample: float = NOW, units: int = 1, witnesses: int = 4
) -> str:
    return (
        f"gpu_exporter_last_sample_timestamp_seconds {last_sample}\n"
        "gpu_exporter_sample_interval_seconds 1\n"
        'gpu_idle_witnesses{gpu="0",uuid="GPU-0"} 9\n'
        f"gpu_allocation_idle_run_witnesses{{{PLACE}}} {witnesses}\n"
        f'gpu_allocation_info{{{PLACE},user="ada",account="phys"}} 1\n'
        f"gpu_allocation_start_timestamp_seconds{{{PLACE}}} {NOW - held}\n"
        f"gpu_allocation_holder_units{{{PLACE}}} {units}\n"
        f"gpu_allocation_idle_run_seconds{{{PLACE}}} {idle_run}\n"
        f"gpu_allocation_held_seconds_total{{{PLACE}}} {held}\n"
        f"gpu_allocation_observed_seconds_total{{{PLACE}}} {observed}\n"
    )


def stage_of(text: str) -> tuple[str, str]:
    source = ExporterSource(["http://n1:9836/metrics"], 7200.0, ManualClock(wall=NOW), lambda _url: text)
    (decision,) = decide(source.read_evidence(), Policy())
    return decision.stage, decision.owner


def test_direct_evidence_carries_every_number() -> None:
    assert stage_of(page(8000.0, 9000.0, 8900.0)) == ("underused", "ada/phys")
    assert stage_of(page(8000.0, 9000.0, 4000.0))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0, units=8))[0] == "unknown"  # seven of its GPUs are not seen here
    assert stage_of(page(8000.0, 9000.0, 8900.0, NOW - 600))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_seconds", "x"))[0] == "unknown"


def test_jobs_of_two_slurm_clusters_with_one_id_are_unknown_and_both_are_named() -> None:
    """alpha's job has a third GPU on a node that does not answer; beta's one GPU must not stand in for it."""

    def fetch(url: str) -> str:
        cluster = "beta" if "b1" in url else "alpha"
        place = PLACE.replace("GPU-0", url[7:9])
        text = page(8000.0, 9000.0, 9000.0, units=1 if cluster == "beta" else 3).replace(PLACE, place)
        return text.replace("user=", f'slurm_cluster="{cluster}",user=')

    source = ExporterSource(["a1:1", "a2:1", "b1:1"], 7200.0, ManualClock(wall=NOW), fetch)
    (decision,) = decide(source.read_evidence(), Policy())
    reason = "series of 2 Slurm clusters under one job id: alpha, beta"
    assert (decision.stage, decision.reason, decision.cluster) == ("unknown", reason, "")
    (decision,) = decide(ExporterSource(["b1:1"], 7200.0, ManualClock(wall=NOW), fetch).read_evidence(), Policy())
    assert (decision.stage, decision.cluster) == ("underused", "beta")
    api = FakeApi()
    for name, cluster in (("GPU-1", "alpha"), ("GPU-2", "beta")):
        api.more.setdefault("gpu_allocation_info", []).append(({"uuid": name, "slurm_cluster": cluster}, 1.0))
    (decision,) = decide(read(api), Policy())
    assert decision.reason == "series of 3 Slurm clusters under one job id: one that is not named, alpha, beta"
    api = FakeApi()
    api.labels = {"slurm_cluster": "alpha"}
    (decision,) = decide(read(api), Policy())
    assert (decision.stage, decision.cluster) == ("underused", "alpha")


def test_jobs_that_slurm_hides_are_no_holder_and_their_gpus_are_counted() -> None:
    """They have no id: two of them, each idle on one GPU, would be one job without a name."""

    def hidden(uuid: str) -> str:
        place = f'gpu="0",uuid="{uuid}",scheduler="slurm",job_id=""'
        labels = f'{place},slurm_cluster="lab",identity="hidden"'
        return page(8000.0, 9000.0, 8900.0).replace(f"info{{{PLACE}", f"info{{{labels}").replace(PLACE, place)

    texts = {"n1:1": hidden("GPU-1"), "n2:1": hidden("GPU-2"), "n2:2": hidden("GPU-2"), "n3:1": page(8e3, 9e3, 9e3)}
    source = ExporterSource(list(texts), 7200.0, ManualClock(wall=NOW), lambda url: texts[url[7:11]])
    evidence = source.read_evidence()
    assert [str(holder.name) for holder in evidence.holders] == ["job 42"]
    assert (evidence.hidden, evidence.allocations) == (2, 4)
    texts["n1:1"] = "\n".join(line for line in hidden("GPU-1").splitlines() if "_info" not in line) + "\n"
    assert source.read_evidence().hidden == 2  # without its info too it has no name
    api = FakeApi()
    nameless = {"job_id": "", "uuid": "GPU-1"}
    api.more["gpu_allocation_idle_run_seconds"] = [(nameless, 8000.0)]
    api.more["gpu_allocation_info"] = [({**nameless, "identity": "hidden"}, 1.0)]
    api.values["count(count by (uuid, mig_uuid)"] = 3.0
    evidence = read(api)
    assert [str(holder.name) for holder in evidence.holders] == ["job 42"]
    assert evidence.hidden == 3
    assert 'count(count by (uuid, mig_uuid) (gpu_allocation_info{identity="hidden"}))' in api.queries
    api = FakeApi()
    api.values |= {
        "gpu_allocation_idle_run_seconds": None,
        "count(count by (uuid, mig_uuid)": 3.0,
    }
    assert (read(api).holders, read(api).hidden) == ((), 3)


def at_most_covered(on_s: int, off_s: int) -> float:
    """The highest coverage that a reader each 30 s gets of an exporter that comes and goes for four hours."""
    clock = ManualClock(wall=-30.0)

    def fetch(url: str) -> str:
        if clock.wall() % (on_s + off_s) >= on_s:
            raise EvidenceError(f"{url}: connection refused")
        rounds, rest = divmod(clock.wall(), on_s + off_s)
        return page(10_000.0, clock.wall() + 1.0, rounds * on_s + rest + 1.0)

    source = ExporterSource(["http://n1/metrics"], 7200.0, clock, fetch)
    shares = []
    for _ in range(0, 14_400, 30):
        clock.advance(30.0)
        try:
            evidence = source.read_evidence()
        except EvidenceError:
            continue
        shares.append(evidence.holders[0].units[0].coverage or 0.0)
    return max(shares[20:])


def test_direct_coverage_of_an_exporter_that_flaps_is_the_share_of_time_that_it_is_there() -> None:
    assert at_most_covered(70, 50) < 0.65
    assert at_most_covered(120, 0) == 1.0


def test_samples_outlast_an_exporter_that_does_not_answer_and_no_holder_that_is_gone() -> None:
    texts, clock = {"http://n1/metrics": page(8000.0, 90_000.0, 80_000.0)}, ManualClock(wall=NOW)

    def fetch(url: str) -> str:
        if not texts.get(url):
            raise EvidenceError(f"{url}: connection refused")
        return texts[url]

    other = "gpu_exporter_build_info 1\n"
    source = ExporterSource(["http://n1/metrics", "http://n2/metrics"], 7200.0, clock, fetch)
    texts["http://n2/metrics"] = other
    assert source.read_evidence().holders[0].units[0].coverage == 0.0
    texts["http://n1/metrics"] = ""
    clock.advance(3600.0)
    source.read_evidence()
    texts["http://n1/metrics"] = page(8000.0, 93_600.0, 83_600.0)
    assert source.read_evidence().holders[0].units[0].coverage == 0.5  # of the last hour it is known that it was seen
    texts["http://n1/metrics"] = other
    source.read_evidence()
    texts["http://n1/metrics"] = page(8000.0, 93_600.0, 83_600.0)
    assert source.read_evidence().holders[0].units[0].coverage == 0.0


@pytest.mark.parametrize("first", [1, 4])
def test_of_two_rows_for_one_allocation_the_smaller_count_of_witnesses_counts(first: int) -> None:
    """Two rows that differ in a label that is for people, such as the index of the GPU."""
    text = page(8000.0, 9000.0, 8900.0, witnesses=first)
    elsewhere = PLACE.replace('gpu="0"', 'gpu="9"')
    text += f"gpu_allocation_idle_run_witnesses{{{elsewhere}}} {5 - first}\n"
    assert stage_of(text)[0] == "candidate"
    assert stage_of(page(8000.0, 9000.0, 8900.0, witnesses=2))[0] == "underused"
    without = page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_witnesses", "x")
    assert stage_of(without)[0] == "candidate"


def test_the_demo_page_is_evidence() -> None:
    source = ExporterSource(
        ["http://n1/metrics"], 7200.0, ManualClock(wall=NOW), lambda _url: GOLDEN.read_text("utf-8")
    )
    evidence = source.read_evidence()
    names = {str(holder.name): holder for holder in evidence.holders}
    assert len(names) == 8
    assert names["job 48113"].owner == "mira/phys"
    (unit,) = names["serving/embedder-1"].units
    assert unit.mig == "2/0"
    assert unit.witnesses == 5


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/", "/metrics"])
def test_only_http_is_fetched(url: str) -> None:
    with pytest.raises(EvidenceError, match="expected http"):
        fetch_text(url)


def test_a_page_that_is_no_metrics_is_an_error() -> None:
    source = ExporterSource(["http://n1/metrics"], 7200.0, ManualClock(wall=NOW), lambda _url: "<html>login</html>")
    with pytest.raises(EvidenceError, match="http://n1/metrics: not in the Prometheus text format"):
        source.read_evidence()


def test_too_many_exporters_are_refused() -> None:
    with pytest.raises(ValueError, match="201 exporters are more than 200: use --source.prometheus"):
        ExporterSource(["http://n/"] * 201, 1.0, ManualClock(wall=NOW))


class FakeApi:
    """Answers PromQL by the metric that a query starts from."""

    def __init__(self, cluster: str = "") -> None:
        self.queries: list[str] = []
        self.cluster = cluster
        self.blind = self.enforced = False
        self.more: dict[str, list[tuple[dict[str, str], float]]] = {}  # further rows, by the start of the query
        self.labels: dict[str, str] = {}  # on every row
        self.values: dict[str, float | None] = {}  # instead of the usual ones

    def __call__(self, url: str, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        assert url.endswith("/api/v1/query")
        query = form["query"]
        self.queries.append(query)
        if query.startswith("{") or ",__name__" in query:  # all facts at once
            rows = [
                {**row, "metric": {**row["metric"], "__name__": f"gpu_allocation_{fact}"}}
                for fact in FACTS
                for row in self.rows(f"gpu_allocation_{fact}")
            ]
        else:
            rows = self.rows(query.replace(f"max by ({', '.join(HOLDER_LABELS)}) (", ""))
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})

    def rows(self, query: str) -> list[dict[str, Any]]:
        place = {"node": "n1", "instance": "n1", "gpu": "0", "uuid": "GPU-0", "scheduler": "slurm", "job_id": "42"}
        if self.cluster:
            place["cluster"] = self.cluster
        values: dict[str, tuple[dict[str, str], float] | None] = {
            "gpu_allocation_idle_run_seconds": (place, 8000.0),
            "gpu_allocation_start_timestamp_seconds": (place, NOW - 9000.0),
            "gpu_allocation_held_seconds_total": (place, 9000.0),
            "gpu_allocation_observed_seconds_total": (place, 8990.0),
            "increase(gpu_allocation_held": (place, 7200.0),
            "increase(gpu_allocation_observed": (place, 7190.0),
            "min by (node": ({"node": "n1", "instance": "n1"}, 1.0),
            "gpu_allocation_info": ({**place, "user": "ada", "account": "phys"}, 1.0),
            "vector(time())": ({}, NOW),
            "time()": ({"node": "n1", "instance": "n1"}, 3.0),
            "gpu_allocation_idle_run_witnesses": (place, 4.0),
            "last_over_time(gpu_allocation_host_activity_ratio": None,
            "count(gpu_exporter_build_info": None if self.blind else ({}, 12.0),
            "count(gpu_allocation_info": ({}, 34.0),
            "count(count by (uuid, mig_uuid)": None,
            "count(gpu_up": ({}, 8.0) if self.enforced else None,
            "gpu_allocation_holder_units": (place, 1.0),
            "gpu_allocation_idle_gap_longest_seconds": None,
            "gpu_allocation_activity_unknown": None,
            "count by (uuid, name)": ({"uuid": "GPU-0", "name": "NVIDIA A100"}, 1.0),
        }
        start = next(start for start in values if query.startswith(start))
        found = values[start]
        if start in self.values:
            value = self.values[start]
            found = None if value is None else (found[0] if found is not None else {}, value)
        rows = [] if found is None else [{"metric": {**found[0], **self.labels}, "value": [NOW, str(found[1])]}]
        for start, more in self.more.items():
            if query.startswith(start):
                rows += [{"metric": {**place, **labels}, "value": [NOW, str(value)]} for labels, value in more]
        return rows


def test_promql_evidence_asks_for_suspects_first_and_restricts_the_rest() -> None:
    api = FakeApi()
    evidence = PromQLSource("http://p:9090/", 3600.0, 7200.0, ManualClock(wall=NOW), 'cluster="a"', api).read_evidence()
    (decision,) = decide(evidence, Policy())
    assert (decision.stage, decision.owner) == ("underused", "ada/phys")
    asked = [query for query in api.queries if "idle_run_seconds" in query]
    assert asked[0].endswith('(gpu_allocation_idle_run_seconds{cluster="a"} >= 3600)')
    assert asked[1].endswith('holder_units|idle_gap_longest_seconds|activity_unknown)",scheduler="slurm",job_id=~"42"}')
    assert all('cluster="a"' in query for query in api.queries if query != "vector(time())")
    assert len(api.queries) == 11


def read(api: FakeApi, *marked: HolderName) -> Evidence:
    return PromQLSource("http://p:9090", 3600.0, 7200.0, ManualClock(wall=NOW), "", api).read_evidence(marked)


@pytest.mark.parametrize(("ahead_s", "side"), [(121.0, "ahead of"), (3600.0, "ahead of"), (-121.0, "behind")])
def test_nothing_is_decided_by_a_clock_that_is_not_prometheus(ahead_s: float, side: str) -> None:
    api = FakeApi()
    api.values["vector(time())"] = NOW - ahead_s
    with pytest.raises(
        EvidenceError, match=rf"is {abs(ahead_s):.0f} s {side} that of Prometheus \(http://p:9090\): set"
    ):
        read(api)


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, 119.0, -119.0])  # VictoriaMetrics answers as of 30 s ago
def test_a_clock_that_is_nearly_prometheus_does(ahead_s: float) -> None:
    api = FakeApi()
    api.values["vector(time())"] = NOW - ahead_s
    assert read(api).holders


def test_both_sources_say_who_works_on_its_host() -> None:
    api = FakeApi()
    cpu, io = "gpu_allocation_host_activity_ratio", "gpu_allocation_host_io_bytes_per_second"
    source = PromQLSource(
        "http://p", 3600.0, 7200.0, ManualClock(wall=NOW), 'a="b"', api, host=HostLimits(0.25, 20_000_000)
    )
    assert source.read_evidence().holders[0].units[0].host_cpu_ratio is None
    asked = next(query for query in api.queries if cpu in query)
    job = 'a="b",scheduler="slurm",job_id=~"42"'
    assert asked == f"last_over_time({cpu}{{{job}}}[900s]) > 0.25 or last_over_time({io}{{{job}}}[900s]) > 2e+07"
    api.more["last_over_time(gpu_allocation_host_activity_ratio"] = [
        ({"__name__": cpu}, 0.5),
        ({"instance": "twin"}, 0.75),  # without a name
        ({"__name__": io}, 3e7),
        ({"__name__": cpu, "job_id": "43"}, 0.9),
    ]
    (unit,) = source.read_evidence().holders[0].units
    assert (unit.host_cpu_ratio, unit.host_io_bytes_per_s) == (0.75, 3e7)
    text = page(8000.0, 9000.0, 8900.0) + f"{cpu}{{{PLACE}}} 0.5\n{io}{{{PLACE}}} 1000\n"
    direct = ExporterSource(["n1:1"], 7200.0, ManualClock(wall=NOW), lambda _url: text)
    (unit,) = direct.read_evidence().holders[0].units
    assert (unit.host_cpu_ratio, unit.host_io_bytes_per_s) == (0.5, 1000.0)
    assert stage_of(text)[0] == "candidate"


def test_an_exporter_that_was_restarted_does_not_make_its_holders_idle() -> None:
    """It knows nothing of their work on the host for two minutes; what it said before still counts."""
    before = page(8000.0, 9000.0, 8900.0, NOW + 3600)
    texts = [before + f"gpu_allocation_host_activity_ratio{{{PLACE}}} 0.5\n", before]
    clock = ManualClock(wall=NOW)
    source = ExporterSource(["n1:1"], 7200.0, clock, lambda _url: texts[min(1, round(clock.wall() - NOW))])
    seen = []
    for seconds in (0.0, 60.0, 840.0, 1.0):
        clock.advance(seconds)
        seen.append(source.read_evidence().holders[0].units[0].host_cpu_ratio)
    assert seen == [0.5, 0.5, 0.5, None]
    pages = {"n1": before + f"gpu_allocation_host_activity_ratio{{{PLACE}}} 0.5\n", "n2": before}
    twins = ExporterSource(["n1:1", "n2:1"], 7200.0, clock, lambda url: pages[url[7:9]])
    ratios = [unit.host_cpu_ratio for unit in twins.read_evidence().holders[0].units]
    assert ratios == [0.5, None], "what one exporter of a GPU said is not the other's word"
    assert source._host == {}


@pytest.mark.parametrize("count", [1.0, 9.0])
def test_of_two_rows_for_one_unit_the_smaller_count_of_witnesses_counts_in_promql_too(count: float) -> None:
    api = FakeApi()
    api.more["gpu_allocation_idle_run_witnesses"] = [({"gpu": "9", "node": "n2"}, count)]
    assert read(api).holders[0].units[0].witnesses == min(4, count)
    api.more = {"gpu_allocation_idle_run_witnesses": [({"job_id": "43"}, 1.0)]}  # of another holder of the same GPU
    assert read(api).holders[0].units[0].witnesses == 4


def test_promql_coverage_is_the_quotient_of_increases_and_careful_where_they_do_not_reach_back() -> None:
    api = FakeApi()
    assert read(api).holders[0].units[0].coverage == pytest.approx(7190 / 7200)
    assert {query for query in api.queries if "increase(" in query} == {
        f'increase(gpu_allocation_{name}_seconds_total{{scheduler="slurm",job_id=~"42"}}[7200s])'
        for name in ("held", "observed")
    }
    api.values["gpu_allocation_observed_seconds_total"] = 1000.0  # badly seen, before what Prometheus has
    api.values["increase(gpu_allocation_held"] = api.values["increase(gpu_allocation_observed"] = 600.0
    assert read(api).holders[0].units[0].coverage == pytest.approx(600 / 7200)


def beside(**values: float) -> FakeApi:
    """A second target speaks for the same GPU, with these values: total and growth of held and observed time."""
    api = FakeApi()
    for name in ("held", "observed"):
        for start, key in ((f"gpu_allocation_{name}", name), (f"increase(gpu_allocation_{name}", f"{name}_in")):
            if key in values:
                api.more[start] = [({"node": "n2", "instance": "n2"}, values[key])]
    return api


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({"held": 600.0, "observed": 594.0, "held_in": 600.0, "observed_in": 594.0}, 0.99),
        ({"held": 9000.0, "observed": 9000.0, "held_in": 7200.0, "observed_in": 7200.0}, 7190 / 7200),
        ({"held": 90_000.0, "observed": 80_000.0, "held_in": 7200.0, "observed_in": 3600.0}, 0.5),
        ({"held": 90_000.0, "observed": 80_000.0}, 0.0),  # one sample: it may not have seen any of it
        ({"held_in": 1000.0, "observed_in": 800.0}, 0.8),  # it ended within the window
        ({"held": 600.0, "held_in": 600.0}, None),  # what it has seen is not known
        ({"observed": 600.0, "observed_in": 600.0}, None),
    ],
)
def test_coverage_is_of_each_target_and_the_smallest_of_a_unit_counts(
    values: dict[str, float], share: float | None
) -> None:
    """The growth of one target must not be divided by that of another, which began at another time."""
    got = read(beside(**values)).holders[0].units[0].coverage
    assert got == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_rows_for_one_unit_the_later_start_and_the_larger_holder_count_in_promql(first: int) -> None:
    api = FakeApi()
    for metric, pair in (
        ("gpu_allocation_start_timestamp_seconds", (NOW - 9000.0, NOW - 20_000.0)),
        ("gpu_allocation_holder_units", (3.0, 1.0)),
        ("gpu_allocation_idle_run_seconds", (7300.0, 8000.0)),
    ):
        api.values[metric] = pair[first]
        api.more[metric] = [({"node": "n2"}, pair[1 - first])]
    (holder,) = read(api).holders
    (unit,) = holder.units
    assert (unit.start_wall, unit.idle_run_s, holder.held) == (NOW - 9000.0, 7300.0, 3)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_rows_for_one_allocation_on_a_page_the_more_careful_value_counts(first: int) -> None:
    """More time held and less of it observed, a later start, a larger holder, a shorter run."""
    pairs = {
        "held_seconds_total": (9000.0, 8000.0),
        "observed_seconds_total": (6300.0, 8000.0),
        "start_timestamp_seconds": (NOW - 9000.0, NOW - 20_000.0),
        "holder_units": (3.0, 1.0),
        "idle_run_seconds": (7300.0, 8000.0),
    }
    place = (PLACE, PLACE.replace('gpu="0"', 'gpu="9"'))
    text = f"gpu_exporter_last_sample_timestamp_seconds {NOW}\ngpu_allocation_info{{{PLACE}}} 1\n"
    for name, pair in pairs.items():
        for labels, value in zip(place, (pair[first], pair[1 - first]), strict=True):
            text += f"gpu_allocation_{name}{{{labels}}} {value}\n"
    (holder,) = ExporterSource(["n1:1"], 20_000.0, ManualClock(wall=NOW), lambda _url: text).read_evidence().holders
    (unit,) = holder.units
    assert unit.coverage == pytest.approx(6300 / 9000)
    assert (unit.start_wall, unit.idle_run_s, holder.held) == (NOW - 9000.0, 7300.0, 3)


def test_an_absent_idle_run_is_unknown_in_promql() -> None:
    """The job holds a second GPU, which does not answer: there is a row of info for it, and no idle run."""
    api = FakeApi()
    api.more = {"gpu_allocation_info": [({"gpu": "1", "uuid": "GPU-1"}, 1.0)]}
    (decision,) = decide(read(api), Policy())
    assert (decision.stage, decision.active) == ("unknown", False)
    assert decision.reason == "no idle run is published of n1 gpu 1: its activity is not known"


@pytest.mark.parametrize(
    ("asked", "query"),
    [
        ("3010_1", 'gpu_allocation_info{array_job_id="3010",array_task_id="1"}'),
        ("3011+1", 'gpu_allocation_info{het_job_id="3011",het_job_offset="1"}'),
    ],
)
def test_a_job_is_found_by_the_id_that_its_users_write(asked: str, query: str) -> None:
    api = FakeApi()
    place = {"array_job_id": "3010", "array_task_id": "1"} if "_" in asked else {}
    place = place or {"het_job_id": "3011", "het_job_offset": "1"}
    api.labels = place
    api.values["gpu_allocation_idle_run_seconds"] = None
    (found,) = read(api, HolderName("slurm", "", asked)).holders
    assert (found.name.name, found.users_id) == ("42", asked)
    assert query in api.queries


@pytest.mark.parametrize("label", ["exported_namespace", "exported_pod", "exported_container"])
def test_labels_that_prometheus_renamed_are_refused_by_name_with_the_remedy(label: str) -> None:
    api = FakeApi()
    api.labels = {label: "train-0"}
    with pytest.raises(EvidenceError, match=f"the series have {label}, so pod and namespace .* set honorLabels: true"):
        read(api)
    text = page(8000.0, 9000.0, 8900.0).replace('job_id="42"', f'job_id="42",{label}="train-0"')
    with pytest.raises(EvidenceError, match=f"http://n1:9836/metrics: the series have {label}.*honorLabels"):
        stage_of(text)


def test_a_namespace_that_prometheus_enforces_is_refused_by_name_with_the_remedy() -> None:
    api = FakeApi()
    api.enforced = True
    with pytest.raises(EvidenceError, match=r"gpu_up\) have a namespace.*nothing is decided; .*enforcedNamespaceLabel"):
        read(api)
    assert 'count(gpu_up{namespace!=""})' in api.queries


def test_seeing_nothing_is_not_the_same_as_nothing_being_idle() -> None:
    api = FakeApi()
    api.blind = True
    with pytest.raises(EvidenceError, match=r'no gpu-exporter series match \{job="x"\}: see --source.matcher'):
        PromQLSource("http://p:9090", 3600.0, 7200.0, ManualClock(wall=NOW), 'job="x"', api).read_evidence()


def test_one_exporter_that_is_down_is_a_problem_and_not_the_end() -> None:
    def fetch(url: str) -> str:
        if "n2" in url:
            raise EvidenceError(f"{url}: connection refused")
        return page(8000.0, 9000.0, 8900.0, units=2)

    evidence = ExporterSource(
        ["n1:9836", "http://n2:9836/metrics"], 7200.0, ManualClock(wall=NOW), fetch
    ).read_evidence()
    assert evidence.problems == ("http://n2:9836/metrics: connection refused",)
    (decision,) = decide(evidence, Policy())
    assert decision.stage == "unknown"  # the job's other GPU is on the node that is not seen
    with pytest.raises(EvidenceError, match="connection refused"):
        ExporterSource(["http://n2:9836/metrics"], 7200.0, ManualClock(wall=NOW), fetch).read_evidence()


@pytest.mark.parametrize("text", ["n1:9836", "http://n1:9836", "http://n1:9836/", "http://n1:9836/metrics"])
def test_addresses_of_exporters(text: str) -> None:
    assert complete_url(text) == "http://n1:9836/metrics"


def test_hostile_names_stay_inside_their_matcher() -> None:
    """As RE2 inside a PromQL string: each special character is escaped for both."""
    (matcher,) = restrict([HolderName("kubernetes", "ml", 'a.b"c\\d')])
    assert matcher == r'scheduler!="slurm",pod=~"a\\.b\\\"c\\\\d"'


def test_holders_of_both_schedulers_are_asked_for_in_queries_that_every_server_takes() -> None:
    pods = {HolderName("kubernetes", f"team-{i % 7}", f"train-{i:05d}") for i in range(5000)}
    jobs = {HolderName("slurm", "", str(i)) for i in range(1_000_000, 1_003_000)}
    matchers = list(restrict(pods | jobs))
    assert max(map(len, matchers)) < MATCHER_MAX + 100
    found = {"scheduler!=": set[str](), "scheduler=": set[str]()}
    for matcher in matchers:
        kind = matcher.partition('"')[0]
        found[kind].update(matcher.split("~")[1].strip('"').split("|"))
    assert found == {"scheduler!=": {pod.name for pod in pods}, "scheduler=": {job.name for job in jobs}}
    assert len(matchers) == 5 + 2


def test_numbers_that_are_none_are_no_evidence() -> None:
    text = '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "NaN"]}]}}'
    assert parse_vector(text, "x") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not an answer of a PromQL API"),
        ("[" * 100_000, "not an answer of a PromQL API"),
        ('{"a":' * 100_000, "not an answer of a PromQL API"),
        ("[]", "not an answer of a PromQL API"),
        (
            '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {"pod": 1}, "value": [1, "1"]}]}}',
            "not an answer of a PromQL API",
        ),
        ('{"status": "error", "error": "bad\\u001b[31m\\nquery"}', "query failed: bad.{2}31m.query: up$"),
        ('{"status": "error", "error": "bad query"}', "query failed: bad query"),
        ('{"status": "success", "data": {"resultType": "matrix", "result": []}}', "expected a vector, not a matrix"),
        (
            '{"status": "success", "warnings": ["x"], "data": {"resultType": "vector", "result": []}}',
            "the answer is partial",
        ),
    ],
)
def test_answers_that_decide_nothing(text: str, message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        parse_vector(text, "up")


def test_models_are_asked_for_once_and_only_where_a_policy_looks_at_them() -> None:
    api = FakeApi()
    source = PromQLSource("http://p:9090", 3600.0, 7200.0, ManualClock(wall=NOW), 'job="x"', api, asks_models=True)
    assert source.read_evidence().holders[0].units[0].model == "NVIDIA A100"
    (asked,) = [query for query in api.queries if "gpu_info" in query]
    assert asked == 'count by (uuid, name) (gpu_info{job="x",uuid=~"GPU-0"})'
    api.queries.clear()
    assert source.read_evidence().holders[0].units[0].model == "NVIDIA A100"
    assert not [query for query in api.queries if "gpu_info" in query]
    assert read(FakeApi()).holders[0].units[0].model == ""


def test_what_jobs_are_chosen_by_comes_from_their_info_series() -> None:
    facts = read(FakeApi()).holders[0].facts
    assert facts == {
        "user": frozenset({"ada"}),
        "account": frozenset({"phys"}),
        "partition": frozenset({""}),
        "qos": frozenset({""}),
        "resource": frozenset({""}),
    }


def test_of_two_rows_for_one_unit_the_longer_gap_counts() -> None:
    api = FakeApi()
    assert read(api).holders[0].units[0].longest_gap_s == 0.0
    api.more = {"gpu_allocation_idle_gap_longest_seconds": [({}, 4000.0), ({"node": "n2"}, 5000.0)]}
    assert read(api).holders[0].units[0].longest_gap_s == 5000.0
    text = page(8000.0, 9000.0, 8900.0) + f"gpu_allocation_idle_gap_longest_seconds{{{PLACE}}} 4000\n"
    source = ExporterSource(["http://n1/metrics"], 7200.0, ManualClock(wall=NOW), lambda _url: text)
    assert source.read_evidence().holders[0].units[0].longest_gap_s == 4000.0


@pytest.mark.parametrize(("reason", "stage"), [("suspended", "not_running"), ("<script>", "unknown")])
def test_both_sources_say_why_there_is_no_idle_run(reason: str, stage: str) -> None:
    api = FakeApi()
    api.more = {"gpu_allocation_activity_unknown": [({"reason": reason}, 1.0)]}
    assert read(api).holders[0].units[0].obstacle == ("" if stage == "unknown" else reason)
    text = page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_seconds", "x")
    assert stage_of(f'{text}gpu_allocation_activity_unknown{{{PLACE},reason="{reason}"}} 1\n')[0] == stage


def test_a_hint_has_a_time_of_its_own_after_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, within = [0.0], dict[str, float]()

    class Slow(FakeApi):
        def __call__(self, url: str, form: dict[str, str], most_bytes: int, within_s: float) -> str:
            if "bottomk" in form["query"]:
                within["hint"] = within_s
                raise EvidenceError("too many samples")
            now[0] += 2.9  # ten queries leave little of the thirty seconds
            return super().__call__(url, form, most_bytes, within_s)

    monkeypatch.setattr("gpu_exporter.reconciler.evidence.promql.time.monotonic", lambda: now[0])
    peaks = Peaks(0.2, 7 * 86_400.0, ManualClock(wall=NOW))
    source = PromQLSource("http://p:9090", 3600.0, 7200.0, ManualClock(wall=NOW), "", Slow(), peaks=peaks)
    evidence = source.read_evidence()
    assert (len(evidence.holders), within) == (1, {"hint": 10.0}), "and its failure costs no evidence"
