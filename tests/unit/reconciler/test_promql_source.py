"""Evidence from a PromQL API, and facts that both sources report."""

from __future__ import annotations

import math

import pytest
from tests.unit.reconciler.sources_bench import NOW, PLACE, FakeApi, beside, page, prometheus, read, stage_of

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql import vector
from gpu_exporter.common.promql.vector import TooManyRows, parse_vector
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.matchers import MATCHER_MAX, restrict
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.records import HolderName, HostLimits, Unseen


def test_promql_evidence_asks_for_suspects_first_and_then_only_about_them() -> None:
    api = FakeApi()
    evidence = prometheus(api, 'cluster="a"').read_evidence()
    (decision,) = decide(evidence, Policy())
    assert (decision.stage, decision.owner) == ("underused", "ada/phys")
    asked = [query for query in api.queries if "idle_run_seconds" in query]
    assert asked[0].endswith(
        '(gpu_allocation_idle_run_seconds{cluster="a"} >= 3600 or gpu_allocation_stalled_run_seconds{cluster="a"} > 0 '
        'or (gpu_allocation_idle_run_seconds{cluster="a"} '
        'and time() - gpu_allocation_last_active_timestamp_seconds{cluster="a"} >= 7200))'
    )
    assert asked[1].endswith(
        "holder_units|idle_gap_longest_seconds|activity_unknown|stalled_run_seconds|cause|"
        'last_active_timestamp_seconds)",scheduler="slurm",job_id=~"42"}'
    )
    assert all('cluster="a"' in query for query in api.queries if query != "vector(time())")
    assert len(api.queries) == 12


@pytest.mark.parametrize(("ahead_s", "side"), [(121.0, "ahead of"), (3600.0, "ahead of"), (-121.0, "behind")])
def test_nothing_is_decided_while_the_clocks_of_reconciler_and_prometheus_differ(ahead_s: float, side: str) -> None:
    api = FakeApi()
    api.values["vector(time())"] = NOW - ahead_s
    with pytest.raises(
        AnswerError,
        match=rf"is {abs(ahead_s):.0f} s {side} the clock of Prometheus \(http://p:9090\)\. The reconciler makes no decisions",
    ):
        read(api)


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, 119.0, -119.0])  # VictoriaMetrics answers as of 30 s ago
def test_a_small_difference_from_the_clock_of_prometheus_is_ignored(ahead_s: float) -> None:
    api = FakeApi()
    api.values["vector(time())"] = NOW - ahead_s
    assert read(api).holders


def test_both_sources_report_work_on_the_host() -> None:
    api = FakeApi()
    cpu, io = "gpu_allocation_host_activity_ratio", "gpu_allocation_host_io_bytes_per_second"
    source = prometheus(api, 'a="b"', host=HostLimits(0.25, 20_000_000))
    assert source.read_evidence().holders[0].units[0].host_cpu_ratio is None
    assert source.read_evidence().holders[0].units[0].host_cores is None
    job = 'a="b",scheduler="slurm",job_id=~"42"'
    cpus = "gpu_allocation_host_cpus"
    for name, limit in ((cpu, ""), (io, " > 2e+07"), (cpus, "")):
        assert f"last_over_time({name}{{{job}}}[900s]){limit}" in api.queries
    api.more[f"last_over_time({cpu}"] = [({}, 0.5), ({"instance": "twin"}, 0.75), ({"job_id": "43"}, 0.9)]
    api.more[f"last_over_time({io}"] = [({}, 3e7)]
    api.more[f"last_over_time({cpus}"] = [({}, 16.0), ({"instance": "twin"}, 16.0), ({"instance": "other"}, 9.0)]
    (unit,) = source.read_evidence().holders[0].units
    assert (unit.host_cpu_ratio, unit.host_io_bytes_per_s) == (0.75, 3e7)
    assert (unit.host_cores, unit.host_cpus) == (12.0, 16.0)
    text = page(8000.0, 9000.0, 8900.0) + f"{cpu}{{{PLACE}}} 0.5\n{io}{{{PLACE}}} 1000\n"
    direct = ExporterSource([parse_exporter("n1:1")], 7200.0, ManualClock(wall=NOW), lambda _url: text)
    (unit,) = direct.read_evidence().holders[0].units
    assert (unit.host_cpu_ratio, unit.host_io_bytes_per_s, unit.host_cores) == (0.5, 1000.0, None)
    assert stage_of(text)[0] == "candidate"


