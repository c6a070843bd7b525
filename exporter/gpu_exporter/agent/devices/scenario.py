"""Reads scenarios: files that describe a node and its load for the simulated backend and for the C test library.

The format is JSON or YAML. `scenario.schema.json` in this directory is its JSON Schema. An example:

    gpus:
      - model: H100                       # see products.py
        load: {kind: square, low: 0, high: 0.9, period: 60, duty: 0.3}
        encoder: {kind: constant, value: 0.2}       # any of PARTS; missing parts follow from the load
        throttle: [{reason: hw_thermal, share: 0.4}]
        faults: [{at: 60, for: 30, call: nvmlDeviceGetUtilizationRates, error: NVML_ERROR_UNKNOWN}]
        xids: [{at: 90, code: 31}]
        work: [{at: 0, level: train}, {at: 3600, level: hang}]   # in place of load: levels of levels.py
        health: {ecc_corrected: 2, remapped_uncorrected: 1, remap_pending: 1, recovery_action: 1}
      - model: H100
        mig_from: 0                                 # MIG mode is on in [mig_from, mig_to)
        mig: [{profile: 1g.10gb, gi: 7, ci: 0, from: 0, to: 600, load: {kind: constant, value: 0.5}}]
    holders:
      - {gpu: 0, from: 0, to: 600, kind: pod, name: team/trainer-0/main, processes: 1,
         host: [{at: 0, cpus: 4, cores: 4, throttled: 0.7, ranks: 1, runnable: 96}],   # model/evidence.py
         training: {step: 0.4, wait: 0.6, workers: 2}}   # one rank of its training loop, on this GPU
    seed: 7

Times are seconds since the scenario's start. This module only computes values; it makes no driver calls.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.devices.levels import LEVELS, compile_work
from gpu_exporter.agent.devices.loads import Constant, Curve, Load, Square
from gpu_exporter.agent.devices.products import PRODUCTS, Product
from gpu_exporter.agent.devices.scenario_training import TrainingLoop
from gpu_exporter.common.config.values import unknown_key
from gpu_exporter.common.files import read_named
from gpu_exporter.common.model.evidence import HostEvidence, ProcessEvidence
from gpu_exporter.common.model.training import RankReport
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.plain import nearest

FOREVER = float("inf")
FILE_MAX = 16 * 2**20  # bytes
# Parts with their own load, all from 0 to 1: engines (of the time), traffic (of the link's bandwidth), GPM ratios, and
# power (of the range from idle to nine tenths of the limit).
PARTS = (
    *("encoder", "decoder", "jpeg", "ofa", "pcie", "nvlink"),
    *("graphics", "sm", "tensor", "dram", "fp64", "fp32", "fp16", "power"),
)
HOST_NUMBERS = tuple(
    name for name in HostEvidence._fields if name not in ("start", "end", "network_files", "processes", "files")
)
PROCESS_COUNTS = ("ranks", "loaders", "named_loaders", "busy_loaders", "full_loaders", "runnable", "blocked", "stopped")
PROCESS_NUMBERS = (*PROCESS_COUNTS, "rank_cores", "loader_cores", "loader_most", "loader_bytes", "terminal", "notebook")
HEALTH = (
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_corrected",
    "remapped_uncorrected",
    "remap_pending",
    "remap_failed",
    "retired_single_bit",
    "retired_double_bit",
    "recovery_action",
    "nvlinks_down",
    "fabric_status",
    "pcie_replays",
    "pcie_generation",
    "pcie_width",
    "numa_node",
)


class ScenarioError(ValueError):
    """The file is not a valid scenario. The text contains the place and the error."""


class Fault(NamedTuple):
    """A fault of driver calls in [start, end): they fail with `error`, or hang for `hang_s` seconds.

    `call`: name of the function, "*" for all functions.
    """

    start: float
    end: float
    call: str
    error: str = ""
    hang_s: float = 0.0


class ScenarioInstance(NamedTuple):
    """One MIG instance that exists in [start, end).

    `sm_slices`: its own compute slices. `gpu_slices`: the slices of its GPU instance.
    """

    uuid: str
    mig: str
    profile: str
    sm_slices: int
    memory: int
    load: Load
    start: float = 0.0
    end: float = FOREVER
    parts: Mapping[str, Load] = {}
    gpu_slices: int = 0


@dataclass(frozen=True, slots=True)
class ScenarioGpu:
    """One GPU. `throttle`: the share of the time in which each reason is active, by reason. `xids`: (time, code)."""

    index: int
    uuid: str
    product: Product
    load: Load
    parts: Mapping[str, Load]
    throttle: Mapping[str, float]
    faults: tuple[Fault, ...]
    instances: tuple[ScenarioInstance, ...]
    mig: bool
    mig_from: float = 0.0
    mig_to: float = FOREVER
    xids: tuple[tuple[float, int], ...] = ()
    health: Mapping[str, int] = dataclasses.field(default_factory=dict)
    memory_slices: int = 8  # of the whole board
    kept_memory: int = 0  # bytes in use without a holder, as on boards with memory that the system manages

    def has_mig(self, t: float) -> bool:
        return self.mig and self.mig_from <= t < self.mig_to

    def instances_at(self, t: float) -> list[ScenarioInstance]:
        if not self.has_mig(t):
            return []
        return [instance for instance in self.instances if instance.start <= t < instance.end]

    def fault(self, call: str, t: float) -> Fault | None:
        """Returns the fault that affects `call` at `t`, None without a fault."""
        for fault in self.faults:
            if fault.start <= t < fault.end and fault.call in ("*", call):
                return fault
        return None


class HostStage(NamedTuple):
    """A holder's activity on the host, starting at `start`. All times in the evidence are 0."""

    start: float
    evidence: HostEvidence


