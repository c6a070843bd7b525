"""What commands say about a real Prometheus that has no series of the exporters, too few, or not yet enough."""

from __future__ import annotations

import http.server
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.processes import Processes, free_port, run_exporter, wait_for
from tests.testbed.servers import Prometheus, require, write_history

pytestmark = pytest.mark.servers
BUILD = 'gpu_exporter_build_info{version="1"} 1\n'
HELD = 'gpu_allocation_info{gpu="0",uuid="GPU-0",scheduler="slurm",job_id="7"} 1\n'
PLACES = ("--no-slurm", "--no-kubernetes")


class Page:
    """A scrape target whose text the test sets; it can be closed and opened again at the same port."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.port = free_port()
        self._server: http.server.ThreadingHTTPServer | None = None
        self.open()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def open(self) -> None:
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(page.text.encode())

            def log_message(self, format: str, *arguments: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def pages() -> Iterator[list[Page]]:
    made: list[Page] = []
    yield made
    for page in made:
        page.close()


def ask(server: Prometheus, *command: str) -> tuple[int, str]:
    """The exit code, and all that the command printed."""
    done = run_exporter(*command, f"--source.prometheus={server.url}", *(PLACES if command[0] != "digest" else ()))
    return done.returncode, done.stdout + done.stderr


def test_never_there_down_and_gone_are_told_apart(processes: Processes, tmp_path: Path, pages: list[Page]) -> None:
    """One server from its first minute to the end of its exporters, asked by every command that reads Prometheus."""
    pages += [Page(""), Page("")]
    first, second = pages
    server = Prometheus(processes, tmp_path / "a", {"n1": first.address, "n2": second.address})
    wait_for(lambda: len(server.query("up == 1")) == 2, "two scrapes")
    for command in (("reconcile", "--once"), ("explain", "job/7"), ("digest",)):
        code, said = ask(server, *command)
        assert (code, "up is 1" in said, "none had a series of gpu-exporter in the last 7d: n1, n2. " in said) == (
            3,
            True,
            True,
        ), said
    first.text = second.text = BUILD
    wait_for(lambda: len(server.query("gpu_exporter_build_info")) == 2, "series of two exporters")
    code, said = ask(server, "reconcile", "--once")
    assert code == 0, said
    assert "no exporter reports a holder, because no exporter has a source of holders" in said
    # f: since when it watches, and when the answer is complete
    young = re.search(
        r"has series of the exporters only since (\S+ \S+Z), for \w+\. A holder .* complete from (\S+ \S+Z) on", said
    )
    assert young is not None, said
    first.text += HELD
    wait_for(lambda: bool(server.query("gpu_allocation_info")), "a holder")
    assert "no exporter reports a holder" not in ask(server, "reconcile", "--once")[1]
    # one of two targets is down: exporters are seen, and the other one is named
    wait_for(lambda: len(server.query("count_over_time(gpu_exporter_build_info[1m]) > 6")) == 2, "a step of 5 s")
    second.close()
    wait_for(lambda: len(server.query("up == 0")) == 1, "a failed scrape")
    code, said = ask(server, "reconcile", "--once")
    assert (code, "1 target does not answer (up is 0): n2, so its GPUs may be missing" in said) == (0, True), said
    # b: all of them are down
    first.close()
    wait_for(lambda: len(server.query("up == 0")) == 2, "failed scrapes")
    for command in (("reconcile", "--once"), ("explain", "job/7")):
        code, said = ask(server, *command)
        assert code == 3, said
        assert "2 targets do not answer (up is 0): n1" in said
        assert re.search(
            r"the last series ended at \d{4}-\d\d-\d\d \d\d:\d\dZ, \w+ ago\. Check that gpu-exporter runs", said
        ), said


def labels(**values: object) -> str:
    return ",".join(f'{name}="{value}"' for name, value in values.items())


def start_with(processes: Processes, directory: Path, series: dict[str, range]) -> Prometheus:
    """A Prometheus without targets that has these series, each with samples at these moments."""
    require("prometheus", "promtool")
    directory.mkdir()
    write_history(directory, sorted(f"{name} 1 {at}" for name, moments in series.items() for at in moments))
    return Prometheus(processes, directory, {}, scrape_configs=[{"job_name": "none"}])


def minutes(first: float, last: float) -> range:
    """Every 15 s from so many minutes ago to so many minutes ago."""
    now = int(time.time())
    return range(now - round(first * 60), now - round(last * 60) + 1, 15)


def test_exporters_of_another_label_are_named_with_the_matcher_that_selects_them(
    processes: Processes, tmp_path: Path
) -> None:
    """Two clusters; seven jobs of exporters in one of them, and none in the cluster that is selected."""
    held = {
        f"gpu_exporter_build_info{{{labels(job=f'gpu-{n}', cluster='east', node='n')}}}": minutes(20, 0)
        for n in range(7)
    }
    held[f"gpu_exporter_build_info{{{labels(job='gpu-exporter', cluster='north')}}}"] = minutes(220, 200)
    server = start_with(processes, tmp_path / "a", held)
    for command in (("reconcile", "--once"), ("explain", "job/7"), ("digest",)):
        code, said = ask(server, *command, '--source.matcher=cluster="west"')
        assert code == 3, said
        assert 'no gpu-exporter series match {cluster="west"}: exporters have series with cluster="east". ' in said
        assert said.rstrip().endswith(
            "Select the right exporters, for example with --source.matcher='cluster=\"east\"'"
        ), said
    code, said = ask(server, "reconcile", "--once", '--source.matcher=job="x",cluster=~"ea.*"')
    assert len(re.findall(r'job="gpu-\d",cluster="east"; ', said)) == 5, said
    assert "and others. Select the right exporters, for example with --source.matcher='job=\"gpu-" in said
    # This cluster had exporters three hours ago, so the exporters of another one are no reason to doubt the matcher.
    code, said = ask(server, "reconcile", "--once", '--source.matcher=cluster="north"')
    assert re.search(
        r"the last series ended at \S+ \S+Z, 3h\w* ago, and Prometheus now has no target of these exporters", said
    ), said


def test_an_exporter_that_is_gone_and_other_exporters_are_told_apart_from_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    build = f"gpu_exporter_build_info{{{labels(job='gpu-exporter', node='n1', instance='n1')}}}"
    held = (
        f"gpu_allocation_info{{{labels(job='gpu-exporter', node='n1', uuid='GPU-0', scheduler='slurm', job_id='7')}}}"
    )
    other = {f"DCGM_FI_DEV_GPU_UTIL{{{labels(job='dcgm', gpu=n)}}}": minutes(20, 0) for n in range(3)}
    server = start_with(processes, tmp_path / "gone", {build: minutes(400, 300), held: minutes(400, 300), **other})
    code, said = ask(server, "explain", "job/7")
    assert (code, "the last series ended at " in said, "--show-labels" in said) == (3, True, True), said
    code, said = ask(server, "explain", "job/8", "--at=320m")
    assert (code, "no such holder in the evidence" in said) == (2, True), said
    server.running.stop()
    server = start_with(processes, tmp_path / "others", other)
    for command in (("reconcile", "--once"), ("digest",)):
        code, said = ask(server, *command)
        assert (
            code,
            "only series of other exporters: 3 \N{MULTIPLICATION SIGN} DCGM_FI_DEV_GPU_UTIL of dcgm-exporter" in said,
        ) == (3, True), said
    server.running.stop()
    server = start_with(processes, tmp_path / "never", {"unrelated{}": minutes(20, 0)})
    for command in (("reconcile", "--once"), ("explain", "ml/a"), ("digest",)):
        code, said = ask(server, *command)
        assert (
            code,
            "Prometheus has had no such series in the last 7d, and has no target that matches" in said,
        ) == (3, True), said
        assert "often `release`: kubectl get podmonitors,servicemonitors -A" in said


def test_a_holder_that_has_ended_is_named_with_the_time_at_which_it_can_be_explained(
    processes: Processes, tmp_path: Path
) -> None:
    place = labels(job="gpu-exporter", node="n1", instance="n1")
    held = f"gpu_allocation_info{{{place},{labels(gpu=0, uuid='GPU-0', scheduler='slurm', job_id='7')}}}"
    series = {f"gpu_exporter_build_info{{{place}}}": minutes(90, 0), held: minutes(90, 40)}
    server = start_with(processes, tmp_path / "a", series)
    code, said = ask(server, "explain", "job/7")
    found = re.search(r"it last held a GPU at .*: (--at=\S+Z); ", said)
    assert (code, found is not None) == (2, True), said
    code, said = ask(server, "explain", "job/7", found[1] if found else "")
    assert (code, said.startswith("job 7: ")) == (0, True), said
    assert "has series of the exporters only since" not in ask(server, "reconcile", "--once")[1], (
        "90 minutes are enough"
    )