def test_work_on_the_host_still_counts_after_a_restart_of_the_exporter() -> None:
    """For two minutes a restarted exporter has no values of work on the host. Its earlier values count meanwhile."""
    before = page(8000.0, 9000.0, 8900.0, NOW + 3600)
    texts = [before + f"gpu_allocation_host_activity_ratio{{{PLACE}}} 0.5\n", before]
    clock = ManualClock(wall=NOW)
    source = ExporterSource(
        [parse_exporter("n1:1")], 7200.0, clock, lambda _url: texts[min(1, round(clock.wall() - NOW))]
    )
    seen = []
    for seconds in (0.0, 60.0, 840.0, 1.0):
        clock.advance(seconds)
        seen.append(source.read_evidence().holders[0].units[0].host_cpu_ratio)
    assert seen == [0.5, 0.5, 0.5, None]
    pages = {"n1": before + f"gpu_allocation_host_activity_ratio{{{PLACE}}} 0.5\n", "n2": before}
    twins = ExporterSource(
        [parse_exporter("n1:1"), parse_exporter("n2:1")], 7200.0, clock, lambda address: pages[address.host]
    )
    ratios = [unit.host_cpu_ratio for unit in twins.read_evidence().holders[0].units]
    assert ratios == [0.5, None], "the value of one exporter does not count for another exporter of the same GPU"
    assert source._host == {}


@pytest.mark.parametrize(("ratio", "cores"), [(0.05625, 0.9), (0.05624, None), (math.nan, None), (1.0, 16.0)])
def test_an_exporters_page_shows_cpu_cores_from_one_thread_on(ratio: float, cores: float | None) -> None:
    text = page(8000.0, 9000.0, 8900.0) + f"gpu_allocation_host_activity_ratio{{{PLACE}}} {ratio}\n"
    for more, expected in (("", None), (f"gpu_allocation_host_cpus{{{PLACE}}} 16\n", cores)):
        source = ExporterSource([parse_exporter("n1:1")], 7200.0, ManualClock(wall=NOW), lambda _url, t=text + more: t)
        assert source.read_evidence().holders[0].units[0].host_cores == expected


@pytest.mark.parametrize("count", [1.0, 9.0])
def test_if_promql_has_two_rows_for_one_unit_the_smaller_count_of_witnesses_counts(count: float) -> None:
    api = FakeApi()
    api.more["gpu_allocation_idle_run_witnesses"] = [({"gpu": "9", "node": "n2"}, count)]
    assert read(api).holders[0].units[0].witnesses == min(4, count)
    api.more = {"gpu_allocation_idle_run_witnesses": [({"job_id": "43"}, 1.0)]}  # another holder of the same GPU
    assert read(api).holders[0].units[0].witnesses == 4


def test_promql_coverage_is_the_quotient_of_increases_and_a_lower_bound_for_short_series() -> None:
    api = FakeApi()
    assert read(api).holders[0].units[0].coverage == pytest.approx(7190 / 7200)
    assert {query for query in api.queries if "increase(" in query} == {
        f'increase(gpu_allocation_{name}_seconds_total{{scheduler="slurm",job_id=~"42"}}[7200s])'
        for name in ("held", "observed")
    }
    api.values["gpu_allocation_observed_seconds_total"] = 1000.0  # mostly unobserved, before the samples in Prometheus
    api.values["increase(gpu_allocation_held"] = api.values["increase(gpu_allocation_observed"] = 600.0
    assert read(api).holders[0].units[0].coverage == pytest.approx(600 / 7200)


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({"held": 600.0, "observed": 594.0, "held_in": 600.0, "observed_in": 594.0}, 0.99),
        ({"held": 9000.0, "observed": 9000.0, "held_in": 7200.0, "observed_in": 7200.0}, 7190 / 7200),
        ({"held": 90_000.0, "observed": 80_000.0, "held_in": 7200.0, "observed_in": 3600.0}, 0.5),
        (
            {"held": 90_000.0, "observed": 80_000.0},
            0.0,
        ),  # one sample: the target may have observed nothing of the window
        ({"held_in": 1000.0, "observed_in": 800.0}, 0.8),  # the target ended within the window
        ({"held": 600.0, "held_in": 600.0}, None),  # observed time is missing
        ({"observed": 600.0, "observed_in": 600.0}, None),
    ],
)
def test_coverage_is_computed_per_target_and_the_smallest_of_a_unit_counts(
    values: dict[str, float], share: float | None
) -> None:
    """The growth of one target must not be divided by the growth of another target, which began at another time."""
    got = read(beside(**values)).holders[0].units[0].coverage
    assert got == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize("first", [0, 1])
