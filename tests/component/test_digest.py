"""The digest of a real Prometheus with sixteen days of two tenants, compared with sums made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.testbed.processes import GPU_EXPORTER, Processes
from tests.testbed.servers import Prometheus, require

pytestmark = pytest.mark.servers

STEP_S = 300
DAYS = 16
PLACE = 'job="gpu-exporter",node="{node}",instance="{node}"'
ML = 'scheduler="kubernetes",namespace="ml"'
ADA = 'scheduler="slurm",account="phys",user="ada"'
BOB = 'scheduler="slurm",account="chem",user="bob"'
MOVED_S = 12 * 3600  # from then on, n3's exporter has another address
POD = 'scheduler="kubernetes",namespace="ml",pod="train-0"'


def write_history(path: Path, end: int) -> None:
    """ml holds two GPUs on two nodes, always known, and idle for half of the last seven days. ada holds one GPU."""
    families: dict[str, list[str]] = {}

    def put(name: str, labels: str, at: int, value: float) -> None:
        families.setdefault(name, []).append(f"{name}{{{labels}}} {value} {at}")

    begin = end - DAYS * 86400
    for tenant, nodes, idle_from in ((ML, ("n1", "n2"), end - 7 * 86400), (ADA, ("n1",), end)):
        for node in nodes:
            labels = f"{PLACE.format(node=node)},{tenant}"
            for at in range(begin, end + 1, STEP_S):
                held = float(at - begin)
                idle = max(0.0, (at - idle_from) / 2)
                put("gpu_tenant_held_gpu_seconds_total", labels, at, held)
                put("gpu_tenant_known_gpu_seconds_total", labels, at, held)
                put("gpu_tenant_busy_gpu_seconds_total", labels, at, (held - idle) / 2)
                put("gpu_tenant_idle_gpu_seconds_total", labels, at, idle)
                put("gpu_tenant_energy_joules_total", labels, at, 360.0 * held)
    for at in range(begin, end + 1, STEP_S):
        for job, is_there in (("a", at < end - MOVED_S), ("b", at >= end - MOVED_S)):
            if is_there:
                put(
                    "gpu_tenant_held_gpu_seconds_total", f'job="moved",node="n3",instance="{job}",{BOB}', at, at - begin
                )
        for number in (1, 2, 3):
            put("gpu_tenant_held_gpu_seconds_total", f'job="twice",node="n4",instance="{number}",{BOB}', at, at - begin)
            put("gpu_tenant_held_gpu_seconds_total", f'job="nameless",instance="{number}",{BOB}', at, at - begin)
        put("gpu_tenant_held_gpu_seconds_total", f'job="twice",node="n5",instance="1",{BOB}', at, at - begin)
        put("gpu_tenant_held_gpu_seconds_total", f'job="enforced",node="n6",{BOB}', at, at - begin)
        put("gpu_up", 'job="enforced",node="n6",uuid="GPU-6",namespace="monitoring"', at, 1)
        for job in ("gpu-exporter", "moved", "twice", "nameless", "enforced"):
            put("gpu_exporter_build_info", f'job="{job}",instance="1"', at, 1)
    for at in range(end - 3 * 86400, end + 1, 60):
        put("allocation:gpu_share:part", f'{POD},node="n1",uuid="GPU-0",part="idle_long"', at, 0.5)
        put("allocation:owner:info", f'{POD},team="vision"', at, 1)
        for pod, memory in (("train-0", 4 * 1024**3), ("train-1", 40 * 1024**3)):
            key = f'scheduler="kubernetes",namespace="ml",pod="{pod}",node="n1",uuid="GPU-0"'
            put("allocation:gpu_observed_seconds:increase30m", key, at, 1800)
            put("allocation:gpu_busy_seconds:increase30m", key, at, 180)
            put("allocation:gpu_memory_used_bytes:max30m", key, at, memory)
            put("allocation:gpu_share:ratio", key, at, 1)
        put("unit:gpu_model:info", 'node="n1",uuid="GPU-0",name="NVIDIA H100 80GB HBM3"', at, 1)
        put("model:gpu_price:per_hour", 'currency="EUR"', at, 5)
        put("tenant:gpu_cost:rate", f'{ML},part="idle"', at, 4)
        put("tenant:gpu_cost:rate", f'{ML},part="used"', at, 6)
    for at in range(end - 7 * 86400, end + 1, 60):
        put("tenant:gpu_gpus:rate5m", f'{ADA},part="used"', at, 1)
        put("tenant:gpu_gpus:rate5m", f'{ML},part="used"', at, 2)
    with path.open("w", encoding="utf-8") as out:
        for name in sorted(families):
            out.writelines(f"{row}\n" for row in sorted(families[name]))
        out.write("# EOF\n")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    require("prometheus", "promtool")
    directory = tmp_path_factory.mktemp("digest")
    write_history(directory / "history.txt", int(time.time()))
    source = [str(directory / "history.txt"), str(directory / "data")]
    subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", *source], check=True, capture_output=True)
    with Processes(directory) as processes:
        yield Prometheus(processes, directory, {}, flags=["--storage.tsdb.retention.time=60d"])


def digest(prometheus: Prometheus, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*GPU_EXPORTER, "digest", f"--source.prometheus={prometheus.url}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_hours_costs_and_holders_match_the_history(prometheus: Prometheus) -> None:
    done = digest(prometheus, "--format=json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    ml, ada = data["tenants"]
    assert (ml["namespace"], ada["account"], ada["user"]) == ("ml", "phys", "ada")
    week = 7 * 24.0
    assert ml["held_hours"] == pytest.approx(2 * week, rel=0.01)
    assert ml["idle_hours"] == pytest.approx(week, rel=0.01)
    assert ml["busy_hours"] == pytest.approx(week / 2, rel=0.01)
    assert ml["energy_kwh"] == pytest.approx(2 * week * 0.36, rel=0.01)
    assert ml["cost_idle"] == pytest.approx(3 * 24 * 4, rel=0.01)
    assert ml["cost"] == pytest.approx(3 * 24 * 10, rel=0.01)
    assert (ada["held_hours"], ada["idle_hours"]) == (pytest.approx(week, rel=0.01), pytest.approx(0.0, abs=0.5))
    assert data["before"]["held_hours"] == pytest.approx(3 * week, rel=0.01)
    assert data["before"]["idle_hours"] == pytest.approx(0.0, abs=0.5)
    assert [day["held_hours"] for day in data["days"]] == [pytest.approx(72.0, rel=0.02)] * 7
    (holder,) = data["holders"]
    assert (holder["title"], holder["owner"]) == ("ml/train-0", "vision")
    assert holder["idle_hours"] == pytest.approx(36.0, rel=0.01)
    assert (data["missing"], data["currency"]) == ([], "EUR")
    (over,) = data["oversized"]
    assert (over["title"], over["owner"], over["would_do"]) == ("ml/train-0", "vision", "1g.10gb")
    assert (over["hours"], over["mean_ratio"]) == (pytest.approx(72.0, rel=0.01), pytest.approx(0.1))
    assert over["peak_memory_bytes"] == 4 * 1024**3


def test_a_shorter_period_is_computed_separately_from_a_longer_one(prometheus: Prometheus) -> None:
    data = json.loads(digest(prometheus, "--format=json", "--since=36h").stdout)
    assert data["total"]["held_hours"] == pytest.approx(3 * 36.0, rel=0.02)
    assert [round(day["held_hours"]) for day in data["days"]] == [36, 72]


def test_an_exporter_that_moved_loses_no_hours(prometheus: Prometheus) -> None:
    done = digest(prometheus, "--format=json", "--since=3d", '--source.matcher=job="moved"')
    data = json.loads(done.stdout)
    # The time between the last sample at the old address and the first at the new one is unknown.
    assert data["total"]["held_hours"] == pytest.approx(72.0, abs=0.3)
    assert not any("several targets" in each for each in data["missing"])
    assert data["holders"] is None, "the rules recorded no hour of this job"


def test_an_exporter_that_is_scraped_three_times_counts_once_with_a_warning(prometheus: Prometheus) -> None:
    done = digest(prometheus, "--format=json", "--since=3d", '--source.matcher=job="twice"')
    data = json.loads(done.stdout)
    assert data["total"]["held_hours"] == pytest.approx(2 * 72.0, rel=0.01)
    assert [each for each in data["missing"] if each.startswith("possibly some hours of n4: several targets")]


def test_nodes_without_a_name_are_not_merged(prometheus: Prometheus) -> None:
    done = digest(prometheus, "--format=json", "--since=3d", '--source.matcher=job="nameless"')
    data = json.loads(done.stdout)
    assert data["total"]["held_hours"] == pytest.approx(3 * 72.0, rel=0.01)
    assert not any("several targets" in each for each in data["missing"])
    assert [each for each in data["missing"] if "lack the label node" in each]


def test_without_a_matcher_the_digest_reads_every_series(prometheus: Prometheus) -> None:
    done = digest(prometheus, "--format=json", "--source.matcher=")
    assert (done.returncode, "namespace" in done.stderr) == (3, True), "one job's namespace is enforced"


def test_hours_under_an_enforced_namespace_are_refused(prometheus: Prometheus) -> None:
    done = digest(prometheus, '--source.matcher=job="enforced"')
    assert (done.returncode, done.stdout) == (3, "")
    assert "the series gpu_up have the label `namespace`" in done.stderr


def test_the_digest_as_text_is_readable(prometheus: Prometheus) -> None:
    text = digest(prometheus).stdout
    # The window begins between two samples, and costs are counted by the minute, so a number may be lower by one.
    sentence = (
        r"33% of the 50[34] GPU-hours held were idle \(16[78], cost 28[78] EUR\); the period before: 0% of 50[34]"
    )
    assert re.search(sentence, text), text
    assert re.search(r"ml/train-0  vision +3[56]\.\d", text), text
    assert re.search(r"ml/train-0 +vision +7[12]\.\d +10% +4\.0 GiB +1g\.10gb", text), text
    page = digest(prometheus, "--format=html").stdout
    HTMLParser().feed(page)
    assert "<td" in page
    assert "ml/train-0" in page


def test_an_empty_digest_says_why(prometheus: Prometheus) -> None:
    done = digest(prometheus, '--source.matcher=job="other"')
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        'no GPU-hours in this period: no gpu-exporter series match {job="other"}: exporters have series' in done.stderr
    )
    done = subprocess.run([*GPU_EXPORTER, "digest"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--source.prometheus is needed" in done.stderr
