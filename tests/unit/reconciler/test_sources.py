"""Evidence from both sources: the same facts, and refusals of what is partial."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path

import pytest

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.direct import ExporterSource, complete_url, fetch_text
from gpu_exporter.reconciler.evidence import EvidenceError
from gpu_exporter.reconciler.policy import decide
from gpu_exporter.reconciler.promql import PromQLSource, _match_any, parse_vector

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "demo.prom"
NOW = 1_700_001_800.0
PLACE = 'gpu="0",uuid="GPU-0",scheduler="slurm",job_id="42"'


def page(idle_run: float, held: float, observed: float, last_sample: float = NOW, units: int = 1) -> str:
    return (
        f"gpu_exporter_last_sample_timestamp_seconds {last_sample}\n"
        "gpu_exporter_sample_interval_seconds 1\n"
        'gpu_idle_witnesses{gpu="0",uuid="GPU-0"} 4\n'
        f'gpu_allocation_info{{{PLACE},user="ada",account="phys"}} 1\n'
        f"gpu_allocation_start_timestamp_seconds{{{PLACE}}} {NOW - held}\n"
        f"gpu_allocation_holder_units{{{PLACE}}} {units}\n"
        f"gpu_allocation_idle_run_seconds{{{PLACE}}} {idle_run}\n"
        f"gpu_allocation_held_seconds_total{{{PLACE}}} {held}\n"
        f"gpu_allocation_observed_seconds_total{{{PLACE}}} {observed}\n"
    )


def stage_of(text: str) -> tuple[str, str]:
    source = ExporterSource(["http://n1:9836/metrics"], 7200.0, lambda: NOW, lambda _url: text)
    (decision,) = decide(source.read_evidence(), Policy())
    return decision.stage, decision.owner


def test_direct_evidence_carries_every_number() -> None:
    assert stage_of(page(8000.0, 9000.0, 8900.0)) == ("underused", "ada/phys")
    assert stage_of(page(8000.0, 9000.0, 4000.0))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0, units=8))[0] == "unknown"  # seven of its GPUs are not seen here
    assert stage_of(page(8000.0, 9000.0, 8900.0, NOW - 600))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_seconds", "x"))[0] == "unknown"


def test_direct_coverage_is_measured_over_the_window_once_it_is_known() -> None:
    """Well observed for a day, badly for the last two hours: the whole life must not hide that."""
    now = [0.0]
    text = [""]
    source = ExporterSource(["http://n1/metrics"], 7200.0, lambda: now[0], lambda _url: text[0])
    for minute in range(0, 1440 + 121, 1):
        now[0] = NOW + minute * 60.0
        well = min(minute, 1440) * 60.0
        text[0] = page(100.0, minute * 60.0 + 1, well + 1)
        evidence = source.read_evidence()
    coverage = evidence.holders[0].units[0].coverage
    assert coverage is not None
    assert coverage < 0.05


def test_the_demo_page_is_evidence() -> None:
    source = ExporterSource(["http://n1/metrics"], 7200.0, lambda: NOW, lambda _url: GOLDEN.read_text("utf-8"))
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
    source = ExporterSource(["http://n1/metrics"], 7200.0, lambda: NOW, lambda _url: "<html>login</html>")
    with pytest.raises(EvidenceError, match="http://n1/metrics: not in the Prometheus text format"):
        source.read_evidence()


def test_too_many_exporters_are_refused() -> None:
    with pytest.raises(ValueError, match="201 exporters are more than 200: use --source.prometheus"):
        ExporterSource(["http://n/"] * 201, 1.0, lambda: NOW)


class FakeApi:
    """Answers PromQL by the metric that a query starts from."""

    def __init__(self, cluster: str = "") -> None:
        self.queries: list[str] = []
        self.cluster = cluster
        self.blind = False

    def __call__(self, url: str) -> str:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)["query"][0]
        self.queries.append(query)
        place = {"node": "n1", "instance": "n1", "gpu": "0", "uuid": "GPU-0", "scheduler": "slurm", "job_id": "42"}
        if self.cluster:
            place["cluster"] = self.cluster
        values = {
            "gpu_allocation_idle_run_seconds": (place, 8000.0),
            "gpu_allocation_start_timestamp_seconds": (place, NOW - 9000.0),
            "min by (uuid": (place, 0.99),
            "min by (node": ({"node": "n1", "instance": "n1"}, 1.0),
            "gpu_allocation_info": ({**place, "user": "ada", "account": "phys"}, 1.0),
            "time()": ({"node": "n1", "instance": "n1"}, 3.0),
            "gpu_idle_witnesses": ({"uuid": "GPU-0"}, 4.0),
            "gpu_mig_idle_witnesses": None,
            "count(gpu_exporter_build_info": None if self.blind else ({}, 12.0),
            "count(gpu_allocation_info": ({}, 34.0),
            "gpu_allocation_holder_units": (place, 1.0),
        }
        found = next(value for start, value in values.items() if query.startswith(start))
        rows = [] if found is None else [{"metric": found[0], "value": [NOW, str(found[1])]}]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}})


def test_promql_evidence_asks_for_suspects_first_and_restricts_the_rest() -> None:
    api = FakeApi()
    evidence = PromQLSource("http://p:9090/", 3600.0, 7200.0, lambda: NOW, 'cluster="a"', api).read_evidence()
    (decision,) = decide(evidence, Policy())
    assert (decision.stage, decision.owner) == ("underused", "ada/phys")
    assert api.queries[0] == 'gpu_allocation_idle_run_seconds{cluster="a"} >= 3600'
    assert all('cluster="a"' in query for query in api.queries)
    assert 'gpu_allocation_info{cluster="a",job_id=~"42"}' in api.queries


def test_seeing_nothing_is_not_the_same_as_nothing_being_idle() -> None:
    api = FakeApi()
    api.blind = True
    with pytest.raises(EvidenceError, match=r'no gpu-exporter series match \{job="x"\}: see --source.matcher'):
        PromQLSource("http://p:9090", 3600.0, 7200.0, lambda: NOW, 'job="x"', api).read_evidence()


def test_one_exporter_that_is_down_is_a_problem_and_not_the_end() -> None:
    def fetch(url: str) -> str:
        if "n2" in url:
            raise EvidenceError(f"{url}: connection refused")
        return page(8000.0, 9000.0, 8900.0, units=2)

    evidence = ExporterSource(["n1:9836", "http://n2:9836/metrics"], 7200.0, lambda: NOW, fetch).read_evidence()
    assert evidence.problems == ("http://n2:9836/metrics: connection refused",)
    (decision,) = decide(evidence, Policy())
    assert decision.stage == "unknown"  # the job's other GPU is on the node that is not seen
    with pytest.raises(EvidenceError, match="connection refused"):
        ExporterSource(["http://n2:9836/metrics"], 7200.0, lambda: NOW, fetch).read_evidence()


@pytest.mark.parametrize("text", ["n1:9836", "http://n1:9836", "http://n1:9836/", "http://n1:9836/metrics"])
def test_addresses_of_exporters(text: str) -> None:
    assert complete_url(text) == "http://n1:9836/metrics"


def test_hostile_names_stay_inside_their_matcher() -> None:
    """As RE2 inside a PromQL string: each special character is escaped for both."""
    assert _match_any("pod", {'a.b"c\\d'}) == r'pod=~"a\\.b\\\"c\\\\d"'


def test_numbers_that_are_none_are_no_evidence() -> None:
    text = '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "NaN"]}]}}'
    assert parse_vector(text, "x") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not an answer of a PromQL API"),
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
