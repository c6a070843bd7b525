"""The history of a simulated cluster in real servers: their counts of samples are the GPU-hours of the truth."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed.history import HOUR, Cluster, Gap, Holder, Key, bursts, idle, used
from tests.testbed.history_series import Dcgm, dcgm, kube_state
from tests.testbed.history_servers import VictoriaMetrics, prometheus, write_blocks
from tests.testbed.history_worlds import END
from tests.testbed.processes import Processes, fetch

pytestmark = pytest.mark.servers

MODEL = "NVIDIA H100 80GB HBM3"
START = END - 30 * HOUR
ENGINE = 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{exported_pod="train-0"}'
Server = Callable[[Processes, Path, Cluster], str]


def cluster() -> Cluster:
    """Two pods one after the other with the same name, on two GPUs; the scrapes of their node fail for an hour."""
    made = Cluster(START, END)
    node = made.node("n1")
    node.gaps += [Gap(START + 3 * HOUR, START + 4 * HOUR), Gap(START + 20 * HOUR, START + 20.5 * HOUR, failed=False)]
    node.resets.append(START + 15 * HOUR)
    end = made.hold(
        Holder("train-0", "ml"), node.units[:2], START + HOUR, used(5 * HOUR), idle(4 * HOUR), bursts(2 * HOUR)
    )
    made.hold(Holder("train-0", "ml", number=1), node.units[:2], end + HOUR, idle(8 * HOUR), used(HOUR, 0.05))
    return made


def of_blocks(program: str) -> Server:
    def start(processes: Processes, directory: Path, made: Cluster) -> str:
        write_blocks(directory, dcgm(made), kube_state(made))
        return prometheus(processes, directory, program).url

    return start


def victoria(processes: Processes, directory: Path, made: Cluster) -> str:
    return VictoriaMetrics(processes, directory, dcgm(made), kube_state(made)).url


@pytest.mark.parametrize(
    "server", [of_blocks("prometheus"), of_blocks("prometheus-3"), victoria], ids=["2.42", "3", "victoria-metrics"]
)
def test_counts_of_samples_are_the_hours_of_the_truth(server: Server, tmp_path: Path) -> None:
    made = cluster()
    total = made.truth().total(Key("", "ml", "train-0", MODEL))
    with Processes(tmp_path) as processes:
        url = server(processes, tmp_path, made)

        def ask(query: str, at: float = END) -> float | None:
            text = fetch(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query, 'time': at})}")
            rows = json.loads(text or "")["data"]["result"]
            return float(rows[0]["value"][1]) if rows else None

        def hours(query: str) -> float:
            return (ask(f"sum({query})") or 0.0) * made.step / HOUR

        assert hours(f"count_over_time({ENGINE}[30h])") == pytest.approx(total.held - total.unseen, abs=0.01)
        assert hours(f"count_over_time(({ENGINE} <= 0.001)[30h:30s])") == pytest.approx(
            total.idle + 2,
            abs=0.2,  # bursts rest between every other two samples
        )
        worked = hours(f"sum_over_time({ENGINE}[30h])")
        assert worked == pytest.approx(2 * (4 * 0.8 + 2 * 0.09 + 0.05), rel=0.01)
        # A marker ends a series at once; a failed scrape too.
        ended = START + 12 * HOUR
        assert ask(f"count({ENGINE})", ended - 60) == 2
        assert ask(f"count({ENGINE})", ended + 60) is None
        assert ask(f"count({ENGINE})", START + 3 * HOUR + 60) is None
        assert ask('up{job="nvidia-dcgm-exporter"}', START + 3 * HOUR + 60) == 0
        assert ask("sum(kube_pod_container_resource_requests)", ended - 60) == 2
        joules = ask('increase(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="7"}[30h])') or 0.0
        assert joules / 1000 == pytest.approx(70 * 28.5 * 3600, rel=0.1)  # a free GPU rests at 70 W


def test_two_clusters_with_the_same_names_are_apart_by_their_label(tmp_path: Path) -> None:
    made = [cluster(), cluster()]
    for each, name in zip(made, ("east", "west"), strict=True):
        each.name = name
    write_blocks(tmp_path, *(dcgm(each, Dcgm(holders="honoured")) for each in made))
    with Processes(tmp_path) as processes:
        server = prometheus(processes, tmp_path)
        rows = server.query('sum by (cluster) (count_over_time(DCGM_FI_DEV_GPU_UTIL{pod="train-0"}[30h]))', END)
    total = cluster().truth().total()
    samples = pytest.approx((total.held - total.unseen) * HOUR / made[0].step, abs=4)
    assert {labels["cluster"]: value for labels, value in rows} == {"east": samples, "west": samples}
