"""The daemon over HTTP: formats, faults, and how it starts and ends."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, run_exporter, wait_for
from tests.testbed.servers import require

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")
FAST = "sampling: {interval: 200ms, deadline: 500ms, withhold_min: 1s}\nattribution: {interval: 200ms}\n"


@pytest.fixture
def feeder(nvml_table: NvmlTable):
    feeder = ScenarioFeeder(
        parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 0.5}}] * 4}), nvml_table
    )
    feeder.start()
    yield feeder
    feeder.stop()


@pytest.fixture
def fast(tmp_path: Path) -> str:
    path = tmp_path / "fast.yaml"
    path.write_text(FAST, encoding="utf-8")
    return f"--config.file={path}"


def series(text: str) -> dict[tuple[str, str], float]:
    return {(s.name, s.labels.get("gpu", "")): s.value for f in parse_text(text) for s in f.samples}


def test_the_daemon_serves_both_formats_gzip_and_a_name_filter(processes: Processes, nvml_environment, feeder) -> None:
    _, url = processes.start_exporter(*QUIET, environment=nvml_environment)
    text = fetch(f"{url}/metrics")
    assert text is not None
    assert series(text)["gpu_power_limit_watts", "0"] == 700.0
    assert ("process_resident_memory_bytes", "") in series(text)
    request = urllib.request.Request(
        f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert answer.headers["Content-Encoding"] == "gzip"
        names = {family.name for family in parse_openmetrics(gzip.decompress(answer.read()).decode())}
    assert "gpu_power_watts" in names
    assert series(text)["gpu_exporter_sample_interval_seconds", ""] == 1.0
    only = fetch(f"{url}/metrics?name[]=gpu_up&name[]=gpu_driver_up")
    assert only is not None
    assert {name for name, _ in series(only)} == {"gpu_up", "gpu_driver_up"}


def test_all_threads_allocate_from_one_arena(processes: Processes, nvml_environment, feeder) -> None:
    daemon, url = processes.start_exporter(*QUIET, environment=nvml_environment)
    assert (fetch(f"{url}/metrics") or "").count("gpu_up{") == 4  # each has its thread
    reserved = []
    for line in Path(f"/proc/{daemon.process.pid}/maps").read_text("ascii").splitlines():
        span, mode, _, _, inode, *_ = line.split()
        first, last = (int(at, 16) for at in span.split("-"))
        if (mode, inode) == ("---p", "0"):
            reserved.append((last - first) / 2**20)
    assert all(mib < 32 for mib in reserved), "glibc reserves 64 MiB for each arena but the first"


def test_promtool_accepts_a_live_page(processes: Processes, nvml_environment, feeder) -> None:
    require("promtool")
    _, url = processes.start_exporter(*QUIET, environment=nvml_environment)
    body = fetch(f"{url}/metrics")
    done = subprocess.run(["promtool", "check", "metrics"], input=body, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_daemon_serves_pages_for_people_and_probes(processes: Processes, nvml_environment, feeder) -> None:
    _, url = processes.start_exporter(*QUIET, environment=nvml_environment)
    page = fetch(f"{url}/")
    assert page is not None
    assert "NVIDIA H100 80GB HBM3" in page
    assert fetch(f"{url}/-/healthy") == "gpu-exporter is healthy\n"
    status = fetch(f"{url}/api/v1/status")
    assert status is not None
    assert len(json.loads(status)["gpus"]) == 4
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read() == b""
    connection.request("GET", "/nothing")
    assert connection.getresponse().status == 404
    connection.close()


def test_once_prints_the_metrics_and_health_of_a_running_daemon(
    processes: Processes, nvml_environment, nvml_table: NvmlTable, feeder, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    _, url = processes.start_exporter(*QUIET, f"--state.directory={state}", environment=nvml_environment)
    wait_for(lambda: series(fetch(f"{url}/metrics") or "").get(("gpu_busy_seconds_total", "0"), 0) > 0, "some history")
    done = run_exporter("--once", *QUIET, f"--state.directory={state}", environment=nvml_environment)
    assert series(done.stdout)["gpu_busy_seconds_total", "0"] > 0
    nvml_table.set_call(2, "*", "NVML_ERROR_GPU_IS_LOST")
    wait_for(lambda: series(fetch(f"{url}/metrics") or "").get(("gpu_up", "2")) == 0, "gpu 2 to be lost")
    done = run_exporter(
        "--once", "--format=openmetrics", *QUIET, f"--state.directory={state}", environment=nvml_environment
    )
    assert done.returncode == 4
    assert done.stdout.endswith("# EOF\n")


def test_once_finds_a_daemon_whose_metrics_have_another_path(
    processes: Processes, nvml_environment, feeder, tmp_path: Path
) -> None:
    state = f"--state.directory={tmp_path / 'state'}"
    _, url = processes.start_exporter(*QUIET, state, "--web.telemetry-path=/gpus", environment=nvml_environment)
    assert fetch(f"{url}/metrics") is None
    served = fetch(f"{url}/gpus")
    done = run_exporter(*QUIET, "--once", "--format=prometheus", state, environment=nvml_environment)
    assert "single reading" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert served is not None
    start = "process_start_time_seconds "
    assert next(line for line in done.stdout.splitlines() if line.startswith(start)) in served


def test_a_second_daemon_does_not_use_the_same_state_directory(
    processes: Processes, nvml_environment, feeder, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    processes.start_exporter(*QUIET, f"--state.directory={state}", environment=nvml_environment)
    done = run_exporter(
        *QUIET,
        f"--state.directory={state}",
        f"--web.listen-address=127.0.0.1:{free_port()}",
        environment=nvml_environment,
    )
    assert done.returncode == 2
    assert "another gpu-exporter uses this state directory: stop it, or set another --state.directory" in done.stderr


def test_an_error_names_a_port_in_use(processes: Processes, nvml_environment, feeder) -> None:
    _, url = processes.start_exporter(*QUIET, environment=nvml_environment)
    address = urlsplit(url).netloc
    done = run_exporter(*QUIET, "--state.directory=", f"--web.listen-address={address}", environment=nvml_environment)
    assert done.returncode == 2
    assert f"cannot listen on {address}: Address already in use" in done.stderr


def test_a_resident_textfile_stays_fresh_without_http(
    processes: Processes, nvml_environment, feeder, fast: str, tmp_path: Path
) -> None:
    output = tmp_path / "gpu.prom"
    flags = ["--state.directory=", f"--textfile.output={output}", "--textfile.interval=200ms", fast]
    # As often as this in the long run too: after a while, an exporter reads a GPU of a steady load less often.
    Path(fast.partition("=")[2]).write_text(
        FAST.replace("interval: 200ms,", "interval: 200ms, interval_max: 200ms,", 1)
    )
    running = processes.start([*GPU_EXPORTER, *QUIET, *flags], nvml_environment)
    wait_for(
        lambda: output.exists() and ("gpu_busy_seconds_total", "0") in series(output.read_text("utf-8")), "a textfile"
    )
    before = series(output.read_text("utf-8"))["gpu_observed_seconds_total", "0"]
    wait_for(lambda: series(output.read_text("utf-8"))["gpu_observed_seconds_total", "0"] > before, "a newer textfile")
    # The exporter samples every 100 ms, but a reader sees values that were written up to 200 ms ago.
    assert series(output.read_text("utf-8"))["gpu_exporter_sample_interval_seconds", ""] == 0.2
    assert running.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--collector.memry"], "unrecognized arguments: --collector.memry"),
        (["--format=xml"], "argument --format: invalid choice: 'xml'"),
        (["--web.listen-address=nonsense", "--state.directory="], "'nonsense' is not [host]:port"),
        (["--timeout=10"], "argument --timeout: '10' is not a duration"),
        (["reconcil"], "'reconcil' is not a command; did you mean reconcile?"),
        (
            ["reconcile", "--source.prometheus=http://127.0.0.1:1", "--alertmanager.url=http://a:bad"],
            "argument --alertmanager.url: expected http://HOST:PORT or https://HOST:PORT",
        ),
        (["--format=json"], "--output, --format and --check require --once"),
        (["--textfile.output=/tmp/x.txt"], "node_exporter reads only files named *.prom"),
        (["--web.telemetry-path=metrics"], "--web.telemetry-path metrics: must start with /"),
        (["--devices.replay=/nonexistent.csv"], "/nonexistent.csv: no such file"),
        (["reconcile", "--slurm.collector"], "--slurm.collector requires --web.listen-address"),
        (["reconcile", "--aply"], "unrecognized arguments: --aply"),
        (["reconcile", "--once"], "give either --source.prometheus or --source.exporter"),
        (
            ["reconcile", "--once", "--source.exporter=n:1", "--attribution.resource=gpu("],
            "--attribution.resource: not a regular expression: 'gpu(': missing )",
        ),
        (["demo", "--sped=3"], "unrecognized arguments: --sped;"),
        (["explain", "job/1", "--source.prometheus=http://p", "--at=2099-01-01T00:00:00Z"], "is in the future"),
        (["explain", "job/1", "--source.prometheus=http://p", "--at=2026-01-01"], "write 2026-01-01T00:00:00Z for UTC"),
        (
            ["explain", "job/1", "--source.prometheus=http://p", "--at=1h", "--pause.file=/p"],
            "only the latest pause is stored",
        ),
        (
            ["explain", "--source.prometheus=http://p"],
            "name a holder: NAMESPACE/POD, POD, job/ID, the UUID of its GPU, or NODE:INDEX",
        ),
        (["pause", "--for=1h"], "give --kubernetes.lease or --pause.file: the one that"),
        (["pause", "--pause.file=/p", "--for=1h", "--end"], "--for begins or prolongs a pause, and --end ends a pause"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_names_the_flag(flags: list[str], message: str) -> None:
    done = run_exporter(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_an_unknown_configuration_key_ends_with_status_2_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("sampling:\n  intervall: 2s\n", encoding="utf-8")
    for command in ([f"--config.file={path}"], ["check-config", str(path)], ["reconcile", f"--config.file={path}"]):
        done = run_exporter(*command)
        assert done.returncode == 2
        assert f"{path}:2: sampling.intervall: unknown key, did you mean interval?" in done.stderr


def test_a_repeatable_flag_takes_a_list_from_the_environment(tmp_path: Path) -> None:
    recordings = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"
    paths = "\n".join(str(recordings / f"{gpu}_update_freq_gpudata.csv.gz") for gpu in ("A100", "V100"))
    done = run_exporter(
        "--once",
        "--format=json",
        "--timeout=60s",
        "--state.directory=",
        *QUIET,
        environment={**os.environ, "GPU_EXPORTER_DEVICES_REPLAY": paths},
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["gpus"]) == 2


def test_a_daemon_reads_its_environment_variables(processes: Processes, nvml_environment, feeder) -> None:
    environment = {
        **nvml_environment,
        "GPU_EXPORTER_COLLECTOR_MEMORY": "false",
        "GPU_EXPORTER_WEB_TELEMETRY_PATH": "/m",
    }
    _, url = processes.start_exporter(*QUIET, environment=environment)
    values = series(fetch(f"{url}/m") or "")
    assert ("gpu_power_watts", "0") in values
    assert ("gpu_memory_used_bytes", "0") not in values
    done = run_exporter("--once", environment={**nvml_environment, "GPU_EXPORTER_LOG_FORMAT": "xml"})
    assert done.returncode == 2
    assert "environment variable GPU_EXPORTER_LOG_FORMAT: invalid choice: 'xml'" in done.stderr
