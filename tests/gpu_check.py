"""Reports the answers of this machine's driver, and their speed: for a machine with a GPU.

    python -m tests.gpu_check [--seconds 20] [--only LOAD] [--no-loads]

Only reads, except for its own loads on GPU 0 (tests/workloads). Writes to out/: gpu-check.rec.gz (a recording with
hashed identifiers, to be committed as a fixture), gpu-check-loads.rec.gz (the same during the loads; their times are in
gpu-check.json), gpu-check.json (all figures) and gpu-check.md (for docs/decisions).
Measurements that are not possible here are listed with the reason, never omitted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import platform
import pwd
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pynvml
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml import structures
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.device import NvmlDevice
from gpu_exporter.agent.devices.nvml.recording import read_recording
from gpu_exporter.agent.devices.protocol import ENGINES, UtilizationSample
from tests import gpu_review
from tests.gpu_review import Mark
from tests.testbed import torch_env
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.workloads.gpu_loads import LENGTHS, LOADS

OUT = Path(__file__).resolve().parents[1] / "out"
FIELDS = range(1, 310)
GPM_METRICS = range(1, 334)
BAR = 0.02


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def supported_fields(device: NvmlDevice) -> list[int]:
    """Field ids that have a value here (scope 0, and all links for the fields that need a scope)."""
    found = set()
    for field, scope in itertools.product(FIELDS, (0, nvml.NVML_VALUE_ALL_LINKS)):
        try:
            ((code, _),) = device.ask.library.ask("nvmlDeviceGetFieldValues", device.handle, ((field, scope),))
        except DeviceError:
            continue
        if code == nvml.NVML_SUCCESS:
            found.add(field)
    return sorted(found)


def read_all_gpm(device: NvmlDevice) -> dict[int, float]:
    """Every GPM metric that has a value here, by its id, over a window of 200 ms, in NVML's units."""
    if not device.ask("nvmlGpmQueryDeviceSupport"):
        return {}
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    for sample in samples:
        pynvml.nvmlGpmSampleGet(device.handle.raw, sample)
        time.sleep(0.2)
    found: dict[int, float] = {}
    for metric in GPM_METRICS:  # one by one: a driver refuses the whole question for one metric that is new to it
        query = structures.GpmMetrics()
        query.version, query.count = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        query.first, query.second = (ctypes.cast(sample, ctypes.c_void_p) for sample in samples)
        query.metrics[0].metric = metric
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmMetricsGet(query)
            if query.metrics[0].code == nvml.NVML_SUCCESS and math.isfinite(query.metrics[0].value):
                found[metric] = query.metrics[0].value
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)
    return found


def gpm_without_privilege() -> list[int] | str:
    """The GPM metric ids for an unprivileged user, read in a child process. Call it before this process opens the driver."""
    if os.geteuid() != 0:
        return "not measured separately: this whole check ran without privilege"
    nobody = pwd.getpwnam("nobody")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer: list[int] | str
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            backend = NvmlBackend()
            backend.open()
            device = backend.find(0)
            assert isinstance(device, NvmlDevice)
            answer = list(read_all_gpm(device))
        except Exception as exc:
            answer = f"{type(exc).__name__}: {exc}"
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(child, 0)
    answer = json.loads(text)
    return answer if isinstance(answer, str) else [int(metric) for metric in answer]


def rings_of(device: NvmlDevice) -> dict[str, dict[str, float | int | None] | str]:
    """Span and period of the driver's rings of utilization and of each engine, or the reason for a missing ring."""
    asks: dict[str, Callable[[float], Sequence[UtilizationSample]]] = {
        "utilization": device.read_utilization_samples,
        **{engine: functools.partial(device.read_engine_samples, engine) for engine in ENGINES},
    }
    rings: dict[str, dict[str, float | int | None] | str] = {}
    for name, ask in asks.items():
        try:
            rings[name] = describe_ring(ask(0.0))
        except DeviceError as exc:
            rings[name] = str(exc)
    return rings


def describe_ring(ring: Sequence[UtilizationSample]) -> dict[str, float | int | None]:
    steps = [later.wall - earlier.wall for earlier, later in itertools.pairwise(ring)]
    return {
        "entries": len(ring),
        "span_s": round(ring[-1].wall - ring[0].wall, 3) if ring else None,
        "period_s": round(statistics.median(steps), 4) if steps else None,
        "newest_age_s": round(time.time() - ring[-1].wall, 3) if ring else None,
    }


def latencies(recording: Path) -> dict[str, dict[str, float]]:
    """p50 and p99 of each call, in microseconds, from the recording."""
    calls: dict[str, list[int]] = {}
    for (call, _, _), entry in read_recording(recording)[2].items():
        calls.setdefault(call, []).extend(entry.latencies_us)
    return {
        call: {"times": len(us), "p50_us": statistics.median(us), "p99_us": sorted(us)[int(0.99 * len(us))]}
        for call, us in sorted(calls.items())
    }


