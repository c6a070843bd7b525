"""A whole report from the answers of a small server: what it names beside its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.fetch import FetchError
from gpu_exporter.reports.history.asking import WindowSpan
from gpu_exporter.reports.usage.gather import parts
from gpu_exporter.reports.usage.render.view import ReportView
from gpu_exporter.reports.usage.run import Progress, Wish, run_report

HOUR = 3600
END = 1_795_132_800.0  # 2026-11-20T00:00Z
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"
REQUESTS = "kube_pod_container_resource_requests"


def gpu(number: int, model: str, **labels: str) -> dict[str, str]:
    given = {"UUID": f"GPU-{number}", "modelName": model, "job": "dcgm", "instance": "n1:9400", "Hostname": "n1"}
    return {**given, "exported_namespace": "ml", "exported_pod": f"train-{number}", **labels}


class Server:
    """Has dcgm-exporter with these GPUs, each half used, and recordings of prices by their labels.

    `refuses`: it refuses queries with this text. Otherwise, kube-state-metrics has no pod.
    """

    def __init__(
        self,
        gpus: Sequence[Mapping[str, str]],
        prices: Sequence[tuple[Mapping[str, str], float]] = (),
        refuses: str = "",
    ) -> None:
        self._gpus, self._prices, self._refuses = gpus, prices, refuses
        self.asked: list[str] = []

    def __call__(self, _address: Address, form: Mapping[str, str] | None, _most: int, _within: float) -> str:
        assert form is not None
        query, start, end, step = form["query"], *(int(form[name]) for name in ("start", "end", "step"))
        self.asked.append(query)
        if self._refuses and self._refuses in query:
            raise FetchError("http://x: HTTP status 422: execution: duplicate series", 422)
        rows = [
            {"metric": labels, "values": [[at, str(value)] for at in range(start, end + 1, step)]}
            for labels, value in self._select(query)
        ]
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}})

    def _select(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        if "gpu_price" in query:
            return list(self._prices)
        if query.startswith("count by (__name__)"):
            if self._refuses and REQUESTS in query:
                return [({"__name__": REQUESTS}, 1)]
            return [({"__name__": UTILIZATION}, len(self._gpus))] if UTILIZATION in query else []
        if query.startswith(f"count_over_time({UTILIZATION}{{"):
            return [(labels, 120.0) for labels in self._gpus]
        if "count_over_time(up" in query or "sum_over_time(up" in query:
            target = {name: text for name, text in self._gpus[0].items() if name in ("job", "instance")}
            return [(target, 20.0 if "599999ms" in query else 3600.0 if "* 30" in query else 120.0)]
        if UTILIZATION in query and query.startswith(("min", "max", "avg")):
            return [(labels, 50.0) for labels in self._gpus]
        return []


def report(server: Server, path: Path, *prices: tuple[str, float]) -> dict[str, Any]:
    wish = Wish(6.0 * HOUR, END, "", 0.001, prices, "", Alerts(), 0.0, False, None)
    assert run_report(parse_address("http://x"), server, wish, ReportView(), "json", path / "out") == 0
    read: dict[str, Any] = json.loads((path / "out").read_text("utf-8"))
    return read


def test_a_series_that_cannot_be_read_is_named_beside_the_hours_of_the_others(tmp_path: Path) -> None:
    odd = gpu(2, H100, hpc_job="9" * 10_000)
    read = report(Server([gpu(0, H100), odd, gpu(1, H100)]), tmp_path)
    assert read["total"]["held_hours"] == 12.0
    assert read["left_out"] == ["1 series that cannot be read: its label hpc_job has more than 8,000 characters"]


def test_a_report_without_data_names_the_series_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server([gpu(2, H100, hpc_job="9" * 10_000)])
    wish = Wish(6.0 * HOUR, END, "", 0.001, (), "", Alerts(), 0.0, False, None)
    assert run_report(parse_address("http://x"), server, wish, ReportView(), "json", tmp_path / "out") == 3
    assert "left out: 1 series that cannot be read: its label hpc_job" in capsys.readouterr().err


def test_a_price_of_a_model_that_no_gpu_has_is_named_beside_the_money(tmp_path: Path) -> None:
    server = Server([gpu(0, H100), gpu(1, L4)])
    read = report(server, tmp_path, ("", 2.0), ("NVIDIA H100", 4.0))
    assert read["total"]["cost"] == 24.0
    assert read["missing"] == [f"the price of 'NVIDIA H100': no GPU has this model; the models are '{H100}', '{L4}'"]
    assert not any("gpu_price" in query for query in server.asked)


def test_a_model_without_a_recorded_price_is_named(tmp_path: Path) -> None:
    server = Server([gpu(0, H100), gpu(1, L4)], [({"name": H100, "currency": "EUR"}, 3.0)])
    read = report(server, tmp_path)
    assert (read["total"]["cost"], read["currency"]) == (None, "EUR")
    assert [text.partition(":")[0] for text in read["missing"]] == [f"money for 6.0 GPU-hours of '{L4}'"]


@pytest.mark.parametrize(
    ("refuses", "covers", "lost"),
    [
        ("kube_node_status_allocatable|kube_pod", "nothing: it is not used", "requests, owners and teams of pods"),
        ("count(kube_pod_container_resource_requests", "nothing: it is not used", "requests, owners and teams of pods"),
        ("count_over_time(kube_pod", "nothing: it is not used", "requests, owners and teams of pods"),
        ("kube_node_status_allocatable{resource=", "nothing: it is not used", "requests, owners and teams of pods"),
        ("kube_pod_owner", "requests, owners and teams of pods", "owners and teams of pods"),
    ],
)
def test_a_source_that_is_refused_is_named_and_the_report_comes(
    refuses: str, covers: str, lost: str, tmp_path: Path
) -> None:
    read = report(Server([gpu(0, H100)], refuses=refuses), tmp_path)
    assert read["total"]["held_hours"] == 6.0
    (source,) = [each for each in read["sources"] if each["name"] == "kube-state-metrics"]
    assert source["covers"] == covers
    assert source["cannot"] == [f"{lost}: the query failed: http://x: HTTP status 422: execution: duplicate series"]


def test_a_refused_query_about_the_gpus_ends_the_report(tmp_path: Path) -> None:
    server = Server([gpu(0, H100)], refuses=f"min_over_time({UTILIZATION}")
    wish = Wish(6.0 * HOUR, END, "", 0.001, (), "", Alerts(), 0.0, False, None)
    assert run_report(parse_address("http://x"), server, wish, ReportView(), "json", tmp_path / "out") == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("series", "new", "hours", "text"),
    [
        (64, 0.0, [24], "reading 1 days or parts of days, up to 64 series each; expect 1s"),
        (
            64,
            960.0,
            [12, 12],
            "reading 2 days or parts of days, up to 64 series each and 960 new series an hour; expect 13s",
        ),
        (3000, 0.0, [12, 12], "reading 2 days or parts of days, up to 3,000 series each; expect 13s"),
        (3000, 45_000.0, [1] * 24, "up to 3,000 series each and 45,000 new series an hour; expect 9m24s"),
        (0, 0.0, [24], "expect 0s"),
    ],
)
def test_the_estimate_counts_the_series_of_short_pods(
    series: int, new: float, hours: list[int], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 GPUs with pods of four minutes took 17 s of two cores in a day, and pods that last took 1 s."""
    days = list(parts(WindowSpan(END - 24 * HOUR, END, HOUR), series, new))
    assert [(day.end - day.start) / HOUR for day in days] == hours
    Progress().begin(days, series, new)
    assert text in capsys.readouterr().err
