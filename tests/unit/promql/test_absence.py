"""The reason why Prometheus has no series of the exporters, by answers as Prometheus 2.42 gives them."""

from __future__ import annotations

import pytest

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.absence import OTHERS, Absence, explain_absence, explain_gaps, explain_no_hours
from gpu_exporter.common.promql.vector import VectorRow

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20Z
MATCHER = 'job="gpu-exporter"'
TARGET = {"job": "gpu-exporter", "node": "n1", "instance": "10.0.0.1:9836"}
# Each kind of query, by a part of it that no other kind has. The first one found counts.
KINDS = {
    "past": "max_over_time((0 * count by (job)",
    "before": "count by (job) (last_over_time(",
    "now": "count by (job",
    "since": "min_over_time((0 * count",
    "others": "count by (__name__)",
    "holders": "count(gpu_allocation_info",
    "exporters": "count(gpu_exporter_build_info",
    "sources": "min by (source)",
    "up": "up{",
}


class Api:
    """Answers of a PromQL API by the kind of the query; no rows for the other kinds."""

    def __init__(self, **rows: list[tuple[dict[str, str], float]]) -> None:
        self.answers = rows
        self.asked: list[str] = []

    def __call__(self, query: str) -> list[VectorRow]:
        self.asked.append(query)
        kind = next(kind for kind, part in KINDS.items() if part in query)
        return [VectorRow(labels, value) for labels, value in self.answers.get(kind, [])]

    def explain(self, matcher: str = MATCHER) -> Absence:
        found = explain_absence(self, matcher, NOW)
        assert len(self.asked) <= 7, self.asked
        return found


def targets(*up: float) -> list[tuple[dict[str, str], float]]:
    return [({**TARGET, "node": f"n{n}"}, value) for n, value in enumerate(up)]


def test_no_series_ever_asks_for_a_scrape_job_and_for_the_label_release() -> None:
    found = Api().explain()
    assert (found.kind, found.seen) == (
        "never",
        'no gpu-exporter series match {job="gpu-exporter"}: Prometheus has had no such series in the last 7d, and has '
        "no target that matches (no series `up`)",
    )
    assert "alerts/prometheus.example.yaml" in found.to_do and "often `release`: kubectl get podmonitors" in found.to_do


def test_without_a_matcher_the_targets_of_other_jobs_are_not_blamed() -> None:
    api = Api(up=targets(0.0))
    found = api.explain("")
    assert (found.kind, found.seen) == (
        "never",
        "there are no gpu-exporter series: Prometheus has had no such series in the last 7d",
    )
    assert not any("up{" in query for query in api.asked)


def test_targets_that_are_down_are_named_with_the_last_series() -> None:
    found = Api(past=[({"job": "gpu-exporter"}, NOW - 600.0)], up=targets(0.0, 0.0, 0.0, 1.0, 0.0)).explain()
    assert (found.kind, found.seen) == (
        "down",
        'no gpu-exporter series match {job="gpu-exporter"}: 4 of 5 targets do not answer (up is 0): n0 (10.0.0.1:9836), n1 '
        "(10.0.0.1:9836), n2 (10.0.0.1:9836) and 1 more; the last series ended at 2023-11-14 22:03Z, 10m ago",
    )


def test_one_target_in_two_jobs_is_named_once() -> None:
    twice = [({**TARGET, "job": job}, 0.0) for job in ("a", "b")]
    assert (
        "up is 0): n1 (10.0.0.1:9836);" in Api(past=[({"job": "a"}, NOW - 60.0)], up=twice).explain('job=~"a|b"').seen
    )


def test_a_target_is_named_by_its_node_and_its_address_each_once() -> None:
    rows = [({"job": "a", "node": node, "instance": instance}, 0.0) for node, instance in (("n1", "n1"), ("", "n2:1"))]
    assert "up is 0): n1, n2:1;" in Api(past=[({"job": "a"}, NOW - 60.0)], up=rows).explain().seen


def test_targets_of_the_job_with_new_addresses_are_down_too() -> None:
    """Pods that were replaced: no target that is there now has had series."""
    api = Api(past=[({"job": "gpu-exporter"}, NOW - 600.0)])
    api.answers["up"] = []
    asked = api.__call__

    class New(Api):
        def __call__(self, query: str) -> list[VectorRow]:
            return [VectorRow(TARGET, 0.0)] if query.endswith("== 0") else asked(query)

    assert New().explain().kind == "down"
    assert 'up{job="gpu-exporter",job=~"gpu-exporter"} and on (job, instance)' in api.asked[-1]


def test_targets_that_answer_without_series_are_no_exporters_that_are_down() -> None:
    assert Api(past=[({"job": "gpu-exporter"}, NOW - 600.0)], up=targets(1.0)).explain().kind == "silent"
    assert Api(up=targets(1.0, 1.0)).explain().kind == "foreign"
    assert Api(up=targets(1.0, 0.0)).explain().kind == "unreached"