class ScenarioHolder(NamedTuple):
    """A holder that has a unit in [start, end). `name`: namespace/pod/container, or a job id."""

    unit: UnitId
    gpu: int
    start: float
    end: float
    kind: str
    name: str
    processes: int
    memory: int
    user: str
    account: str
    partition: str
    host: tuple[HostStage, ...] = ()
    training: TrainingLoop | None = None

    def evidence_at(self, t: float) -> HostEvidence | None:
        """Returns the holder's activity on the host at `t`, None if the scenario does not define it."""
        return next((stage.evidence for stage in reversed(self.host) if stage.start <= t), None)

    def report_at(self, t: float) -> RankReport | None:
        """Returns the report of the holder's training loop at `t`, None without a training loop."""
        uuid = self.unit.mig_uuid or self.unit.uuid
        return self.training.report(uuid, t - self.start) if self.training is not None else None


class Scenario(NamedTuple):
    gpus: tuple[ScenarioGpu, ...]
    holders: tuple[ScenarioHolder, ...]

    def holders_at(self, t: float) -> list[ScenarioHolder]:
        return [holder for holder in self.holders if holder.start <= t < holder.end]


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario file. Raises ScenarioError, whose text begins with the path, or OSError."""
    import yaml  # slow to import, and needed only if a file is given

    try:
        data = yaml.safe_load(read_named(path, FILE_MAX).decode("utf-8"))
        return parse_scenario(data)
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: ScenarioError, invalid UTF-8, numbers of too many digits
        raise ScenarioError(f"{path}: {exc}") from exc
    except RecursionError as exc:
        raise ScenarioError(f"{path}: nested too deeply") from exc


def parse_scenario(data: object) -> Scenario:
    """Converts the parsed file to a scenario. Raises ScenarioError, whose text contains the place of the error."""
    top = _ScenarioReader("scenario", data)
    seed = int(top.number("seed", 0))
    gpus = tuple(
        _parse_gpu(_ScenarioReader(f"gpus[{i}]", entry), i, seed) for i, entry in enumerate(top.entries("gpus"))
    )
    holders = tuple(
        _parse_holder(_ScenarioReader(f"holders[{i}]", entry), gpus) for i, entry in enumerate(top.entries("holders"))
    )
    top.finish()
    return Scenario(gpus, holders)


class _ScenarioReader:
    """Reads the keys of a mapping in the file. Raises ScenarioError for invalid values and unknown keys."""

    def __init__(self, place: str, data: object) -> None:
        if not isinstance(data, dict):
            raise ScenarioError(f"{place}: expected a mapping, not {type(data).__name__}")
        self.place = place
        self._data = dict(data)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def take(self, key: str, default: object = None) -> object:
        self._known.append(key)
        return self._data.pop(key, default)

    def _need(self, key: str, default: object) -> object:
        """Returns the value like `take`. Raises ScenarioError if the key is missing and has no default."""
        if default is None and key not in self._data:
            meant = nearest(key, map(str, self._data))
            raise ScenarioError(f"{self.place}: {key} is missing" + (f"; is {meant!r} meant for it?" if meant else ""))
        return self.take(key, default)

    def entries(self, key: str) -> list[object]:
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ScenarioError(f"{self.place}.{key}: expected a list, not {type(value).__name__}")
        return value

    def number(self, key: str, default: float | None = None, *, maximum: float = FOREVER) -> float:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ScenarioError(f"{self.place}.{key}: expected a number, not {value!r}")
        if not 0 <= value <= maximum:
            raise ScenarioError(f"{self.place}.{key}: {value!r} is not between 0 and {maximum:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._need(key, default)
        if not isinstance(value, str):
            raise ScenarioError(f"{self.place}.{key}: expected a string, not {value!r}")
        return value

    def finish(self) -> None:
        if self._data:
            key = sorted(map(str, self._data))[0]
            raise ScenarioError(unknown_key(f"{self.place}.{key}", key, self._known))


def _parse_load(place: str, data: object) -> Load:
    reader = _ScenarioReader(place, data)
    kind = reader.text("kind")
    makers: dict[str, Callable[[], Load]] = {
        "constant": lambda: Constant(reader.number("value", maximum=1)),
        "square": lambda: Square(
            reader.number("low", 0.0, maximum=1),
            reader.number("high", 1.0, maximum=1),
            _above_zero(reader, "period"),
            reader.number("duty", 0.5, maximum=1),
        ),
        "ramp": lambda: Curve(
            [
                (0.0, reader.number("from", maximum=1)),
                (_above_zero(reader, "duration"), reader.number("to", maximum=1)),
            ]
        ),
        "curve": lambda: Curve(_parse_points(f"{place}.points", reader.entries("points"))),
    }
    if kind not in makers:
        raise ScenarioError(f"{place}.kind: {kind!r} is not one of {', '.join(makers)}")
    load = makers[kind]()
    reader.finish()
    return load


def _above_zero(reader: _ScenarioReader, key: str) -> float:
    value = reader.number(key)
    if value == 0:
        raise ScenarioError(f"{reader.place}.{key}: must be above 0")
    return value


def _parse_points(place: str, entries: list[object]) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) != 2:
            raise ScenarioError(f"{place}[{i}]: expected [seconds, load]")
        pair = _ScenarioReader(f"{place}[{i}]", {"seconds": entry[0], "load": entry[1]})
        points.append((pair.number("seconds"), pair.number("load", maximum=1)))
        if i and points[i][0] < points[i - 1][0]:
            raise ScenarioError(f"{place}[{i}]: time goes backwards")
    if not points:
        raise ScenarioError(f"{place}: at least one point is required")
    return points


def _parse_gpu(reader: _ScenarioReader, index: int, seed: int) -> ScenarioGpu:
    model = reader.text("model")
    if model not in PRODUCTS:
        raise ScenarioError(f"{reader.place}.model: {model!r} is not one of {', '.join(PRODUCTS)}")
    product = PRODUCTS[model]
    gpu_uuid = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{seed}/{index}')}"
    has_mig = reader.take("mig", None)
    entries = has_mig if isinstance(has_mig, list) else []
    if has_mig is not None and not product.mig:
        raise ScenarioError(f"{reader.place}.mig: a {model} has no MIG")
    instances = [
        _parse_instance(_ScenarioReader(f"{reader.place}.mig[{i}]", entry), i, f"{seed}/{index}/{i}")
        for i, entry in enumerate(entries)
    ]
    faults = []
    for i, entry in enumerate(reader.entries("faults")):
        part = _ScenarioReader(f"{reader.place}.faults[{i}]", entry)
        start = part.number("at")
        fault = Fault(
            start=start,
            end=start + part.number("for", FOREVER),
            call=part.text("call", "*"),
            error=part.text("error", ""),
            hang_s=part.number("hang_ms", 0.0) / 1e3,
        )
        if bool(fault.error) == bool(fault.hang_s):
            raise ScenarioError(f"{part.place}: exactly one of error and hang_ms is required")
        faults.append(fault)
        part.finish()
    throttle = {}
    for i, entry in enumerate(reader.entries("throttle")):
        part = _ScenarioReader(f"{reader.place}.throttle[{i}]", entry)
        throttle[part.text("reason")] = part.number("share", maximum=1)
        part.finish()
    xids = []
    for i, entry in enumerate(reader.entries("xids")):
        part = _ScenarioReader(f"{reader.place}.xids[{i}]", entry)
        xids.append((part.number("at"), int(part.number("code"))))
        part.finish()
    load, parts = _parse_work(reader, model, product)
    gpu = ScenarioGpu(
        index=index,
        uuid=gpu_uuid,
        product=product,
        load=load,
        parts=parts,
        throttle=throttle,
        faults=tuple(faults),
        instances=tuple(instances),
        mig=has_mig is not None,
        mig_from=reader.number("mig_from", 0.0),
        mig_to=reader.number("mig_to", FOREVER),
        xids=tuple(sorted(xids)),
        kept_memory=int(reader.number("kept_gib", 0)) * 1024**3,
        memory_slices=product.memory_slices,
        health=_parse_health(f"{reader.place}.health", reader.take("health", {})),
    )
    reader.finish()
    return gpu


def _parse_work(reader: _ScenarioReader, model: str, product: Product) -> tuple[Load, dict[str, Load]]:
    """Returns the load of a GPU and of its parts, from named levels or from explicit curves."""
    entries = reader.entries("work")
    if not entries:
        load = _parse_load(f"{reader.place}.load", reader.take("load", {"kind": "constant", "value": 0}))
        return load, _parse_parts(reader)
    stages: list[tuple[float, str]] = []
    for i, entry in enumerate(entries):
        part = _ScenarioReader(f"{reader.place}.work[{i}]", entry)
        stages.append((part.number("at"), part.text("level")))
        known = sorted(name for of, name in LEVELS if of == model)
        if stages[-1][1] not in known:
            names = ", ".join(known) or "none"
            raise ScenarioError(
                f"{part.place}.level: {stages[-1][1]!r} is not a level of a {model}; its levels: {names}"
            )
        if i and stages[i][0] < stages[i - 1][0]:
            raise ScenarioError(f"{part.place}.at: time goes backwards")
        part.finish()
    load, parts = compile_work(model, product, stages)
    return load, parts | _parse_parts(reader)


def _parse_parts(reader: _ScenarioReader) -> dict[str, Load]:
    return {
        name: _parse_load(f"{reader.place}.{name}", given)
        for name in PARTS
        if (given := reader.take(name, None)) is not None
    }


def _parse_health(place: str, data: object) -> dict[str, int]:
    reader = _ScenarioReader(place, data)
    health = {name: int(reader.number(name, 0)) for name in HEALTH}
    reader.finish()
    return health


def _parse_instance(part: _ScenarioReader, position: int, name: str) -> ScenarioInstance:
    profile = part.text("profile")
    slices, _, gib = profile.partition("g.")
    own, _, slices = slices.rpartition("c.")  # 1c.3g.40gb: a compute instance with a part of its GPU instance
    own = own or slices
    if not (slices.isdigit() and own.isdigit() and gib.removesuffix("gb").isdigit()):
        raise ScenarioError(f"{part.place}.profile: {profile!r} is not a MIG profile such as 1g.10gb")
    gpu_instance, compute_instance = int(part.number("gi", position + 1)), int(part.number("ci", 0))
    instance = ScenarioInstance(
        uuid=f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, name)}",
        mig=f"{gpu_instance}/{compute_instance}",
        profile=profile,
        sm_slices=int(own),
        memory=int(gib.removesuffix("gb")) * 1024**3,
        load=_parse_load(f"{part.place}.load", part.take("load", {"kind": "constant", "value": 0})),
        start=part.number("from", 0.0),
        end=part.number("to", FOREVER),
        parts=_parse_parts(part),
        gpu_slices=int(slices),
    )
    part.finish()
    return instance


def _parse_host(reader: _ScenarioReader) -> HostStage:
    start = reader.number("at")
    whole: dict[str, Any] = {name: reader.number(name) for name in HOST_NUMBERS if name in reader}
    own = {name: reader.number(name) for name in PROCESS_NUMBERS if name in reader}
    reader.finish()
    processes: ProcessEvidence | None = None
    if own:
        kinds = {name: bool(own.pop(name)) for name in ("terminal", "notebook") if name in own}
        counts = {name: int(own.pop(name)) for name in PROCESS_COUNTS if name in own}
        number = counts.get("ranks", 0) + counts.get("loaders", 0)
        processes = ProcessEvidence(number, True, **counts, **kinds, **own)  # type: ignore[arg-type]
    return HostStage(start, HostEvidence(0.0, 0.0)._replace(processes=processes, **whole))


def _parse_training(reader: _ScenarioReader) -> TrainingLoop:
    loop = TrainingLoop(
        step=reader.number("step"),
        wait=reader.number("wait"),
        rank=int(reader.number("rank", 0)),
        world_size=int(reader.number("world_size", 1)),
        workers=int(reader.number("workers", 0)),
        batch_size=int(reader.number("batch_size", 0)),
    )
    reader.finish()
    if loop.step <= 0.0 or loop.wait > 1.0:
        raise ScenarioError(f"{reader.place}: step must be above 0, and wait is a share between 0 and 1")
    return loop


def _parse_holder(reader: _ScenarioReader, gpus: tuple[ScenarioGpu, ...]) -> ScenarioHolder:
    index = int(reader.number("gpu"))
    if index >= len(gpus):
        raise ScenarioError(f"{reader.place}.gpu: no GPU {index}: the scenario has {len(gpus)} GPUs, numbered from 0")
    gpu = gpus[index]
    instance = reader.take("mig", None)
    mig_uuid = ""
    if instance is not None:
        if not isinstance(instance, int) or not 0 <= instance < len(gpu.instances):
            raise ScenarioError(f"{reader.place}.mig: {instance!r} is not an instance of gpus[{index}]")
        mig_uuid = gpu.instances[instance].uuid
    kind = reader.text("kind")
    name = reader.text("name")
    if kind not in ("pod", "job"):
        raise ScenarioError(f"{reader.place}.kind: {kind!r} is not one of pod, job")
    if kind == "pod" and name.count("/") != 2:
        raise ScenarioError(f"{reader.place}.name: expected namespace/pod/container, not {name!r}")
    holder = ScenarioHolder(
        unit=UnitId(gpu.uuid, mig_uuid),
        gpu=index,
        start=reader.number("from", 0.0),
        end=reader.number("to", FOREVER),
        kind=kind,
        name=name,
        processes=int(reader.number("processes", 1)),
        memory=int(reader.number("memory_gib", 0)) * 1024**3,
        user=reader.text("user", ""),
        account=reader.text("account", ""),
        partition=reader.text("partition", ""),
        host=tuple(
            _parse_host(_ScenarioReader(f"{reader.place}.host[{i}]", entry))
            for i, entry in enumerate(reader.entries("host"))
        ),
        training=_parse_training(_ScenarioReader(f"{reader.place}.training", reader.take("training", {})))
        if "training" in reader
        else None,
    )
    reader.finish()
    return holder