def test_if_promql_has_two_rows_for_one_unit_the_later_start_and_the_larger_holder_count(first: int) -> None:
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
def test_if_a_page_has_two_rows_for_one_allocation_the_more_careful_value_counts(first: int) -> None:
    """More careful means more held time, less observed time, a later start, a larger holder, a shorter run."""
    pairs = {
        "held_seconds_total": (9000.0, 8000.0),
        "observed_seconds_total": (6300.0, 8000.0),
        "start_timestamp_seconds": (NOW - 9000.0, NOW - 20_000.0),
        "holder_units": (3.0, 1.0),
        "idle_run_seconds": (7300.0, 8000.0),
        "stalled_run_seconds": (900.0, 1200.0),
    }
    place = (PLACE, PLACE.replace('gpu="0"', 'gpu="9"'))
    text = f"gpu_exporter_last_sample_timestamp_seconds {NOW}\ngpu_allocation_info{{{PLACE}}} 1\n"
    for name, pair in pairs.items():
        for labels, value in zip(place, (pair[first], pair[1 - first]), strict=True):
            text += f"gpu_allocation_{name}{{{labels}}} {value}\n"
    (holder,) = (
        ExporterSource([parse_exporter("n1:1")], 20_000.0, ManualClock(wall=NOW), lambda _url: text)
        .read_evidence()
        .holders
    )
    (unit,) = holder.units
    assert unit.coverage == pytest.approx(6300 / 9000)
    assert (unit.start_wall, unit.idle_run_s, unit.stalled_run_s, holder.held) == (NOW - 9000.0, 7300.0, 900.0, 3)


def test_a_holder_with_a_gpu_without_an_idle_run_is_unknown_in_promql() -> None:
    """The second GPU of the job does not answer: it has a row of info, but no idle run."""
    api = FakeApi()
    api.more = {"gpu_allocation_info": [({"gpu": "1", "uuid": "GPU-1"}, 1.0)]}
    (decision,) = decide(read(api), Policy())
    assert (decision.stage, decision.active) == ("unknown", False)
    assert decision.reason == "the idle time of n1 gpu 1 is unknown: its activity is not known"


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
def test_labels_that_prometheus_renamed_are_an_error_with_the_remedy(label: str) -> None:
    api = FakeApi()
    api.labels = {label: "train-0"}
    with pytest.raises(
        AnswerError, match=f"the series have {label}, so their labels pod and namespace .* Set honorLabels: true"
    ):
        read(api)
    text = page(8000.0, 9000.0, 8900.0).replace('job_id="42"', f'job_id="42",{label}="train-0"')
    with pytest.raises(AnswerError, match=f"http://n1:9836/metrics: the series have {label}.*honorLabels"):
        stage_of(text)


def test_a_namespace_label_that_prometheus_enforces_is_an_error_with_the_remedy() -> None:
    api = FakeApi()
    api.enforced = True
    with pytest.raises(
        AnswerError, match=r"gpu_up have the label `namespace`.*makes no decisions\. .*enforcedNamespaceLabel"
    ):
        read(api)
    assert 'count(gpu_up{namespace!=""})' in api.queries


def test_an_answer_without_any_series_of_exporters_is_an_error_whose_reason_is_not_looked_for_in_each_cycle() -> None:
    api = FakeApi()
    api.blind = True
    source = prometheus(api, 'job="x"')
    for asked in (10, 3, 3):  # queries
        api.queries.clear()
        with pytest.raises(AnswerError, match=r'no gpu-exporter series match \{job="x"\}: Prometheus has had no such'):
            source.read_evidence()
        assert len(api.queries) == asked, api.queries
    api.blind = False
    assert source.read_evidence().holders
    api.blind = True
    with pytest.raises(AnswerError, match="no target that matches"):
        source.read_evidence()
    assert "count by (job)" in api.queries[-7], "what was found before the exporters came back does not count"


