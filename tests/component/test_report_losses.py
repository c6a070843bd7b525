"""`gpu-exporter report` about sites that lose samples, `up`, labels or kube-state-metrics: as an adversary found them.

What nobody saw is unknown or named, and never idle, free, or counted for a pod that did not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.history import HOUR
from tests.testbed.history_servers import prometheus, write_blocks
from tests.testbed.processes import Processes
from tests.testbed.report_sites import Case, Truth, add, check_case, report
from tests.testbed.site_series import KSM, WORKS, ZERO, Busy, Site, between, pulses

pytestmark = pytest.mark.servers
NEVER = (0.0, 0.0)
CASES: dict[str, Case] = {}
case = partial(add, CASES)
KSM_TARGET = "kube-state-metrics", "10.0.0.9:8080"


def hourly(site: Site, first: float, last: float, hours: range) -> Callable[[float], bool]:
    """Whether a time is in this part of each hour."""
    return lambda at: any(first <= (at - site.start) / HOUR - hour < last for hour in hours)


def working(site: Site, is_at_work: Callable[[float], bool]) -> Busy:
    """At full use at these times, asked every second."""

    def busy(since: float, until: float) -> float:
        seconds = range(round(since), max(round(since) + 1, round(until)))
        return sum(map(is_at_work, seconds)) / len(seconds)

    return busy


def losing(site: Site, lost: Callable[[float], bool], *holders: tuple[int, str], busy: Busy) -> None:
    """GPUs of n1 whose scrapes fail at these times; `up` is 0 then."""
    site.up("dcgm", "n1:9400", lambda at: 0.0 if lost(at) else 1.0)
    for number, holder in holders:
        site.gpu("n1", number, holder, busy, read=lambda at: not lost(at))


@case(6, 15)
def pods_that_work_while_scrapes_fail(site: Site) -> Truth:
    """Only kube-state-metrics names them. The rest of each hour, the GPU is free and at zero."""
    lost = hourly(site, 0.3, 0.8, range(6))
    losing(site, lost, (1, ""), busy=working(site, lost))
    site.up(*KSM_TARGET)
    site.offer("n1", 1)
    for hour in range(6):
        site.pod(f"job-{hour}", "n1", 1, hour + 0.3, hour + 0.8)
    return Truth({"held": 3, "unknown": 3, "idle": NEVER, "free": (0, 3)})


@case()
def pods_of_minutes_that_work_while_scrapes_fail(site: Site) -> Truth:
    lost = hourly(site, 0.3, 0.385, range(6))
    losing(site, lost, (1, ""), busy=working(site, lost))
    site.up(*KSM_TARGET)
    site.offer("n1", 1)
    for hour in range(6):
        site.pod(f"job-{hour}", "n1", 1, hour + 0.3, hour + 0.3 + 1 / 12)
    return Truth({"held": 0.5, "unknown": 0.5, "idle": NEVER})


@case()
def only_work_is_lost(site: Site) -> Truth:
    """Eight minutes of each hour. All samples are zeros, but they do not cover the hour."""
    lost = hourly(site, 0.2, 0.335, range(6))
    losing(site, lost, (1, "a"), busy=working(site, lost))
    return Truth({"idle": NEVER, "unproven": (5.1, 5.3)})


@case(6, 15)
def half_of_the_samples_is_lost_without_up(site: Site) -> Truth:
    lost = hourly(site, 0.2, 0.7, range(2, 4))
    site.without_up("dcgm", "n1:9400")
    site.gpu("n1", 1, "a", working(site, lost), read=lambda at: not lost(at))
    return Truth({"held": 5, "idle": (3.9, 4), "unproven": (0.9, 1)})


@case(12)
def a_server_that_restarts_every_hour(site: Site) -> Truth:
    site.down = tuple((hour + 0.3, hour + 0.4) for hour in range(12))
    site.gpu("n1", 1, "a", working(site, hourly(site, 0.301, 0.39, range(12))))
    return Truth({"held": (10.7, 10.9), "idle": NEVER})


@case(12)
def a_pod_of_minutes_and_kube_state_metrics_without_up(site: Site) -> Truth:
    site.gpu("n1", 1, busy=ZERO)
    site.offer("n1", 1)
    site.pod("ci", "n1", 1, 1.95, 2.05)
    site.add("kube_pod_status_phase", 1.0, phase="Running", **KSM, namespace="ml", pod="web")
    return Truth({"held": 0.1})


@case()
def kube_state_metrics_fails_for_two_hours_and_a_half(site: Site) -> Truth:
    site.up(*KSM_TARGET, lambda at: 0.0 if 2 <= (at - site.start) / HOUR < 4.5 else 1.0)
    site.gpu("n1", 1, busy=ZERO)
    site.offer("n1", 1)
    for start, end in ((0.0, 2.0), (4.5, None)):
        site.pod("a", "n1", 1, start, end)
    return Truth({"held": 3.5, "free": (0, 0.05)}, {"ml/a": {"held": 3.5}}, (r"^2\.5 GPU-hours without a pod or job",))


@case()
def a_tenth_of_the_scrapes_of_kube_state_metrics_fails(site: Site) -> Truth:
    def answers(at: float) -> bool:
        return at / 30 % 10 != 3

    site.up(*KSM_TARGET, lambda at: float(answers(at)))
    site.gpu("n1", 1, busy=ZERO)
    site.offer("n1", 1)
    given: dict[str, Any] = {**KSM, "namespace": "ml", "pod": "a"}
    values: Callable[[float], float | None] = lambda at: 1.0 if answers(at) else None  # noqa: E731
    about = {"node": "n1", "container": "main", "resource": "nvidia_com_gpu"}
    site.add("kube_pod_container_resource_requests", values, **about, **given)
    site.add("kube_pod_status_phase", values, phase="Running", **given)
    return Truth({"held": 6, "idle": 6, "free": (0, 0.03)})


@case()
def a_pod_without_a_label_beside_one_with_a_label(site: Site) -> Truth:
    site.up(*KSM_TARGET)
    site.gpu("n1", 1, "a", ZERO)
    site.gpu("n1", 2, busy=ZERO)
    for name in "ac":
        site.pod(name, "n1", 1)
    site.offer("n1", 2)
    return Truth({"present": 12, "free": NEVER}, {"ml/a": {"idle": 6}, "ml/c": {"held": 6, "unknown": 6}})


@case()
def pods_that_no_exporter_names_use_all_gpus_of_a_node_and_then_leave(site: Site) -> Truth:
    """Their hours are not in use without a pod, and what they leave is free."""
    site.up(*KSM_TARGET)
    for number in range(4):
        site.gpu("n1", number, busy=between(site.start, site.start + 3 * HOUR))
    site.pod("b", "n1", 4, 0.0, 3.0)
    site.offer("n1", 4)
    return Truth({"present": 24, "free": (11.5, 12.1)}, {"ml/b": {"held": 12, "used": 12}})


@case()
def gpus_at_work_and_only_pending_pods(site: Site) -> Truth:
    site.up(*KSM_TARGET)
    for number in (1, 2):
        site.gpu("n1", number, busy=WORKS)
    site.offer("n1", 2)
    site.pod("pending", "", 1, phase="Pending")
    return Truth({"present": 12, "free": NEVER}, {}, (r"^12\.0 GPU-hours without a pod or job",))


@case(24)
def a_node_that_exists_between_the_full_hours(site: Site) -> Truth:
    for hour in range(24):
        site.up("dcgm", "n1:9400", start=hour + 0.1, end=hour + 0.9)
        site.gpu("n1", 1, f"job-{hour}", ZERO, start=hour + 0.1, end=hour + 0.9)
    return Truth({"held": 19.2})


@case()
def a_gpu_that_fell_off_the_bus(site: Site) -> Truth:
    site.up(*KSM_TARGET)
    for number in range(3):
        site.gpu("n1", number, busy=ZERO)
    site.gpu("n1", 3, busy=ZERO, end=2)
    site.pod("a", "n1", 4)
    site.offer("n1", 4)
    return Truth({"held": 24, "idle": (19.9, 20.1), "unknown": (3.9, 4.1), "free": NEVER})


@case()
def a_decoder_that_another_exporter_shows(site: Site) -> Truth:
    site.gpu("n1", 1, "video", ZERO)
    labels = {"job": "video", "instance": "n1:9500", "UUID": "GPU-00000001-0000-4000-8000-000000000001"}
    site.add("DCGM_FI_DEV_DEC_UTIL", lambda at: 30.0 if at % HOUR < 600 else 0.0, **labels)
    return Truth({"held": 6, "idle": NEVER})


@case(6, 35)
def scrapes_rarer_than_collections(site: Site) -> Truth:
    """Every 35 s: a seventh of dcgm-exporter's collections is never read."""
    site.gpu("n1", 1, "a", pulses(210, 25, 152))
    return Truth({"held": 6, "idle": NEVER})


@pytest.mark.parametrize("name", CASES)
def test_a_site(name: str, sites: tuple[str, Mapping[str, Truth]], tmp_path: Path) -> None:
    check_case(name, CASES[name], sites, tmp_path / "out")


@pytest.mark.parametrize(("end", "longest"), [(10.0, 10.0), (10.95, 13.04)])
def test_the_longest_idle_run_does_not_bridge_another_pod(end: float, longest: float, tmp_path: Path) -> None:
    """a is idle, then b works until `end` on the same GPU, then a pod with the name of a is idle again."""
    site = Site(24)
    site.gpu("n1", 1, "a", ZERO, end=10.0)
    if end > 10.0:
        site.gpu("n1", 1, "b", WORKS, start=10.0, end=end)
        site.gpu("n1", 1, "a", ZERO, start=end + 0.01)
    write_blocks(tmp_path, site.lines)
    with Processes(tmp_path) as processes:
        found = report(prometheus(processes, tmp_path).url, 24, tmp_path / "out")
    (row,) = [each for each in found["holders"] if each["holder"] == "ml/a"]
    assert row["longest_idle_seconds"] == pytest.approx(longest * HOUR, rel=0.01)
