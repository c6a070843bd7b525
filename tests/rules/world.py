"""Series as Prometheus would scrape them every minute, for promtool: nodes, GPUs, holders, and faults.

Time is minutes since 0. A failed scrape leaves a staleness marker and then no samples, as in Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

Values: TypeAlias = Callable[[int], float | None]
Activity: TypeAlias = Callable[[int], float | None]  # utilization in the minute before t; None is unknown

IDLE: Activity = lambda _: 0.0  # noqa: E731 - named values read better in the cases than functions of two lines
BUSY: Activity = lambda _: 0.9  # noqa: E731
UNKNOWN: Activity = lambda _: None  # noqa: E731
RECONCILER = {"job": "gpu-exporter-reconciler"}  # labels of its target


def always(value: float | None) -> Values:
    return lambda _: value


def until(end: int, before: Values, after: Values) -> Values:
    """`before` up to and with minute `end`, `after` from then on."""
    return lambda t: (before if t <= end else after)(t)


def between(start: int, end: int, inside: Values, outside: Values) -> Values:
    """`inside` from minute `start` to `end`, both included."""
    return lambda t: (inside if start <= t <= end else outside)(t)


class World:
    """Everything that one Prometheus sees, for `minutes`."""

    def __init__(self, minutes: int) -> None:
        self.minutes = minutes
        self.series: dict[str, list[float | None]] = {}
        self.away: set[int] = set()  # minutes in which Prometheus itself does not run

    def put(self, name: str, labels: Mapping[str, str], values: Values | float) -> None:
        """Add a series; None is a minute without a sample. Two series with the same labels are merged."""
        get = always(values) if isinstance(values, (int, float)) else values
        text = ", ".join(f'{key}="{value}"' for key, value in labels.items() if value)
        row = self.series.setdefault(f"{name}{{{text}}}", [None] * (self.minutes + 1))
        for t in range(self.minutes + 1):
            value = get(t)
            if value is not None:
                row[t] = value

    def set(self, name: str, labels: Mapping[str, str], minute: int, value: float | None) -> None:
        """Set one sample."""
        text = ", ".join(f'{key}="{value}"' for key, value in labels.items() if value)
        self.series.setdefault(f"{name}{{{text}}}", [None] * (self.minutes + 1))[minute] = value

    def input_series(self, samples: int = 1) -> list[dict[str, str]]:
        """The series in the form of promtool's files, with so many equal samples in each minute."""
        return [{"series": name, "values": self._write(row, samples)} for name, row in sorted(self.series.items())]

    def _write(self, row: list[float | None], samples: int) -> str:
        words: list[str] = []
        previous: float | None = None
        for t, value in enumerate(row):
            if t in self.away:
                words.append("_")
            elif value is None:
                words.append("_" if previous is None else "stale")
                previous = None
            else:
                words.append(repr(float(value)))
                previous = value
            words += [words[-1].replace("stale", "_")] * (samples - 1)
        return re.sub(r"\b_(?: _)+(?!\S)", lambda run: f"_x{(len(run[0]) + 1) // 2}", " ".join(words))