def run_once() -> dict[str, Any]:
    begin = time.perf_counter()
    done = subprocess.run([*GPU_EXPORTER, "--once", "--state.directory="], capture_output=True, text=True, check=False)
    return {
        "status": done.returncode,
        "seconds": round(time.perf_counter() - begin, 3),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
        "lines": len(done.stdout.splitlines()),
        "stderr": done.stderr,
    }


def read_gpu(url: str, gpu: str = "0") -> dict[str, float]:
    """The values of one GPU, of families without further labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(fetch(url) or "")
        for sample in family.samples
        if sample.labels.get("gpu") == gpu and sample.labels.keys() <= {"gpu", "uuid"}
    }


def describe_listing(device: NvmlDevice, pid: int) -> str:
    """Whether the driver lists a process on the GPU, with the pid that this process sees."""
    try:
        found = device.read_processes()
    except DeviceError as exc:
        return str(exc)
    if found.listed is None:
        return f"{found.compute} processes in entries of an unknown size"
    return "yes" if any(process.pid == pid for process in found.listed) else f"not among {len(found.listed)}"


def describe_share(device: NvmlDevice, pid: int, since_wall: float) -> dict[str, Any] | str:
    """The driver's report of the process's utilization since a given time, and how long the call takes."""
    times_us: list[float] = []
    try:
        for _ in range(20):
            begin = time.perf_counter()
            found = device.read_process_utilization(since_wall)
            times_us.append(1e6 * (time.perf_counter() - begin))
    except DeviceError as exc:
        return str(exc)
    own = [entry for entry in found if entry.pid == pid]
    return {
        "ratio": sum(entry.ratio for entry in own) / len(own) if own else None,
        "entries": len(own),
        "entries_of_others": len(found) - len(own),
        "newest_s_ago": time.time() - max(entry.wall for entry in own) if own else None,
        "p50_us": statistics.median(times_us),
    }


def check_loads(
    device: NvmlDevice, seconds: float, recording: Path, keys: Iterable[str]
) -> tuple[dict[str, Any], list[Mark]]:
    """Busy and idle time of a running exporter during loads of known nature, all in one recording with their marks."""
    results: dict[str, Any] = {}
    marks: list[Mark] = []
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        port = free_port()
        running = processes.start(
            [*GPU_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", "--state.directory="], name="exporter"
        )
        recorder = subprocess.Popen(
            [*GPU_EXPORTER, "record", str(recording), "--duration=1h", "--hash-identifiers"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        url = f"http://127.0.0.1:{port}/metrics"
        wait_for(lambda: read_gpu(url).get("gpu_busy_seconds_total") is not None or None, "the first GPU", 30)
        begin = time.time()
        time.sleep(seconds)
        marks.append(Mark("no context", begin, time.time(), 0.0))
        for key in keys:
            length_s = seconds * LENGTHS.get(key, 1)
            command = [sys.executable, "-m", "tests.workloads.gpu_loads", key, f"{length_s + 2:g}"]
            load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert load.stdout is not None
            load.stdout.readline()  # `ready`, or the end of a load that cannot run here
            listed = describe_listing(device, load.pid)
            gpm = read_all_gpm(device)  # also what the exporter does not read, such as the integer pipe
            before, since = read_gpu(url), time.time()
            with contextlib.suppress(subprocess.TimeoutExpired):
                load.wait(length_s)
            after, until = read_gpu(url), time.time()
            share = describe_share(device, load.pid, max(since, until - 10.0))
            try:
                out, errors = load.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                load.kill()
                out, errors = load.communicate()
            if load.returncode:
                results[key] = (errors.strip().splitlines() or [f"exit status {load.returncode}"])[-1]
                continue
            truth = json.loads(out.splitlines()[-1])
            marks.append(Mark(key, since, until, truth))
            gone = {n: after[n] - before[n] for n in before if n.endswith("_total") and n in after}
            observed = gone.get("gpu_observed_seconds_total", 0.0)
            busy = gone.get("gpu_busy_seconds_total", 0.0) / observed if observed else None
            within = truth is None or not key.startswith("kernels") or (busy is not None and abs(busy - truth) <= BAR)
            results[key] = {
                "truth": truth,
                "busy": busy,
                "idle_s": gone.get("gpu_idle_seconds_total"),
                "observed_s": observed,
                "pid_listed": listed,
                "own_share": share,
                "within_bar": within,
                "gpm": gpm,
                "gauges": {n: v for n, v in after.items() if not n.endswith("_total")},
            }
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=60)
        if recorder.returncode:
            raise RuntimeError(f"record ended with {recorder.returncode}: {errors}")
        results["rss_mib"] = next(
            int(line.split()[1]) / 1024
            for line in Path(f"/proc/{running.process.pid}/status").read_text("ascii").splitlines()
            if line.startswith("VmRSS")
        )
    zero, _, _ = read_recording(recording)
    results["encoder only"] = "not measured: there is no load for the video encoder yet"
    return results, [mark._replace(start=mark.start - zero, end=mark.end - zero) for mark in marks]


def check_hook(*, makes: bool) -> dict[str, Any] | str:
    """The hook of docs/torch.md on this GPU (tests/hook/on_gpu.py), or the reason why it was not tried.

    `makes`: whether an environment with torch may be made in the cache (5 GB).
    """
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    python, path = sys.executable, "exporter/hook:."
    if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode:
        if not makes:
            return "not measured: this Python has no torch with CUDA, and --no-loads makes no environment"
        try:
            path = f"{torch_env.make('ci')}:{path}"
        except (subprocess.CalledProcessError, OSError) as exc:
            return f"not measured: the environment with torch cannot be made: {exc}"
    done = subprocess.run(
        [python, "-m", "tests.hook.on_gpu"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _render_share(share: dict[str, Any] | str) -> str:
    if isinstance(share, str):
        return share
    ratio = "not listed" if share["ratio"] is None else f"{share['ratio']:.2f}"
    return f"{ratio}, {share['entries_of_others']} other entries, {share['p50_us']:.0f} us"


def render(report: dict[str, Any]) -> str:
    """The figures as a page for docs/decisions."""
    out = [
        f"# Answers of {report['name']}",
        "",
        f"Driver {report['driver']}, {report['python']}. {report['who']}.",
        "",
    ]
    out += [f"- field ids: {ranges(report['fields'])}", f"- GPM ids: {ranges(report['gpm'])}"]
    plain = report["gpm_without_privilege"]
    out.append(f"- GPM ids without privilege: {plain if isinstance(plain, str) else ranges(plain)}")
    out += [f"- rings of samples: {report['rings']}", f"- `--once`: {report['once']}", ""]
    out += ["| call | times | p50 us | p99 us |", "| --- | --- | --- | --- |"]
    out += [f"| {c} | {f['times']} | {f['p50_us']:.0f} | {f['p99_us']:.0f} |" for c, f in report["latencies"].items()]
    out += ["", "| load | truth | busy | idle s of observed s | within 2 points | pid listed | of the process |"]
    out += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, result in report["loads"].items():
        if not isinstance(result, dict):
            out.append(f"| {name} | {result} | | | | | |")
            continue
        busy = "-" if result["busy"] is None else f"{result['busy']:.3f}"
        idle = f"{result['idle_s']} of {result['observed_s']:.0f}"
        out.append(
            f"| {name} | {result['truth']} | {busy} | {idle} | {result['within_bar']} | {result['pid_listed']} "
            f"| {_render_share(result['own_share'])} |"
        )
    out += ["", f"- the hook of docs/torch.md: {report['hook']}", "", *report["review"]]
    return "\n".join(out) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="length of the recording and of each load; all take ten minutes"
    )
    parser.add_argument("--no-loads", dest="loads", action="store_false", help="only read")
    parser.add_argument(
        "--only", action="append", default=[], choices=LOADS, metavar="LOAD", help="this load; repeatable"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    unprivileged = gpm_without_privilege()
    backend = NvmlBackend()
    try:
        backend.open()
        device = backend.find(0)
    except (DriverUnavailable, DeviceError) as exc:
        print(f"gpu-check needs a GPU: {exc}", file=sys.stderr)
        return 3
    assert isinstance(device, NvmlDevice)
    options.out.mkdir(exist_ok=True)
    recording = options.out / "gpu-check.rec.gz"
    command = [*GPU_EXPORTER, "record", str(recording), f"--duration={options.seconds:g}s", "--hash-identifiers"]
    subprocess.run(command, check=True)
    report: dict[str, Any] = {
        "name": device.identity.name,
        "driver": device.identity.driver_version,
        "python": f"Python {platform.python_version()}",
        "who": f"{backend.count()} GPUs, uid {os.geteuid()}",
        "mig_mode": device.identity.mig_mode,
        "fields": supported_fields(device),
        "gpm": list(read_all_gpm(device)),
        "gpm_without_privilege": unprivileged,
        "rings": rings_of(device),
        "latencies": latencies(recording),
        "once": run_once(),
        "loads": {"all": "not measured: --no-loads"},
        "marks": [],
        "review": [],
    }
    if options.loads:
        played = options.out / "gpu-check-loads.rec.gz"
        report["loads"], marks = check_loads(device, options.seconds, played, [*options.only] or list(LOADS))
        report["marks"] = [mark._asdict() for mark in marks]
        keep(report, options.out)
    backend.close()
    report["hook"] = check_hook(makes=options.loads)
    keep(report, options.out)
    if options.loads:
        report["review"] = gpu_review.render(gpu_review.review(played, marks))
    (options.out / "gpu-check.md").write_text(render(report), encoding="utf-8")
    print(render(report))
    return 0


def keep(report: dict[str, Any], folder: Path) -> None:
    """Write the figures so far: a later part may fail, and time on a GPU is rare."""
    (folder / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
