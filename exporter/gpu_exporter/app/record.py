"""`record`: the exporter's own reads for a while, with every answer of the driver written down."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from gpu_exporter import collectors
from gpu_exporter.app.serve import stop_on_signal
from gpu_exporter.app.wiring import activity_rules
from gpu_exporter.clock import SystemClock
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.nvml.backend import NvmlBackend
from gpu_exporter.devices.nvml.library import LiveLibrary
from gpu_exporter.devices.nvml.recording import Answers, Question, Recorder
from gpu_exporter.devices.protocol import Device
from gpu_exporter.exits import Exit
from gpu_exporter.files import write_atomically
from gpu_exporter.plain import layout
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.threads import start
from gpu_exporter.version import VERSION

log = logging.getLogger(__name__)
EVENT_WAIT_S = 0.25
FIND_S = 1.0  # for events one GPU that is slow to be found is not waited for longer


def record(path: Path, duration_s: float, interval_s: float, settings: Settings, *, hashed: bool) -> int:
    """Record for `duration_s` or until a signal, write the file, print a summary. Returns the exit code.

    Raises OSError.
    """
    recorder = Recorder(LiveLibrary(), hashed=hashed)
    backend = NvmlBackend(recorder)
    try:
        backend.open()
        count = backend.count()
    except DriverUnavailable as exc:
        print(f"gpu-exporter: no GPU data: {exc}", file=sys.stderr)  # noqa: T201 - the user's one line
        return Exit.NO_DATA
    if not path.parent.is_dir():  # known before the wait, and not after it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    log.info("recording %d GPUs for %g s into %s; Ctrl-C ends early", count, duration_s, path)
    stop = stop_on_signal()
    taps = [_Tap(backend, position, settings, interval_s, stop) for position in range(count)]
    threads = [threading.Thread(target=tap.run, daemon=True) for tap in taps]
    threads.append(threading.Thread(target=_listen, args=(backend, taps, stop), daemon=True))
    for thread in threads:
        start(thread)
    stop.wait(duration_s)
    stop.set()
    deadline = time.monotonic() + interval_s + 4 * EVENT_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))  # one that hangs is recorded up to there
    about = {
        "exporter": VERSION,
        "binding": metadata.version("nvidia-ml-py"),
        "python": sys.version.split()[0],
    }
    write_atomically(path, recorder.render(**about))
    sys.stdout.write(summarize(recorder.answers))
    log.info("wrote %s (%d bytes)", path, path.stat().st_size)
    return 0


class _Tap:
    """Reads the GPU at one position, in its own thread: one that hangs at its very start is worth a recording too."""

    def __init__(
        self, backend: NvmlBackend, position: int, settings: Settings, interval_s: float, stop: threading.Event
    ) -> None:
        self.device: Device | None = None
        self.tried = threading.Event()
        self._backend, self._position, self._settings = backend, position, settings
        self._interval_s, self._stop = interval_s, stop

    def run(self) -> None:
        try:
            device = self._backend.find(self._position)
            with contextlib.suppress(DeviceError):
                device.read_persistence_mode()
            self.device = device
            self.tried.set()
            sampler = DeviceSampler(device, collectors.ALL, SystemClock(), activity_rules(self._settings))
            sampler.sample()
            log.info("gpu %d: %s", self._position, device.identity.name)
            while not self._stop.wait(self._interval_s):
                sampler.sample()
        except DeviceError as exc:  # written down, and nothing more will come
            log.warning("gpu %d: %s", self._position, exc)
        finally:
            self.tried.set()


def _listen(backend: NvmlBackend, taps: list[_Tap], stop: threading.Event) -> None:
    for tap in taps:
        tap.tried.wait(FIND_S)
    try:
        watch = backend.watch_events([tap.device for tap in taps if tap.device is not None])
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
