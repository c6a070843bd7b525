"""The configuration of docs/opentelemetry.md in a real OpenTelemetry Collector, which sends OTLP to the test."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.testbed.faults import Rig
from tests.testbed.node import program
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import Processes, free_port, wait_for

pytestmark = pytest.mark.servers
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "opentelemetry.md").read_text("utf-8")
NO_RECORDED_VALUE = 1  # opentelemetry.proto.metrics.v1.DataPointFlags
CUMULATIVE = 2  # AggregationTemporality


class Row(NamedTuple):
    """One row of the page's table. `attributes`: in addition to those that identify the component."""

    ours: str
    theirs: str
    kind: str
    unit: str
    attributes: Mapping[str, str]


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        if match := re.fullmatch(r"\| `(gpu_\w+)` \| `(hw\.[\w.]+)` \| ([a-z-]+(?: counter)?), `(\S+)` \|(.*)\|", line):
            found.append(Row(*match.groups()[:4], dict(re.findall(r"([\w.]+)=(\w+)", match[5]))))
    return found


class Point(NamedTuple):
    """A data point: its metric's name, kind and unit, attributes, and its value, None with the flag for no
    recorded value."""

    name: str
    kind: str
    unit: str
    attributes: Mapping[str, str]
    value: float | None


def read_points(request: Mapping[str, Any]) -> Iterator[Point]:
    """The points of an ExportMetricsServiceRequest in JSON."""
    for resource in request["resourceMetrics"]:
        for scope in resource["scopeMetrics"]:
            for metric in scope["metrics"]:
                sums = metric.get("sum", {})
                kind = "gauge" if "gauge" in metric else "counter" if sums.get("isMonotonic") else "up-down counter"
                if sums and sums["aggregationTemporality"] != CUMULATIVE:
                    kind = f"not cumulative: {kind}"
                for point in (metric.get("gauge") or sums).get("dataPoints", ()):
                    attributes = {each["key"]: each["value"]["stringValue"] for each in point.get("attributes", ())}
                    absent = point.get("flags", 0) & NO_RECORDED_VALUE
                    value = None if absent else float(point.get("asDouble", 0.0))
                    yield Point(metric["name"], kind, metric.get("unit", ""), attributes, value)


class Backend:
    """Keeps the points of every request of OTLP over HTTP."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        backend = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                backend.points += read_points(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *arguments: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.close()


def start_collector(processes: Processes, directory: Path, exporter: str, backend: Backend) -> None:
    """The page's configuration with other addresses, a short interval, and JSON in place of protobuf."""
    (config,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for old, new in {
        "127.0.0.1:9836": exporter.removeprefix("http://"),
        "scrape_interval: 15s": "scrape_interval: 500ms",
        "http://127.0.0.1:4318": backend.url,
    }.items():
        assert config.count(old) == 1, old
        config = config.replace(old, new)
    (directory / "page.yaml").write_text(config, encoding="utf-8")
    (directory / "test.yaml").write_text(
        "exporters: {otlp_http: {encoding: json, compression: none}}\n"
        "processors: {transform: {error_mode: propagate}}\n"
        "service: {telemetry: {metrics: {level: none}}}\n",
        encoding="utf-8",
    )
    running = processes.start(
        [program("otelcol"), *(f"--config={directory / name}" for name in ("page.yaml", "test.yaml"))]
    )

    def has_sent() -> bool:
        assert running.process.poll() is None, running.log()
        return any(point.name == "hw.gpu.utilization" for point in backend.points)

    wait_for(has_sent, "the first points")


def test_a_collector_translates_the_series_as_the_page_says(
    nvml_table: NvmlTable, nvml_environment: dict[str, str], processes: Processes, tmp_path: Path, backend: Backend
) -> None:
    rig = Rig(nvml_table, nvml_environment, processes, tmp_path, 4)
    _, url = rig.start()
    for index in range(4):  # at the moment that the rig shows, the energy counter is 0
        with nvml_table.writing(index) as out:
            out.energy_mj = 5_000_000
    assert len(rows()) == 13
    seen = rig.wait_until(url, "every row", lambda seen: all(f"\n{row.ours}{{" in seen.text for row in rows()))
    published: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(seen.text):
        for sample in family.samples:
            published[sample.name].append((dict(sample.labels), sample.value))
    start_collector(processes, tmp_path, url, backend)
    points = list(backend.points)
    for row in rows():
        for labels, value in published[row.ours]:
            more = {"error.type": labels["severity"]} if "severity" in labels else dict(row.attributes)
            sensor = more.get("hw.sensor_location")
            wanted = more | {"hw.id": labels["uuid"], "hw.name": labels["gpu"], "hw.type": "gpu"}
            if sensor is not None:
                wanted |= {"hw.id": f"{labels['uuid']}/{sensor}", "hw.parent": labels["uuid"], "hw.type": "temperature"}
            found = [each for each in points if each.name == row.theirs and each.attributes == wanted]
            assert {(each.kind, each.unit) for each in found} == {(row.kind, row.unit)}, (row, wanted)
            if row.kind != "counter":  # a counter grows between the two scrapes
                assert value in [each.value for each in found], (row, value, found)
    names = {point.name for point in points}
    assert not names & {row.ours for row in rows()}, "left untranslated"
    assert {name for name in published if name.startswith("gpu_")} - {row.ours for row in rows()} <= names
    other = next(point for point in points if point.name == "gpu_idle_seconds_total")
    assert other.attributes.keys() == {"gpu", "uuid"}


def test_a_gpu_that_is_lost_gets_no_value(
    nvml_table: NvmlTable, nvml_environment: dict[str, str], processes: Processes, tmp_path: Path, backend: Backend
) -> None:
    rig = Rig(nvml_table, nvml_environment, processes, tmp_path, 4)
    _, url = rig.start()
    rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    start_collector(processes, tmp_path, url, backend)
    lost = nvml_table.table.devices[3].uuid.decode()

    def of_lost(name: str) -> list[float | None]:
        return [each.value for each in backend.points if each.name == name and each.attributes.get("hw.id") == lost]

    wait_for(lambda: of_lost("hw.status")[-1:] == [1.0], "the status")
    rig.table.set_call(3, "*", "NVML_ERROR_GPU_IS_LOST")
    wait_for(lambda: of_lost("hw.status")[-1:] == [0.0], "the lost GPU")
    for name in ("hw.gpu.utilization", "hw.power", "hw.gpu.memory.usage"):
        wait_for(lambda name=name: of_lost(name)[-1:] == [None], f"the end of {name}")
        values = of_lost(name)
        assert set(values[values.index(None) :]) == {None}, values
    end = len(backend.points)
    wait_for(lambda: [each.name for each in backend.points[end:]].count("hw.status") >= 12, "three more scrapes")
    gauges = [each for each in backend.points[end:] if each.kind == "gauge" and lost in each.attributes.values()]
    assert not [each for each in gauges if each.value is not None and each.name.startswith("hw.")], gauges
