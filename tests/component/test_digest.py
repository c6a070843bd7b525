"""The digest of a real Prometheus with sixteen days of two tenants, compared with sums made by hand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.component.test_units import read_unit, run_confined
from tests.testbed.mail import start_relay
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
        for part, share in (("idle_long", 0.5), ("used", 0.3), ("unknown", 0.2)):
            put("allocation:gpu_share:part", f'{POD},node="n1",uuid="GPU-0",part="{part}"', at, share)
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
        put("tenant:gpu_cost:rate", f'{ADA},part="used"', at, 0)
        for replica in ("a", "b"):  # one took over from the other
            own = f'instance="{replica}",tenant="ml"'
            put("gpu_reconciler_spared_gpus", f'{own},reason="restarted"', at, 2)
            put("gpu_reconciler_idle_gpus", f'{own},exit="spared"', at, 2)
            put("gpu_reconciler_idle_gpus", f'{own},exit="marked"', at, 1)
    for at in range(end - 7 * 86400, end + 1, 60):
        put("tenant:gpu_gpus:rate5m", f'{ADA},part="used"', at, 1)
        put("tenant:gpu_gpus:rate5m", f'{ML},part="used"', at, 1)
        put("tenant:gpu_gpus:rate5m", f'{ML},part="idle"', at, 1 if at % 86400 < 43200 else 0.5)
        put("tenant:gpu_gpus:rate5m", f'{ML},part="unknown"', at, 0 if at % 86400 < 43200 else 0.5)
        for part, gpus in (("used", 3), ("free", 2), ("no_data", 1)):
            put("namespace:gpu_gpus:sum", f'name="NVIDIA H100 80GB HBM3",part="{part}"', at, gpus)
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
    ml, ada = data["members"]
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
    assert (holder["holder"], holder["team"]) == ("ml/train-0", "vision")
    assert (holder["idle_hours"], holder["held_hours"]) == (
        pytest.approx(36.0, rel=0.01),
        pytest.approx(72.0, rel=0.01),
    )
    assert (holder["unknown_hours"], holder["used_hours"]) == (pytest.approx(14.4, rel=0.01), None)
    assert [(each["tenant"], each["outcome"]) for each in data["long_idle"]] == [("ml", "restarted"), ("ml", "marked")]
    assert [each["hours"] for each in data["long_idle"]] == [
        pytest.approx(144.0, rel=0.01),
        pytest.approx(72.0, rel=0.01),
    ]
    assert (data["missing"], data["currency"]) == ([], "EUR")
    assert [each["name"] for each in data["sources"]] == ["gpu-exporter"]
    (capacity,) = data["capacity"]
    assert capacity["model"] == "NVIDIA H100 80GB HBM3"
    for name, gpus in (("present", 6), ("held", 3), ("free", 2)):
        assert capacity[f"{name}_hours"] == pytest.approx(gpus * week, rel=0.01), name
    hours = {datetime.fromisoformat(each["start"]): each for each in data["hours"]}
    assert len(hours) in (7 * 24, 7 * 24 - 1) and not any(each.minute for each in hours)
    # At the first hour the rules began, and at a border between two halves of a day the hour is whole.
    found = {
        (each.hour < 12, round(values["idle_hours"], 2), round(values["held_hours"], 2))
        for each, values in list(hours.items())[1:]
    }
    assert found == {(True, 1.0, 3.0), (False, 0.5, 3.0)}
    (over,) = data["oversized"]
    assert (over["holder"], over["team"], over["sufficient"]) == ("ml/train-0", "vision", "1g.10gb")
    assert (over["held_hours"], over["mean_ratio"]) == (pytest.approx(72.0, rel=0.01), pytest.approx(0.1))
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
    sentence = r"33% of the 50[34] GPU-hours held were idle: 16[78] GPU-hours, 28[78] of 7[12]\d EUR\. The 7d before: 0% of 50[34]\."
    assert re.search(sentence, text), text
    assert "GPUs idle or to be investigated, by hour of the week (UTC):" in text
    assert re.search(r"^No pod and no job held 33% of the 1,00\d GPU-hours present\.$", text, re.MULTILINE), text
    assert re.search(r"^NVIDIA H100 80GB HBM3 +1,00\d +50\d +33\d +33%$", text, re.MULTILINE), text
    assert re.search(r"^Idle most: ml 16[78] GPU-hours", text, re.MULTILINE), text
    assert re.search(r"^ml/train-0 +3[56]\.\d +7[12]\.\d +vision$", text, re.MULTILINE), text
    assert re.search(
        r"^ml/train-0 +1g\.10gb +7[12]\.\d +10% +4\.0 GiB +NVIDIA H100 80GB HBM3 +vision$", text, re.MULTILINE
    ), text
    assert re.search(r"^NAME +GPU-HOURS +OUTCOME\nml +14[345](\.\d)? +spared: restarted\n", text, re.MULTILINE), text
    for form in ("html", "mail"):
        page = digest(prometheus, f"--format={form}").stdout
        HTMLParser().feed(page)
        assert "<td" in page and "ml/train-0" in page and ("<svg" in page) == (form == "html")


def test_the_digest_by_user_has_a_row_for_each_user(prometheus: Prometheus) -> None:
    text = digest(prometheus, "--by=user", "--top=1").stdout
    names = [line.split("  ")[0] for line in text.partition("GPU-hours by user")[2].splitlines()[2:5]]
    assert names == ["(no user)", "1 other", "all"]
    rows = digest(prometheus, "--by=user", "--format=csv").stdout.splitlines()
    assert rows[0].startswith("start,end,cluster,user,held_hours,") and len(rows) == 3
    assert digest(prometheus, "--by=team").returncode == 2, "the counters of tenants have no team"


def test_a_digest_in_a_file_replaces_it_and_a_digest_without_data_leaves_it(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    file = tmp_path / "digest.html"
    file.write_text("old")
    done = digest(prometheus, f"--output={file}", '--source.matcher=job="other"')
    assert (done.returncode, file.read_text()) == (3, "old")
    done = digest(prometheus, f"--output={file}", "--format=html")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert file.read_text().startswith("<!doctype html>") and [each.name for each in tmp_path.iterdir()] == [
        "digest.html"
    ]
    done = digest(prometheus, f"--output={tmp_path}/missing/digest.html")
    assert done.returncode == 2 and "missing" in done.stderr and "Traceback" not in done.stderr


def test_a_digest_by_mail_is_no_output_and_an_incomplete_route_is_refused(prometheus: Prometheus) -> None:
    with start_relay() as relay:
        route = [f"--mail.smtp=127.0.0.1:{relay.port}", "--mail.from=gpus@example.org", "--mail.to=boss@example.org"]
        done = digest(prometheus, *route)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [mail.receivers for mail in relay.accepted] == [("boss@example.org",)]
    done = digest(prometheus, *route)
    assert done.returncode == 2 and f"mail to 127.0.0.1:{relay.port}: Connection refused" in done.stderr
    for each in route:
        done = digest(prometheus, each)
        assert done.returncode == 2 and "--mail.smtp, --mail.from and --mail.to are needed together" in done.stderr
    assert digest(prometheus, "--mail.to=no address").returncode == 2


def test_the_unit_of_the_digest_writes_its_page_and_no_other_path(prometheus: Prometheus) -> None:
    place = Path("/var/lib/gpu-exporter-digest")
    existed = place.exists()
    start = shlex.split(read_unit("gpu-exporter-digest")["ExecStart"])
    flags = [flag for flag in start[1:] if not flag.startswith("$")] + [f"--source.prometheus={prometheus.url}"]
    try:
        done = run_confined("gpu-exporter-digest", *flags)
        assert done.returncode == 0, done.stderr
        assert "ml/train-0" in (place / "digest.html").read_text("utf-8")
        done = run_confined("gpu-exporter-digest", *flags, "--output=/var/digest.html")
        assert (done.returncode, Path("/var/digest.html").exists()) == (2, False)
        assert "Read-only file system" in done.stderr
    finally:
        (place / "digest.html").unlink(missing_ok=True)
        if not existed:
            place.rmdir()


def test_an_empty_digest_says_why(prometheus: Prometheus) -> None:
    done = digest(prometheus, '--source.matcher=job="other"')
    assert (done.returncode, done.stdout) == (3, "")
    why = 'no GPU-hours in this period: no gpu-exporter series match {job="other"}: exporters '
    assert re.search(f"{re.escape(why)}(have series )?with ", done.stderr)  # their last series may be minutes old
    done = subprocess.run([*GPU_EXPORTER, "digest"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--source.prometheus is needed" in done.stderr
