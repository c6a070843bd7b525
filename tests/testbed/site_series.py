"""The series of a small site, given one by one: what a server has that scrapes the exporters of others.

Names and labels as in history_series.py, which makes the series of whole clusters. Here a site may have any shape: fields
that are missing, scrapes that fail, labels that are dropped. Times are hours since the beginning of the site.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from tests.testbed.history import HOUR
from tests.testbed.history_worlds import END, H100

Busy: TypeAlias = Callable[[float, float], float]  # share of the time between two moments (Unix seconds), 0 to 1
Value: TypeAlias = float | Callable[[float], float | None]  # at a moment, None without a sample
COLLECT_S = 30.0  # between two readings of dcgm-exporter
KSM = {"job": "kube-state-metrics", "instance": "10.0.0.9:8080"}


def steady(share: float) -> Busy:
    return lambda _since, _until: share


WORKS, ZERO = steady(0.9), steady(0.0)


def pulses(period: float, work: float, offset: float = 0.0) -> Busy:
    """`work` seconds at full use in each `period` seconds."""

    def worked(at: float) -> float:
        turns, rest = divmod(at - offset, period)
        return turns * work + min(rest, work)

    return lambda since, until: (worked(until) - worked(since)) / (until - since)


def between(start: float, end: float) -> Busy:
    """At full use from `start` to `end` (Unix seconds) only."""
    return lambda since, until: max(0.0, min(until, end) - max(since, start)) / (until - since)


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-{number:012x}"


class Site:
    """A site of `hours` hours until END. `lines`: its series, for history_servers.write_blocks."""

    def __init__(self, hours: float = 6, cluster: str = "", interval: float = 30) -> None:
        """`cluster`: a label of all series. `interval`: seconds between two scrapes of a target."""
        self.start, self.cluster, self.interval = END - hours * HOUR, cluster, interval
        self.down: tuple[tuple[float, float], ...] = ()  # times in which the server did not run
        self.lines: list[dict[str, Any]] = []
        self._targets: set[tuple[str, str]] = set()

    def add(
        self,
        metric: str,
        value: Value = 1.0,
        start: float = 0.0,
        end: float | None = None,
        step: float | None = None,
        **labels: Any,
    ) -> None:
        """Adds a series. Prometheus marks its end, and each scrape that does not find it any more."""
        step = step or self.interval
        first = math.ceil((self.start + start * HOUR) / step) * step
        last = END + step if end is None else self.start + end * HOUR
        runs: list[list[Any]] = []
        for number in range(math.ceil((last - first) / step)):
            at = first + number * step
            given = value(at) if callable(value) else value
            was_there = runs and isinstance(runs[-1][0], float)
            found: object = float(given) if given is not None else "stale" if was_there else None
            found = None if self._is_down(at) else found
            if runs and runs[-1][0] == found:
                runs[-1][1] += 1
            else:
                runs.append([found, 1])
        runs += [["stale", 1]] if end is not None else []
        given_labels = {"__name__": metric, "cluster": self.cluster, **labels}
        self.lines.append(
            {"labels": {k: v for k, v in given_labels.items() if v}, "start": first, "step": step, "runs": runs}
        )

    def _is_down(self, at: float) -> bool:
        hour = (at - self.start) / HOUR
        return any(start <= hour < end for start, end in self.down)

    def up(self, job: str, instance: str, value: Value = 1.0, **about: Any) -> None:
        """Adds the `up` of a target. Without it, the first series of a target adds it for the whole time."""
        self._targets.add((job, instance))
        self.add("up", value, job=job, instance=instance, **about)

    def without_up(self, job: str, *instances: str) -> None:
        """The server has no `up` of these targets."""
        self._targets |= {(job, instance) for instance in instances}

    def gpu(
        self,
        node: str,
        number: int,
        holder: str = "",
        busy: Busy = WORKS,
        *,
        start: float = 0.0,
        end: float | None = None,
        step: float | None = None,
        read: Callable[[float], bool] = lambda at: True,
        engine: Value | None = None,
        has_utilization: bool = True,
        **labels: Any,
    ) -> None:
        """A GPU that dcgm-exporter shows.

        `holder`: its pod, by default in the namespace ml, without honor_labels. `read`: whether the scrape of this time
        arrived. `engine`: its activity, by default the mean since the reading before. A label "" is left out.
        """
        given: dict[str, Any] = {"job": "dcgm", "instance": f"{node}:9400", "Hostname": node, "UUID": uuid(number)}
        given |= {"gpu": str(number % 8), "device": f"nvidia{number % 8}", "modelName": H100}
        given |= {"namespace": "gpu-operator", "pod": f"dcgm-exporter-{node}"}
        given |= {"exported_namespace": "ml", "exported_pod": holder} if holder else {}
        given |= labels
        if (given["job"], given["instance"]) not in self._targets:
            own = {name: given[name] for name in ("namespace", "pod", "replica") if given.get(name)}
            self.up(given["job"], given["instance"], step=step, **own)

        def collected(at: float) -> float:
            return at - (at + 7.0 * number) % COLLECT_S

        def of_moment(at: float) -> float | None:
            return round(100 * busy(collected(at) - 1.0, collected(at))) if read(at) else None

        def of_time(at: float) -> float | None:
            if engine is not None:
                return (engine(at) if callable(engine) else engine) if read(at) else None
            return round(busy(collected(at) - COLLECT_S, collected(at)), 5) if read(at) else None

        if has_utilization:
            self.add("DCGM_FI_DEV_GPU_UTIL", of_moment, start, end, step, **given)
        self.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", of_time, start, end, step, **given)
        self.add("DCGM_FI_DEV_FB_USED", lambda at: 20_000.0 if read(at) else None, start, end, step, **given)

    def smi(self, instance: str, number: int, busy: float = 0.9, **labels: Any) -> None:
        """A GPU that nvidia_gpu_exporter shows."""
        given: dict[str, Any] = {
            "job": "nvidia-gpu-exporter",
            "instance": instance,
            "uuid": uuid(number).removeprefix("GPU-"),
            **labels,
        }
        if (given["job"], instance) not in self._targets:
            self.up(given["job"], instance)
        self.add("nvidia_smi_utilization_gpu_ratio", busy, **given)
        self.add("nvidia_smi_gpu_info", **{**given, "name": H100})

    def pod(
        self,
        name: str,
        node: str,
        gpus: int,
        start: float = 0.0,
        end: float | None = None,
        phase: str = "Running",
        **labels: Any,
    ) -> None:
        """A pod that requests GPUs, as kube-state-metrics shows it. From `end`, it does not exist any more."""
        given: dict[str, Any] = {**KSM, "namespace": "ml", "pod": name, **labels}
        self.add(
            "kube_pod_container_resource_requests", gpus, start, end, node=node, container="main",
            resource="nvidia_com_gpu", **given,
        )  # fmt: skip
        self.add("kube_pod_status_phase", 1.0, start, end, phase=phase, **given)

    def offer(self, node: str, gpus: int, **labels: Any) -> None:
        """A node of Kubernetes that offers GPUs."""
        self.add("kube_node_status_allocatable", gpus, node=node, resource="nvidia_com_gpu", **{**KSM, **labels})