def test_one_exporter_that_is_down_is_a_problem_and_the_other_exporters_are_read() -> None:
    def fetch(address: Address) -> str:
        if address.host == "n2":
            raise AnswerError(f"{address}: connection refused")
        return page(8000.0, 9000.0, 8900.0, units=2)

    evidence = ExporterSource(
        [parse_exporter("n1:9836"), parse_exporter("http://n2:9836/metrics")], 7200.0, ManualClock(wall=NOW), fetch
    ).read_evidence()
    assert evidence.problems == ("http://n2:9836/metrics: connection refused",)
    (decision,) = decide(evidence, Policy())
    assert decision.stage == "unknown"  # the job's other GPU is on the node that is not seen
    with pytest.raises(AnswerError, match="connection refused"):
        ExporterSource([parse_exporter("http://n2:9836/metrics")], 7200.0, ManualClock(wall=NOW), fetch).read_evidence()


@pytest.mark.parametrize("text", ["n1:9836", "http://n1:9836", "http://n1:9836/", "http://n1:9836/metrics"])
def test_the_address_of_an_exporter_is_completed(text: str) -> None:
    assert str(parse_exporter(text)) == "http://n1:9836/metrics"


def test_special_characters_of_a_name_cannot_change_the_query() -> None:
    """A matcher is an RE2 expression within a PromQL string: each special character is escaped for both."""
    (matcher,) = restrict([HolderName("kubernetes", "ml", 'a.b"c\\d')])
    assert matcher == r'scheduler!="slurm",pod=~"a\\.b\\\"c\\\\d"'


def test_queries_about_many_holders_of_both_schedulers_are_short_enough_for_every_server() -> None:
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