class Node:
    """A node with an exporter. `scraped`: whether the scrape at minute t succeeds. `target`: more target labels."""

    def __init__(
        self,
        world: World,
        name: str = "n1",
        *,
        gpus: int = 1,
        scraped: Callable[[int], bool] = lambda _: True,
        target: Mapping[str, str] | None = None,
        model: str = "NVIDIA H100 80GB HBM3",
        driver_up: Values | float = 1,
        expected: Values | float | None = None,
        sampled: Values | None = None,
        interval: float = 1,
        gpu_up: Mapping[int, Values] | None = None,
        state_fails: Callable[[int], bool] = lambda _: False,
        source_answers: Callable[[int], bool] = lambda _: True,
        source_misses: Callable[[int], bool] = lambda _: False,
        uuid: str = "GPU-{name}-{index}",
    ) -> None:
        """`sampled`: Unix seconds of the last sample at minute t, by default minute t itself."""
        self.world, self.name, self.scraped = world, name, scraped
        self.labels = {"job": "gpu-exporter", "node": name, "instance": name, **(target or {})}
        self.uuids = [uuid.format(name=name, index=index) for index in range(gpus)]
        self.put("up", {}, 1, whatever=True)
        if gpus:
            self.put("gpu_exporter_last_sample_timestamp_seconds", {}, sampled or (lambda t: 60 * t))
        self.put("gpu_exporter_sample_interval_seconds", {}, interval)
        self.put("gpu_driver_up", {}, driver_up)
        self.put("gpu_devices_expected", {}, gpus if expected is None else expected)
        counts = _count(lambda t: 12.0 if state_fails(t) else 0.0)
        self.put("gpu_exporter_state_write_errors_total", {}, counts)
        self.put("gpu_exporter_state_last_write_timestamp_seconds", {}, _last(lambda t: not state_fails(t)))
        self.put("gpu_exporter_attribution_up", {"source": "kubelet"}, lambda t: float(source_answers(t)))
        complete = "gpu_exporter_attribution_complete"
        self.put(complete, {"source": "kubelet"}, lambda t: float(source_answers(t) and not source_misses(t)))
        self.put(
            "gpu_exporter_attribution_last_success_timestamp_seconds", {"source": "kubelet"}, _last(source_answers)
        )
        for index, each in enumerate(self.uuids):
            gpu = {"gpu": str(index), "uuid": each}
            self.put("gpu_info", {**gpu, "name": model}, 1)
            self.put("gpu_up", gpu, (gpu_up or {}).get(index, always(1.0)))

    def put(self, name: str, labels: Mapping[str, str], values: Values | float, *, whatever: bool = False) -> None:
        """Add a series of this target. `whatever`: the series is `up`, which a failed scrape sets to 0."""
        get = always(values) if isinstance(values, (int, float)) else values

        def scraped(t: int) -> float | None:
            if whatever:
                return float(self.scraped(t))
            return get(t) if self.scraped(t) else None

        self.world.put(name, {**self.labels, **labels}, scraped)

    def free(self, index: int, *, active: Values | None = None, allocated: Values | float = 0) -> None:
        """Add a GPU without a holder. `active`: Unix seconds of its last activity."""
        gpu = {"gpu": str(index), "uuid": self.uuids[index]}
        self.put("gpu_allocated", gpu, allocated)
        if active is not None:
            self.put("gpu_last_active_timestamp_seconds", gpu, active)

    def hold(
        self,
        index: int,
        activity: Activity,
        *,
        start: int = 0,
        end: int | None = None,
        units: float = 1,
        share: float = 1,
        mig: str = "",
        begun: float | None = None,
        info: Mapping[str, str] | None = None,
        idle_run: Values | None = None,
        counts: Callable[[int], bool] = lambda _: True,
        from_zero: int | None = None,
        gpu: str = "",
        stalled: Values | None = None,
        host: tuple[float, float] | None = None,
        causes: Mapping[str, str] | None = None,
        numbers: Mapping[tuple[str, str], float] | None = None,
        witnesses: int | None = None,
        **holder: str,
    ) -> None:
        """Let a pod (namespace, pod) or a job (job_id) hold a GPU from minute `start` to `end`.

        `begun`: Unix seconds of its start, by default of minute `start`. `counts`: whether counters grow in a minute.
        `causes`: confidence by cause. `numbers`: of causes, by cause and quantity. `stalled`: length of its stall in seconds. `host`: share of its 16 CPUs, and bytes per second of its disks.
        `witnesses`: of its idle runs. `from_zero`: minute at which the exporter lost its state, so that counters start again at 0.
        """
        scheduler = "slurm" if "job_id" in holder else "kubernetes"
        if scheduler == "kubernetes":
            holder = {"namespace": "ml", "pod": "train-0", "container": "main", **holder}
        place = {"gpu": gpu or str(index), "uuid": self.uuids[index]}
        if mig:
            place |= {"mig": mig, "mig_uuid": f"MIG-{self.uuids[index]}-{mig}"}
        labels = {**place, "scheduler": scheduler, **holder}
        last = self.world.minutes if end is None else end

        held = observed = busy = idle = run = 0.0
        unknown = 0
        rows: dict[int, tuple[float, float, float, float, float | None]] = {}
        for t in range(start, last + 1):
            used = activity(t)
            if t == from_zero:
                held = observed = busy = idle = 0.0
            if t > start and counts(t):
                held += 60
                if used is not None:
                    observed, busy = observed + 60, busy + 60 * used
                    idle += 60 if used == 0 else 0
            unknown = unknown + 1 if used is None else 0
            if (used is not None and used > 0) or unknown > 1:
                run = 0.0
            elif used == 0 and t > start:
                run += 60
            rows[t] = held, observed, busy, idle, None if used is None else run

        def column(position: int) -> Values:
            return lambda t: rows[t][position] if t in rows else None

        def while_held(value: float) -> Values:
            return lambda t: value if t in rows else None

        for position, name in enumerate(("held", "observed", "busy", "idle")):
            self.put(f"gpu_allocation_{name}_seconds_total", labels, column(position))
        self.put("gpu_allocation_idle_run_seconds", labels, idle_run or column(4))
        if witnesses is not None:
            run_of, of_run = idle_run or column(4), float(witnesses)
            self.put("gpu_allocation_idle_run_witnesses", labels, lambda t: of_run if run_of(t) else run_of(t))
        self.put("gpu_allocation_start_timestamp_seconds", labels, while_held(60.0 * start if begun is None else begun))
        self.put("gpu_allocation_holder_units", labels, while_held(units))
        if stalled is not None:
            self.put("gpu_allocation_stalled_run_seconds", labels, lambda t: stalled(t) if t in rows else None)
        if host is not None:
            self.put("gpu_allocation_host_activity_ratio", labels, while_held(host[0]))
            self.put("gpu_allocation_host_cpus", labels, while_held(16.0))
            self.put("gpu_allocation_host_io_bytes_per_second", labels, while_held(host[1]))
        for cause, confidence in (causes or {}).items():
            self.put("gpu_allocation_cause", {**labels, "cause": cause, "confidence": confidence}, while_held(1))
        for (cause, quantity), value in (numbers or {}).items():
            labelled = {**labels, "cause": cause, "quantity": quantity}
            self.put("gpu_allocation_cause_value", labelled, while_held(value))
        self.put("gpu_allocation_share_ratio", labels, while_held(share))
        self.put("gpu_allocation_info", {**labels, **(info or {})}, while_held(1))
        self.put("gpu_allocated", place if not mig else {"gpu": place["gpu"], "uuid": place["uuid"]}, while_held(1))


def throttled(node: Node, index: int, reason: str, share: Values) -> None:
    """Let a GPU be slowed down for this share of its time."""
    labels = {"gpu": str(index), "uuid": node.uuids[index], "reason": reason}
    node.put("gpu_throttle_seconds_total", labels, _count(lambda t: 60 * (share(t) or 0.0)))


def _count(step: Callable[[int], float]) -> Values:
    """A counter that grows by `step` every minute."""
    total, row = 0.0, {0: 0.0}

    def value(t: int) -> float:
        nonlocal total
        for each in range(max(row) + 1, t + 1):
            total += step(each)
            row[each] = total
        return row[t]

    return value


def _last(happens: Callable[[int], bool]) -> Values:
    """Unix seconds of the last minute for which `happens` is true."""

    def value(t: int) -> float | None:
        return next((60.0 * each for each in range(t, -1, -1) if happens(each)), None)

    return value
