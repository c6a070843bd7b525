"""`gpu-exporter report` about pods that share GPUs (time slicing), of which dcgm-exporter names the last one of each GPU.

No pod has all hours of a GPU that it shares, and no work of a shared GPU is that of a pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.report_sites import Case, Hours, Truth, add, check_case
from tests.testbed.site_series import KSM, ZERO, Site

pytestmark = pytest.mark.servers
NEVER = (0.0, 0.0)
CASES: dict[str, Case] = {}
case = partial(add, CASES)
KSM_TARGET = "kube-state-metrics", "10.0.0.9:8080"
TOLD = "{} GPU-hours of GPUs that several pods share: .*--kubernetes-virtual-gpus"


def pods(site: Site, names: str, start: float = 0.0, end: float | None = None) -> None:
    """Pods of n1, each with a request of one GPU or replica."""
    site.up(*KSM_TARGET)
    for name in names:
        site.pod(name, "n1", 1, start, end)


@case()
def four_pods_on_each_gpu(site: Site) -> Truth:
    """One GPU works; the pods of the other one are idle, but only one of them is known."""
    site.gpu("n1", 0, "a")
    site.gpu("n1", 1, "e", ZERO)
    pods(site, "abcdefgh")
    site.offer("n1", 8)
    hours: dict[str, Mapping[str, Hours]] = {f"ml/{name}": {"held": 1.5, "unknown": 1.5} for name in "abcdfgh"}
    total: Mapping[str, Hours] = {"held": 12, "present": 12, "taken": 12, "free": NEVER, "unknown": 10.5}
    return Truth(total, hours | {"ml/e": {"held": 1.5, "idle": 1.5}}, (TOLD.format("10.5"),))


@case()
def two_pods_on_one_gpu_of_a_node_whose_offers_are_not_known(site: Site) -> Truth:
    """More is requested than the node has."""
    site.gpu("n1", 0, "a")
    pods(site, "ab")
    hours: Mapping[str, Hours] = {"held": 3, "unknown": 3}
    return Truth({"held": 6, "present": 6, "free": NEVER}, {"ml/a": hours, "ml/b": hours}, (TOLD.format("6.0"),))


@case(24)
def a_shared_gpu_of_a_node_that_is_there_for_three_hours(site: Site) -> Truth:
    site.up("dcgm", "n1:9400", start=20, end=23)
    site.gpu("n1", 0, "a", start=20, end=23)
    pods(site, "ab", 20, 23)
    about: dict[str, Any] = {**KSM, "node": "n1", "resource": "nvidia_com_gpu"}
    site.add("kube_node_status_allocatable", 4, 20, 23, **about)
    return Truth({"held": 3}, {f"ml/{name}": {"held": 1.5, "unknown": 1.5} for name in "ab"})


@case()
def pods_on_a_shared_gpu_that_the_exporter_does_not_name(site: Site) -> Truth:
    site.gpu("n1", 0)
    pods(site, "ab")
    site.offer("n1", 2)
    return Truth({"held": 6, "idle": NEVER}, {f"ml/{name}": {"held": 3, "unknown": 3} for name in "ab"})


@case()
def pods_on_shared_gpus_at_work_that_the_exporter_does_not_name(site: Site) -> Truth:
    """Three of eight replicas are free, but somebody works on both GPUs all the time."""
    for number in range(2):
        site.gpu("n1", number)
    pods(site, "abcde")
    site.offer("n1", 8)
    holders: dict[str, Mapping[str, Hours]] = {f"ml/{name}": {"held": 2.4, "unknown": 2.4} for name in "abcde"}
    return Truth({"held": 12, "present": 12, "free": NEVER}, holders, (TOLD.format("12.0"),))


@case()
def a_second_pod_takes_the_name_of_a_shared_gpu(site: Site) -> Truth:
    """In the middle of an hour. From then on, the first pod still runs."""
    site.gpu("n1", 0, "a", end=2.5)
    site.gpu("n1", 0, "b", start=2.5)
    pods(site, "a")
    site.pod("b", "n1", 1, 2.5)
    site.offer("n1", 2)
    hours: dict[str, Mapping[str, Hours]] = {"ml/a": {"held": (4.1, 4.3), "used": (2, 2.1)}}
    return Truth({"held": 6, "present": 6}, hours | {"ml/b": {"held": (1.7, 1.9), "work": NEVER}})


@case()
def a_pod_that_is_alone_on_its_node_shares_nothing(site: Site) -> Truth:
    """It has both replicas of its GPU, or two GPUs of which another exporter shows one."""
    site.gpu("n1", 0, "a")
    site.gpu("n1", 1, busy=ZERO)
    site.up(*KSM_TARGET)
    site.pod("a", "n1", 2)
    site.offer("n1", 4)
    return Truth({"held": 6, "present": 12, "free": 6}, {"ml/a": {"held": 6, "used": 6}})


@case()
def a_gpu_in_use_whose_pod_the_exporter_does_not_name(site: Site) -> Truth:
    """There is room for the other pod, so the named pod shares nothing."""
    site.gpu("n1", 0, "a")
    site.gpu("n1", 1)
    pods(site, "ab")
    site.offer("n1", 4)
    holders: dict[str, Mapping[str, Hours]] = {"ml/a": {"held": 6, "used": 6}, "ml/b": {"held": 6, "unknown": 6}}
    return Truth({"held": 12, "present": 12, "free": NEVER}, holders)


@case()
def one_of_eight_gpus_is_broken(site: Site) -> Truth:
    """Nobody shares the others, and the pod of the broken one holds it."""
    for number, name in enumerate("abcdefg"):
        site.gpu("n1", number, name)
    pods(site, "abcdefgh")
    site.offer("n1", 8)
    hours: dict[str, Mapping[str, Hours]] = {f"ml/{name}": {"held": 6, "used": 6} for name in "abcdefg"}
    return Truth({"held": 48, "present": 42}, hours | {"ml/h": {"held": 6, "unknown": 6}})


@pytest.mark.parametrize("name", CASES)
def test_a_site(name: str, sites: tuple[str, Mapping[str, Truth]], tmp_path: Path) -> None:
    check_case(name, CASES[name], sites, tmp_path / "out")