def test_rows_with_nan_are_ignored() -> None:
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
        (
            '{"status": "success", "data": {"resultType": "matrix", "result": []}}',
            "the source returned a matrix instead of a vector",
        ),
        (
            '{"status": "success", "warnings": ["x"], "data": {"resultType": "vector", "result": []}}',
            "the answer is partial",
        ),
        (
            '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": [["a", "b"]], "value": [1, "2"]}]}}',
            r"not an answer of a PromQL API \(TypeError\)",
        ),
    ],
)
def test_an_answer_with_an_error_or_in_another_format_is_an_error(text: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_vector(text, "up")


def test_models_are_asked_for_once_and_only_if_a_policy_matches_on_models() -> None:
    api = FakeApi()
    source = prometheus(api, 'job="x"', asks_models=True)
    assert source.read_evidence().holders[0].units[0].model == "NVIDIA A100"
    (asked,) = [query for query in api.queries if "gpu_info" in query]
    assert asked == 'count by (uuid, name) (gpu_info{job="x",uuid=~"GPU-0"})'
    api.queries.clear()
    assert source.read_evidence().holders[0].units[0].model == "NVIDIA A100"
    assert not [query for query in api.queries if "gpu_info" in query]
    assert read(FakeApi()).holders[0].units[0].model == ""


def test_the_facts_that_policies_match_on_come_from_the_info_series() -> None:
    facts = read(FakeApi()).holders[0].facts
    assert facts == {
        "user": frozenset({"ada"}),
        "account": frozenset({"phys"}),
        "partition": frozenset({""}),
        "qos": frozenset({""}),
        "resource": frozenset({""}),
    }


def test_if_promql_has_two_rows_for_one_unit_the_longer_gap_counts() -> None:
    api = FakeApi()
    assert read(api).holders[0].units[0].longest_gap_s == 0.0
    api.more = {"gpu_allocation_idle_gap_longest_seconds": [({}, 4000.0), ({"node": "n2"}, 5000.0)]}
    assert read(api).holders[0].units[0].longest_gap_s == 5000.0
    text = page(8000.0, 9000.0, 8900.0) + f"gpu_allocation_idle_gap_longest_seconds{{{PLACE}}} 4000\n"
    source = ExporterSource([parse_exporter("http://n1/metrics")], 7200.0, ManualClock(wall=NOW), lambda _url: text)
    assert source.read_evidence().holders[0].units[0].longest_gap_s == 4000.0


@pytest.mark.parametrize(("reason", "stage"), [("suspended", "not_running"), ("<script>", "unknown")])
def test_both_sources_report_why_an_idle_run_is_missing(reason: str, stage: str) -> None:
    api = FakeApi()
    api.more = {"gpu_allocation_activity_unknown": [({"reason": reason}, 1.0)]}
    assert read(api).holders[0].units[0].obstacle == ("" if stage == "unknown" else reason)
    text = page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_seconds", "x")
    assert stage_of(f'{text}gpu_allocation_activity_unknown{{{PLACE},reason="{reason}"}} 1\n')[0] == stage


def test_the_query_for_sharing_candidates_has_its_own_time_limit_after_the_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, within = [0.0], dict[str, float]()

    class Slow(FakeApi):
        def __call__(self, address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
            if "bottomk" in form["query"]:
                within["hint"] = within_s
                raise AnswerError("too many samples")
            now[0] += 2.9  # ten queries leave little of the thirty seconds
            return super().__call__(address, form, most_bytes, within_s)

    monkeypatch.setattr("gpu_exporter.reconciler.evidence.promql.time.monotonic", lambda: now[0])
    peaks = Peaks(0.2, 7 * 86_400.0, ManualClock(wall=NOW))
    source = prometheus(Slow(), peaks=peaks)
    evidence = source.read_evidence()
    assert (len(evidence.holders), within) == (1, {"hint": 10.0}), "its failure does not affect the evidence"


@pytest.mark.parametrize("many", ["[]", '"ab"', '{"a":"b"}', "1.5"])
def test_a_text_of_too_many_objects_is_refused_before_they_are_made(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'{{"status":"success","data":{{"resultType":"vector","result":[{",".join([many] * 300)}]}}}}'
    with pytest.raises(AnswerError, match="not an answer"):
        parse_vector(text, "up")
    monkeypatch.setattr(vector.json, "loads", None)
    with pytest.raises(TooManyRows, match="more than 10 rows: up"):
        parse_vector(text, "up", 10)


GONE, HELD, BEGUN = (
    "count by (node, instance) (last_over_time(gpu_exporter_build_info",
    "count by (node, instance, scheduler, namespace, pod, job_id, pod_uid",
    "max by (instance, job_id) (last_over_time(gpu_allocation_start",
)


def test_holders_of_silent_exporters_without_a_name_and_exporters_beyond_the_limit_are_left_out() -> None:
    api = FakeApi()
    place = {"node": "n", "instance": "10.0.0.1:9836"}
    slurm, kubernetes = {**place, "scheduler": "slurm"}, {**place, "scheduler": "kubernetes", "namespace": "ml"}
    api.more[GONE] = [(place, 1.0)]
    api.more[HELD] = [
        ({**slurm, "job_id": "42"}, 1.0),
        ({**slurm, "job_id": "43"}, 1.0),
        ({**slurm, "job_id": "44", "identity": "hidden"}, 1.0),
        (slurm, 1.0),
        ({**kubernetes, "pod": "a", "pod_uid": "uid"}, 1.0),
        ({**kubernetes, "pod": "a", "pod_uid": "older"}, 1.0),
        ({**place, "scheduler": "container"}, 1.0),
        ({**kubernetes, "pod": "b", "instance": "10.0.0.2:9836"}, 1.0),  # another exporter, which reports
    ]
    api.more[BEGUN] = [({"instance": place["instance"], "job_id": "42"}, 1_700_000_000.4)]
    assert set(read(api).unseen) == {
        Unseen("n", HolderName("slurm", "", "42"), "1700000000"),
        Unseen("n", HolderName("slurm", "", "43"), ""),
        Unseen("n", HolderName("kubernetes", "ml", "a"), "uid"),
        Unseen("n", HolderName("kubernetes", "ml", "a"), "older"),
    }
    api = FakeApi()
    api.more[GONE] = [({"node": f"n{i:04}", "instance": f"n{i:04}"}, 1.0) for i in range(5000)]
    assert read(api).unseen == ()
    (asked,) = [query for query in api.queries if query.startswith(HELD)]
    assert ("n0499" in asked, "n0500" in asked) == (True, False)


def test_the_evidence_of_other_exporters_counts_if_silent_exporters_cannot_be_read() -> None:
    api = FakeApi()
    api.more[GONE] = [({"node": "n", "instance": "n"}, 1.0)]

    def fetch(address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        if form["query"].startswith(HELD):
            raise AnswerError("http://p: status 422: too many samples")
        return api(address, form, most_bytes, within_s)

    evidence = prometheus(fetch).read_evidence()
    assert (len(evidence.holders), evidence.unseen) == (1, ())
    assert evidence.problems == ("it is unknown which exporters are missing: http://p: status 422: too many samples",)
