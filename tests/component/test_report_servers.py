"""`gpu-exporter report` on servers with small limits: the same report in more queries, or a clear error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reports.history.asking import History, WindowSpan
from tests.testbed.history import HOUR, Cluster
from tests.testbed.history_series import Dcgm, dcgm, kube_state
from tests.testbed.history_servers import prometheus, write_blocks
from tests.testbed.history_worlds import END, fill
from tests.testbed.processes import Processes, fetch, run_exporter
from tests.testbed.servers import Prometheus
from tests.testbed.site_series import Site

pytestmark = pytest.mark.servers
DAY = WindowSpan(END - 24 * HOUR, END, HOUR)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Blocks of a day of three nodes."""
    directory = tmp_path_factory.mktemp("history")
    cluster = Cluster(DAY.start, DAY.end)
    nodes = [cluster.node(f"n{n}") for n in range(3)]
    fill(cluster, ([unit] for node in nodes for unit in node.units), 1)
    write_blocks(directory, dcgm(cluster, Dcgm()), kube_state(cluster))
    yield directory


def report(url: str) -> tuple[int, str, str]:
    done = run_exporter(
        "report", f"--source.prometheus={url}", "--since=24h", "--until=2025-06-02T00:00Z", "--format=json",
        "--no-trend", "--rest=0",
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def queries(printed: str) -> int:
    return int(re.findall(r"(\d+) queries", printed)[-1])


def test_a_server_that_loads_few_samples_gives_the_same_report(history: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        free = report(prometheus(processes, history).url)
    with Processes(tmp_path) as processes:
        small = Prometheus(processes, history, {}, flags=["--query.max-samples=2000"])
        asked = report(small.url)
    assert (free[0], asked[0]) == (Exit.DONE, Exit.DONE), asked[2]
    assert asked[1] == free[1]
    assert json.loads(free[1])["total"]["idle_hours"] > 0.0
    assert queries(asked[2]) > 2 * queries(free[2])


def test_the_estimate_is_about_pods_that_follow_each_other(tmp_path: Path) -> None:
    """An hour has 15 pods on each of eight GPUs."""
    site = Site(24)
    for number in range(8):
        for turn in range(15 * 24):
            site.gpu("n1", number, f"{number}-{turn}", start=turn / 15, end=(turn + 1) / 15 - 30 / HOUR)
    write_blocks(tmp_path, site.lines)
    with Processes(tmp_path) as processes:
        code, _, err = report(prometheus(processes, tmp_path).url)
    assert code == Exit.DONE
    found = re.search(r"up to 8 series each and (\d+) new series an hour; expect 2s", err)
    assert found is not None, err
    assert 110 <= int(found[1]) <= 130


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--query.max-samples=10", "query processing would load too many samples into memory in query execution"),
        ("--query.timeout=1ms", "query timed out in expression evaluation|context deadline exceeded"),
    ],
)
def test_a_server_that_refuses_one_window_is_a_clear_error(
    flag: str, reason: str, history: Path, tmp_path: Path
) -> None:
    with Processes(tmp_path) as processes:
        code, out, err = report(Prometheus(processes, history, {}, flags=[flag]).url)
    assert (code, out) == (Exit.NO_DATA, "")
    assert re.search(reason, err)
    assert re.search("The report cannot ask for less than .*: raise the limits of the server", err)


def test_notes_of_prometheus_3_are_harmless_and_its_warnings_are_not(history: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = prometheus(processes, history, "prometheus-3")
        asking = History(parse_address(server.url), fetch_text)
        style = "increase(DCGM_FI_DEV_GPU_UTIL[1h])"
        raw = json.loads(
            fetch(f"{server.url}/api/v1/query_range?query={style}&start={END - HOUR}&end={END}&step=3600") or ""
        )
        assert raw["infos"][0].startswith("PromQL info: metric might not be a counter")
        assert asking.ask_tables({"x": style}, DAY)["x"]
        with pytest.raises(AnswerError, match="the answer is partial"):
            asking.ask_tables({"x": "quantile_over_time(2, DCGM_FI_DEV_GPU_UTIL[1h])"}, DAY)