def test_an_exporter_without_a_target_is_gone_and_says_when_it_was_last_seen() -> None:
    found = Api(past=[({"job": "gpu-exporter"}, NOW - 3 * 86400.0)]).explain()
    assert (
        found.kind,
        "the last series ended at 2023-11-11 22:13Z, 3d ago, and Prometheus now has no" in found.seen,
    ) == (
        "gone",
        True,
    )
    moved = Api(past=[({"job": "gpu-exporter"}, NOW - 9000.0)], now=[({"job": "agents"}, 4.0)]).explain()
    assert (moved.kind, moved.to_do) == (
        "moved",
        "Check the scrape job; if these are the same exporters: --source.matcher='job=\"agents\"'",
    )


def test_values_of_the_selected_labels_are_listed_at_most_five() -> None:
    rows = [({"job": f"j{n}", "cluster": 'a"b' if n else ""}, 1.0) for n in range(6)]
    api = Api(now=rows)
    found = api.explain('job="x",cluster!~"y"')
    assert found.kind == "excluded"
    assert 'job="j0",cluster=""; job="j1",cluster="a\\"b"; ' in found.seen
    assert found.seen.endswith('job="j4",cluster="a\\"b"; and others')
    assert "topk(6, count by (job, cluster) (gpu_exporter_build_info))" in api.asked


def test_series_with_other_labels_that_have_ended_are_not_series_of_now() -> None:
    found = Api(before=[({"job": "agents"}, 4.0)]).explain()
    assert (found.kind, 'exporters with job="agents" had series in the last 7d, and have none now' in found.seen) == (
        "gone",
        True,
    )


@pytest.mark.parametrize(("metric", "exporter"), OTHERS.items())
def test_other_exporters_are_named_and_do_not_suffice(metric: str, exporter: str) -> None:
    found = Api(others=[({"__name__": metric}, 200.0), ({"__name__": "what_was_not_asked_for"}, 1.0)]).explain()
    assert found.kind == "others"
    assert found.seen.endswith(f"only series of other exporters: 200 × {metric} of {exporter}")
    assert found.to_do.startswith("These series do not show which holder")


def test_what_the_monitors_show_replaces_the_command_that_would_show_it() -> None:
    lacks = Absence("unselected", "PodMonitor a/b lacks release=kps", "Set it")
    found = explain_absence(Api(), MATCHER, NOW, lambda: lacks)
    assert (found.kind, found.to_do) == ("unselected", "Set it")
    assert found.seen.endswith("(no series `up`); PodMonitor a/b lacks release=kps")
    assert "kubectl" in explain_absence(Api(), MATCHER, NOW, lambda: None).to_do


def test_an_answer_that_is_missing_leaves_the_reason_unknown() -> None:
    def ask(query: str) -> list[VectorRow]:
        raise AnswerError("query processing would load too many samples")

    found = explain_absence(ask, MATCHER, NOW)
    assert (found.kind, found.seen) == (
        "unknown",
        'no gpu-exporter series match {job="gpu-exporter"}: the reason is unknown: query processing would load too many samples',
    )
    (gap,) = explain_gaps(ask, MATCHER, NOW, 3600.0)
    assert (gap.kind, explain_no_hours(ask, MATCHER, NOW).kind) == ("unknown", "unknown")


def gaps(**rows: list[tuple[dict[str, str], float]]) -> dict[str, str]:
    found = {"holders": [({}, 3.0)], "since": [({}, NOW - 3900.0)]} | rows
    return {gap.kind: str(gap) for gap in explain_gaps(Api(**found), MATCHER, NOW, 3600.0)}


def test_there_is_no_gap_where_nothing_is_missing() -> None:
    assert gaps() == {}
    assert gaps(since=[({}, NOW - 3600.0)]) == {}


def test_a_young_history_says_since_when_it_watches_and_when_the_answer_is_complete() -> None:
    assert gaps(since=[({}, NOW - 420.0)])["young"] == (
        "Prometheus has series of the exporters only since 2023-11-14 22:06Z, for 7m. A holder appears here after 1h without activity, "
        "so this answer is complete from 2023-11-14 23:06Z on"
    )
    assert "for 0s. " in gaps(since=[])["young"], "no minute has begun since the first sample"


def test_exporters_without_a_holder_name_the_source_that_does_not_answer() -> None:
    sources = [({"source": "slurm"}, 0.0), ({"source": "kubelet"}, 1.0)]
    assert "on some nodes a source of holders does not answer: slurm. " in gaps(holders=[], sources=sources)["unheld"]
    assert "every source of holders answers" in gaps(holders=[], sources=sources[1:])["unheld"]
    assert "no exporter has a source of holders" in gaps(holders=[])["unheld"]


def test_a_target_that_does_not_answer_is_named_although_others_do() -> None:
    assert gaps(up=targets(0.0))["down"].startswith(
        "1 target does not answer (up is 0): n0 (10.0.0.1:9836), so its GPUs may be missing here. Check that"
    )


def test_a_digest_without_hours_tells_no_holders_from_no_exporters() -> None:
    assert explain_no_hours(Api(exporters=[({}, 2.0)]), MATCHER, NOW).kind == "unheld"
    assert explain_no_hours(Api(exporters=[({}, 2.0)], holders=[({}, 1.0)]), MATCHER, NOW).kind == "new"
    assert explain_no_hours(Api(), MATCHER, NOW).kind == "never"
