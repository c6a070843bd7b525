"""`record`: the exporter's own reads for a while, with every answer of the driver written down."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from gpu_exporter import collectors
from gpu_exporter.app.wiring import activity_rules
from gpu_exporter.clock import SystemClock
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.nvml.backend import NvmlBackend
from gpu_exporter.devices.nvml.library import LiveLibrary
from gpu_exporter.devices.nvml.recording import Answers, Question, Recorder
from gpu_exporter.devices.protocol import Device, EventWatch
from gpu_exporter.exposition.table import layout
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.version import VERSION

EVENT_WAIT_S = 0.5
EXIT_NO_DATA = 3


def record(path: Path, duration_s: float, interval_s: float, settings: Settings, *, hashed: bool) -> int:
    """Record for `duration_s`, write the file, print a summary. Returns the exit code. Raises OSError."""
    recorder = Recorder(LiveLibrary(), hashed=hashed)
    backend = NvmlBackend(recorder)
    clock = SystemClock()
    try:
        backend.open()
        devices = _find_devices(backend)
    except DriverUnavailable as exc:
        print(f"gpu-exporter: no GPU data: {exc}", file=sys.stderr)  # noqa: T201 - the user's one line
        return EXIT_NO_DATA
    path.touch()  # a place that cannot be written is known before the wait
    stop = threading.Event()
    threads = [threading.Thread(target=_listen, args=(backend, devices, stop), daemon=True)]
    rules = activity_rules(settings)
    for device in devices:
        sampler = DeviceSampler(device, collectors.ALL, clock, rules)
        threads.append(threading.Thread(target=_sample, args=(sampler, interval_s, stop), daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(duration_s)
    stop.set()
    deadline = time.monotonic() + 2 * interval_s + EVENT_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))  # one that hangs is recorded up to there
    recorder.write(path, exporter=VERSION, binding=metadata.version("nvidia-ml-py"), python=sys.version.split()[0])
    sys.stdout.write(summarize(recorder.answers))
    return 0


def _find_devices(backend: NvmlBackend) -> list[Device]:
    found: list[Device] = []
    for position in range(backend.count()):
        try:
            device = backend.find(position)
            device.read_persistence_mode()
        except DeviceError as exc:
            print(f"gpu-exporter: gpu {position}: {exc}", file=sys.stderr)  # noqa: T201 - the others go on
            continue
        found.append(device)
    return found


def _sample(sampler: DeviceSampler, interval_s: float, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            sampler.sample()
        except DeviceError:
            return  # written down; nothing more will come
        stop.wait(interval_s)


def _listen(backend: NvmlBackend, devices: list[Device], stop: threading.Event) -> None:
    try:
        watch: EventWatch = backend.watch_events(devices)
        while not stop.is_set():
            watch.wait(EVENT_WAIT_S)
        watch.close()
    except DeviceError:
        return  # written down like every other answer


def summarize(answers: Mapping[Question, Answers]) -> str:
    """One line per call: how often, how fast in microseconds, and what it refused."""
    calls: dict[str, tuple[list[int], set[str]]] = {}
    for (call, _, arguments), entry in answers.items():
        name = f"{call} {arguments[0]}" if call == "nvmlDeviceGetFieldValues" else call
        latencies, errors = calls.setdefault(name, ([], set()))
        latencies += entry.latencies_us
        errors.update(value for kind, value in entry.values if kind == "error")
        if call == "nvmlDeviceGetFieldValues":
            errors.update(f"code {value[0]}" for kind, value in entry.values if kind == "ok" and value[0])
    rows = []
    for name, (latencies, errors) in sorted(calls.items()):
        latencies.sort()
        p50, p99 = statistics.median(latencies), latencies[int(0.99 * len(latencies))]
        rows.append((name, str(len(latencies)), f"{p50:.0f}", str(p99), " ".join(sorted(errors))))
    header = ("CALL", "TIMES", "P50 US", "P99 US", "REFUSED")
    return "\n".join(layout(header, rows, frozenset(header[1:4]))) + "\n"
