"""What the tests of this subject share: evidence from the exporters themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.matchers import HOLDER_LABELS
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.promql import FACTS, PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName

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
    source = ExporterSource(
        [parse_exporter("http://n1:9836/metrics")], 7200.0, ManualClock(wall=NOW), lambda _url: text
    )
    (decision,) = decide(source.read_evidence(), Policy())
    return decision.stage, decision.owner


def at_most_covered(on_s: int, off_s: int) -> float:
    """The highest coverage of an exporter that comes and goes for four hours, read every 30 s."""
    clock = ManualClock(wall=-30.0)

    def fetch(address: Address) -> str:
        if clock.wall() % (on_s + off_s) >= on_s:
            raise AnswerError(f"{address}: connection refused")
        rounds, rest = divmod(clock.wall(), on_s + off_s)
        return page(10_000.0, clock.wall() + 1.0, rounds * on_s + rest + 1.0)

    source = ExporterSource([parse_exporter("http://n1/metrics")], 7200.0, clock, fetch)
    shares = []
    for _ in range(0, 14_400, 30):
        clock.advance(30.0)
        try:
            evidence = source.read_evidence()
        except AnswerError:
            continue
        shares.append(evidence.holders[0].units[0].coverage or 0.0)
    return max(shares[20:])


class FakeApi:
    """Answers a PromQL query by the text that it begins with."""

    def __init__(self, cluster: str = "") -> None:
        self.queries: list[str] = []
        self.cluster = cluster
        self.blind = self.enforced = False
        self.more: dict[str, list[tuple[dict[str, str], float]]] = {}  # further rows, by the beginning of the query
        self.series: list[tuple[dict[str, str], float]] = []  # of the state and the causes of a holder
        self.labels: dict[str, str] = {}  # added to every row
        self.values: dict[str, float | None] = {}  # instead of the usual ones

    def __call__(self, address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        assert address.path == "/api/v1/query"
        query = form["query"]
        self.queries.append(query)
        if "|cause_value)" in query:
            rows = [{"metric": labels, "value": [NOW, str(value)]} for labels, value in self.series]
        elif query.startswith("{") or ",__name__" in query:  # the query for all facts together
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
            "count by (node, instance) (last_over_time(gpu_exporter_build_info": None,
            "count by (node, instance, scheduler, namespace, pod, job_id, pod_uid": None,
            "max by (instance, job_id) (last_over_time(gpu_allocation_start": None,
            "last_over_time(gpu_allocation_host_": None,
            "max by (uuid, mig_uuid": None,
            "gpu_allocation_last_active_timestamp_seconds": None,
            "count(gpu_exporter_build_info": None if self.blind else ({}, 12.0),
            "count(gpu_allocation_info": ({}, 34.0),
            "count(count by (uuid, mig_uuid)": None,
            "count(gpu_up": ({}, 8.0) if self.enforced else None,
            "gpu_allocation_holder_units": (place, 1.0),
            "gpu_allocation_idle_gap_longest_seconds": None,
            "gpu_allocation_activity_unknown": None,
            "gpu_allocation_cause": None,
            "gpu_allocation_stalled_run_seconds": None,
            "sum by (uuid, mig) (increase(": None,
            "max by (uuid, mig) (": None,
            "max_over_time((0 * count": None,
            "topk(": None,
            "up{": None,
            "count by (__name__)": None,
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


def prometheus(api: Fetch, matcher: str = "", peaks: Peaks | None = None, **options: Any) -> PromQLSource:
    about = PromQLOptions(parse_address("http://p:9090"), 3600.0, 7200.0, matcher)
    return PromQLSource(about._replace(**options), ManualClock(wall=NOW), api, peaks=peaks)


def read(api: FakeApi, *marked: HolderName) -> Evidence:
    return prometheus(api).read_evidence(marked)


def beside(**values: float) -> FakeApi:
    """An API with a second target for the same GPU. `values`: total and growth of its held and observed time."""
    api = FakeApi()
    for name in ("held", "observed"):
        for start, key in ((f"gpu_allocation_{name}", name), (f"increase(gpu_allocation_{name}", f"{name}_in")):
            if key in values:
                api.more[start] = [({"node": "n2", "instance": "n2"}, values[key])]
    return api
