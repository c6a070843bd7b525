"""The simulated history of a cluster: its truth adds up, and its series show the truth."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.history import (
    HOUR,
    Cluster,
    Gap,
    Holder,
    Key,
    Phase,
    Target,
    bursts,
    idle,
    loaded,
    noisy,
    used,
)
from tests.testbed.history_series import Dcgm, dcgm, jobstats, kube_state, nvidia_smi, without_profiling
from tests.testbed.history_worlds import END, small

START = END - 24 * HOUR
ENGINE, UTIL, ENERGY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
HONOURED = Dcgm(holders="honoured")
POD = Holder("train-0", "ml", ("StatefulSet", "train"))
Samples = list[tuple[float, Any]]


def samples(line: dict[str, Any]) -> Samples:
    """Times and values; "stale" for a marker."""
    found: Samples = []
    at = line["start"]
    for value, count, *rise in line["runs"]:
        for n in range(count):
            each = value[n % len(value)] if isinstance(value, list) else value
            if each is not None:
                found.append((at, each + n * rise[0] if rise else each))
            at += line["step"]
    return found


def of(lines: Iterable[dict[str, Any]], family: str, /, **labels: str) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line["labels"].items() >= {"__name__": family, **labels}.items():
            yield line


def numbers(lines: Iterable[dict[str, Any]], family: str, /, **labels: str) -> list[Any]:
    return [value for line in of(lines, family, **labels) for _, value in samples(line) if value != "stale"]


def one_pod(*phases: Phase, step: float = 30.0, start: float = START + HOUR, gpus: int = 1) -> Cluster:
    cluster = Cluster(START, END, step=step)
    cluster.hold(POD, cluster.node("n1").units[:gpus], start, *phases)
    return cluster


def adds_up(cluster: Cluster) -> None:
    truth = cluster.truth()
    for by_hour in truth.holders.values():
        for hour, hours in by_hour.items():
            assert cluster.start <= hour < cluster.end
            assert hours.used + hours.low + hours.idle + hours.unseen == pytest.approx(hours.held)
    for model, present in truth.present.items():
        held = sum(truth.total(key).held for key in truth.holders if key.model == model)
        assert held + truth.free[model] + truth.free_unseen[model] == pytest.approx(present)


@pytest.mark.parametrize("jobs", [False, True])
def test_the_parts_of_the_small_cluster_add_up(jobs: bool) -> None:
    cluster = small(jobs=jobs, days=2)
    adds_up(cluster)
    total = cluster.truth().total()
    assert min(total.used, total.low, total.idle, total.unseen) > 0
    assert cluster.truth().money(dict.fromkeys(cluster.truth().present, 2.0)) == pytest.approx(2 * total.held)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.floats(-3, 26),
            st.lists(
                st.tuples(st.sampled_from([idle, noisy, used, bursts]), st.floats(1, 40_000)), min_size=1, max_size=4
            ),
        ),
        max_size=5,
    ),
    st.floats(0, 20),
    st.floats(0.01, 8),
)
def test_any_parts_add_up(holds: list[tuple[int, float, list[tuple[Any, float]]]], gap: float, length: float) -> None:
    cluster = Cluster(START, END)
    node = cluster.node("n1", gpus=2, mig={1: ["3g.40gb", "3g.40gb", "1g.10gb"]})
    node.gaps.append(Gap(START + gap * HOUR, START + (gap + length) * HOUR))
    for number, (unit, start, phases) in enumerate(holds):  # two may hold a unit at the same time
        made = [make(seconds) for make, seconds in phases]
        cluster.hold(Holder(f"p{number}", "ml"), [node.units[unit]], START + start * HOUR, *made)
    adds_up(cluster)


def test_each_phase_is_in_its_part() -> None:
    phases = [
        idle,
        loaded,
        noisy,
        bursts,
        used,
        lambda seconds: used(seconds, 0.09),
        lambda seconds: used(seconds, 0.005),
    ]
    cluster = one_pod(*(make(HOUR) for make in phases), gpus=2)
    total = cluster.truth().total()
    assert (total.held, total.idle, total.low, total.used) == pytest.approx((14, 6, 6, 2))
    by_hour = cluster.truth(START + 1.5 * HOUR, START + 2.5 * HOUR).holders[
        Key("", "ml", "train-0", "NVIDIA H100 80GB HBM3")
    ]
    assert [(hour, hours.idle) for hour, hours in by_hour.items()] == [(START + HOUR, 1), (START + 2 * HOUR, 1)]


def test_the_samples_of_each_holder_show_the_truth() -> None:
    """Counts of samples as a report makes them, for holders that have their units alone."""
    cluster = small(days=1)
    shares = {(unit.uuid, unit.instance): unit.share for node in cluster.nodes.values() for unit in node.units}
    held: dict[tuple[str, str], float] = defaultdict(float)
    quiet: dict[tuple[str, str], float] = defaultdict(float)
    slack: dict[tuple[str, str], float] = defaultdict(float)
    for line in of(dcgm(cluster, Dcgm((ENGINE,), holders="honoured")), ENGINE):
        labels = line["labels"]
        who = labels["namespace"], labels["pod"]
        if labels["instance"] != "gpu-01.example.org:9400":  # the second target of this node
            hours = cluster.step / HOUR * shares[labels["UUID"], labels.get("GPU_I_ID", "")]
            values = [value for _, value in samples(line) if value != "stale"]
            held[who] += hours * len(values)
            quiet[who] += hours * sum(value <= 0.008 for value in values)
    for holds in cluster.holds.values():
        for hold in holds:  # each change may come a sample early or late
            slack[hold.holder.namespace, hold.holder.name] += cluster.step / HOUR * 2 * (1 + len(hold.phases))
    alone = [key for key in cluster.truth().holders if not key.name.startswith("slice-")]
    assert len(alone) > 200
    truth = cluster.truth()
    for key in alone:
        who, total = (key.namespace, key.name), truth.total(key)
        assert held[who] == pytest.approx(total.held - total.unseen, abs=slack[who]), who
        resting = sum(  # half of the samples of bursts
            phase.seconds / HOUR
            for holds in cluster.holds.values()
            for hold in holds
            for phase in hold.phases
            if phase.burst_s and (hold.holder.namespace, hold.holder.name) == who
        )
        assert total.idle - slack[who] <= quiet[who] <= total.idle + resting / 2 + slack[who], who


@pytest.mark.parametrize(("step", "met"), [(5, True), (30, False), (60, False)])
def test_a_gauge_may_never_meet_the_bursts_that_the_mean_shows(step: float, met: bool) -> None:
    cluster = one_pod(bursts(10 * HOUR, 0.9), step=step)
    lines = list(dcgm(cluster, HONOURED))
    assert (max(numbers(lines, UTIL, pod="train-0")) > 0) == met
    values = numbers(lines, ENGINE, pod="train-0")
    assert sum(values) / len(values) == pytest.approx(0.09, rel=0.01)
    assert cluster.truth().total().low == pytest.approx(10)


def test_noise_is_in_the_engine_alone_and_below_its_floor() -> None:
    lines = list(dcgm(one_pod(noisy(HOUR), idle(HOUR), used(HOUR, 0.5)), HONOURED))
    values = numbers(lines, ENGINE, pod="train-0")
    assert max(values[:120]) == 0.008
    assert sum(value > 0 for value in values[:120]) > 100
    assert set(values[122:238]) == {0}
    assert numbers(lines, UTIL, pod="train-0")[:240] == [0] * 240
    for name, factor in ((ENGINE, 1), (UTIL, 100)):
        last = numbers(lines, name, pod="train-0")[242:]
        assert sum(last) / len(last) == pytest.approx(0.5 * factor, rel=0.01)


def test_the_engine_activity_of_a_sample_is_the_mean_since_the_sample_before() -> None:
    cluster = one_pod(bursts(HOUR), used(HOUR, 0.5), idle(HOUR))
    values = numbers(dcgm(cluster, HONOURED), ENGINE, pod="train-0")
    assert {*values[1:119:2], *values[2:119:2]} == {0.0, 0.18}
    assert len(set(values[1:119:2])) == 1
    (first,) = {line["start"] for line in of(dcgm(cluster, HONOURED), ENGINE, pod="train-0")}
    late = first - START  # seconds after a change at which a sample is taken
    assert values[240] == pytest.approx(0.5 * (30 - late) / 30)
    assert values[241] == 0


def test_a_gap_changes_no_other_sample() -> None:
    phases = bursts(2 * HOUR), used(2 * HOUR), noisy(2 * HOUR)
    whole, torn = one_pod(*phases), one_pod(*phases)
    torn.nodes["n1"].gaps += [Gap(START + hour * HOUR + 95, START + hour * HOUR + 230) for hour in range(1, 7)]

    def seen(cluster: Cluster) -> set[tuple[Any, ...]]:
        lines = [line for line in dcgm(cluster) if line["labels"]["__name__"] != "up"]
        return {(*line["labels"].items(), *pair) for line in lines for pair in samples(line) if pair[1] != "stale"}

    lost = seen(whole) - seen(torn)
    assert not seen(torn) - seen(whole)
    assert {any(gap.start <= each[-2] < gap.end for gap in torn.nodes["n1"].gaps) for each in lost} == {True}


def test_failed_scrapes_leave_one_marker_and_a_stopped_server_none() -> None:
    cluster = one_pod(used(10 * HOUR))
    node = cluster.nodes["n1"]
    node.gaps += [Gap(START + 2 * HOUR, START + 3 * HOUR), Gap(START + 5 * HOUR, START + 6 * HOUR, failed=False)]
    (line,) = of(dcgm(cluster, HONOURED), ENGINE, pod="train-0")
    markers = [at for at, value in samples(line) if value == "stale"]
    assert [int((at - START) // 30) for at in markers] == [240, 1320]  # at the first failed scrape, and at the end
    seen = [at for at, value in samples(line) if value != "stale"]
    assert len(seen) == 8 * 120
    assert not any(gap.start <= at < gap.end for at in seen for gap in node.gaps)
    (up,) = of(dcgm(cluster), "up")
    by_value = defaultdict(list)
    for at, value in samples(up):
        by_value[value].append(at)
    assert [len(by_value[value]) for value in (0, 1)] == [120, 22 * 120]
    assert cluster.truth().total().unseen == pytest.approx(2)


def test_a_gpu_of_two_targets_is_there_twice_and_a_moved_target_once_at_a_time() -> None:
    cluster = one_pod(used(10 * HOUR))
    node = cluster.nodes["n1"]
    node.targets.append(Target("second:9400"))
    assert len(list(of(dcgm(cluster, HONOURED), ENGINE, pod="train-0"))) == 2
    node.targets[:] = [Target("a:9400", end=START + 5 * HOUR), Target("b:9400", start=START + 5 * HOUR)]
    first, second = of(dcgm(cluster, HONOURED), ENGINE, pod="train-0")
    assert samples(first)[-1][1] == "stale"
    assert len(samples(first)) - 1 == 4 * 120
    assert len(samples(second)) - 1 == 6 * 120


def test_the_server_has_forgotten_what_is_older_than_its_retention() -> None:
    cluster = one_pod(used(10 * HOUR))
    cluster.retained_from = START + 6 * HOUR
    for line in (*dcgm(cluster), *kube_state(cluster)):
        assert all(at >= cluster.retained_from for at, _ in samples(line))
    assert cluster.truth().total().unseen == pytest.approx(5)
    adds_up(cluster)


def test_the_energy_counter_never_falls_but_for_a_restart() -> None:
    cluster = one_pod(used(3 * HOUR), bursts(3 * HOUR), idle(HOUR), used(3 * HOUR))
    reset = START + 8 * HOUR
    cluster.nodes["n1"].resets.append(reset)
    values = sorted(pair for line in of(dcgm(cluster), ENERGY, gpu="0") for pair in samples(line) if pair[1] != "stale")
    falls = [at for (_, before), (at, after) in itertools.pairwise(values) if after < before]
    assert len(values) == 24 * 120
    assert [at - reset < 30 for at in falls] == [True]


def test_the_last_error_of_a_gpu_remains() -> None:
    cluster = one_pod(used(HOUR))
    cluster.nodes["n1"].xids[0] = [(START + 2 * HOUR, 31), (START + 3 * HOUR, 79)]
    values = [set(numbers(dcgm(cluster), "DCGM_FI_DEV_XID_ERRORS", gpu=gpu)) for gpu in "01"]
    assert values == [{0, 31, 79}, {0}]


def test_a_pod_of_the_same_name_and_a_completed_pod() -> None:
    cluster = Cluster(START, END)
    (unit, *_) = cluster.node("n1").units
    end = cluster.hold(POD, [unit], START, used(HOUR), kept_s=1800)
    cluster.hold(Holder("train-0", "ml", POD.owner, number=1), [unit], end + 1800, idle(2 * HOUR), pending_s=600)
    lines = list(kube_state(cluster))
    requests = list(of(lines, "kube_pod_container_resource_requests", pod="train-0", resource="nvidia_com_gpu"))
    assert len({line["labels"]["uid"] for line in requests}) == 2
    assert sorted(len(samples(line)) - 1 for line in requests) == [20, 180, 240]  # 20 without a node, while it waits
    running = list(of(lines, "kube_pod_status_phase", phase="Running", uid=POD.uid))
    assert [value for line in running for _, value in samples(line)] == [1] * 120 + [0] * 60 + ["stale"]
    ((key, _),) = cluster.truth().holders.items()
    assert cluster.truth().total(key).held == pytest.approx(3)
    (line,) = of(dcgm(cluster, HONOURED), UTIL, pod="train-0")
    assert [value for _, value in samples(line)].count("stale") == 2


def test_a_holder_may_have_one_sample_or_none() -> None:
    counts = []
    for offset in range(0, 30, 5):
        cluster = one_pod(used(20), start=START + HOUR + offset)
        assert cluster.truth().total().used == pytest.approx(20 / HOUR)
        counts.append(len(numbers(dcgm(cluster, HONOURED), UTIL, pod="train-0")))
    assert set(counts) == {0, 1}


def test_labels_of_holders() -> None:
    cluster = one_pod(used(HOUR))
    cluster.hold(Holder("other", "ml"), cluster.nodes["n1"].units[:1], START + HOUR, used(HOUR))
    own = {"namespace": "gpu-operator", "container": "nvidia-dcgm-exporter"}

    def holders(how: Dcgm) -> list[tuple[str | None, ...]]:
        names = "pod", "exported_pod", "hpc_job"
        lines = [line["labels"] for line in of(dcgm(cluster, how), UTIL, gpu="0")]
        assert all(own.items() <= each.items() for each in lines if "exported_pod" in each)
        return sorted(
            (tuple(each.get(name) for name in names) for each in lines), key=lambda each: [name or "" for name in each]
        )

    pod = next(labels["pod"] for labels in (line["labels"] for line in of(dcgm(cluster), UTIL, gpu="1")))
    assert holders(Dcgm(holders="exported")) == [(pod, None, None), (pod, "train-0", None)]
    assert holders(Dcgm(copies=True)) == [(pod, None, None), (pod, "other", None), (pod, "train-0", None)]
    assert holders(HONOURED) == [(pod, None, None), ("train-0", None, None)]
    assert holders(Dcgm(holders="")) == [(pod, None, None)]
    assert holders(Dcgm(holders="hpc_job")) == [(None, None, None), (None, None, "other"), (None, None, "train-0")]
    assert not list(of(dcgm(cluster, without_profiling()), ENGINE))
    assert list(of(dcgm(cluster, Dcgm(host="hostname")), UTIL, hostname="n1", gpu="3"))


def test_instances_have_no_utilization_in_any_exporter() -> None:
    cluster = Cluster(START, END, "east")
    node = cluster.node("n1", gpus=2, mig={1: ["3g.40gb", "1g.10gb"]})
    cluster.hold(Holder("77", user_id=2001), [node.units[0], node.units[1]], START, used(2 * HOUR))
    assert {line["labels"]["gpu"] for line in of(dcgm(cluster), UTIL, cluster="east")} == {"0"}
    profiles = {line["labels"]["GPU_I_PROFILE"] for line in of(dcgm(cluster), ENGINE, gpu="1")}
    assert profiles == {"3g.40gb", "1g.10gb"}
    jobs = list(of(jobstats(cluster), "nvidia_gpu_memory_used_bytes", jobid="77", userid="2001"))
    assert {line["labels"].get("GPU_I_ID") for line in jobs} == {None, "1"}
    assert {line["labels"]["ordinal"] for line in of(jobstats(cluster), "nvidia_gpu_duty_cycle")} == {"0"}
    assert numbers(jobstats(cluster), "nvidia_gpu_jobId")[:1] == [77]
    smi = list(nvidia_smi(cluster))
    assert len(list(of(smi, "nvidia_smi_utilization_gpu_ratio", uuid=node.units[0].uuid[4:]))) == 1
    assert len(list(of(smi, "nvidia_smi_gpu_info", name=node.model))) == 2
    offers = [
        (line["labels"]["resource"], samples(line)[0][1])
        for line in of(kube_state(cluster), "kube_node_status_allocatable")
    ]
    assert dict(offers) == {"nvidia_com_gpu": 1, "nvidia_com_mig_3g_40gb": 1, "nvidia_com_mig_1g_10gb": 1}
