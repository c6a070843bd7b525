"""A collector's files and pages: which a node accepts, and how rounds go on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.attribution.slurm_quiet_node import Node, start_slurmd
from tests.unit.cluster.collector_bench import Cluster, pictures

from gpu_exporter.agent.attribution import registry
from gpu_exporter.agent.attribution.slurm.collected import AGE_MAX_S, AHEAD_MAX_S, ANSWERS
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord
from gpu_exporter.agent.attribution.slurm.picture import Picture, parse_picture, render_picture
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.collector import CollectorRun, SlurmCollector
from gpu_exporter.agent.slurm_collector.command_line import CommandLine
from gpu_exporter.agent.slurm_collector.site import CollectorSite
from gpu_exporter.common.web.request import Request, parse_head
from gpu_exporter.common.web.server import Reply


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(AGE_MAX_S + 1, "s old; check that"), (-AHEAD_MAX_S - 1, "in the future: check that the clocks")],
)
def test_a_file_with_a_time_too_old_or_too_far_ahead_is_refused(cluster: Cluster, seconds: float, reason: str) -> None:
    assert cluster.round()
    cluster.clock.advance(seconds)
    with pytest.raises(SourceError, match=reason):
        cluster.source().poll()


def test_files_are_refused_if_other_users_may_write_in_the_directory(cluster: Cluster) -> None:
    assert cluster.round()
    path = cluster.directory / "n0.json"
    cluster.source().poll()
    path.chmod(0o666)
    with pytest.raises(SourceError, match="other users can write to it"):
        cluster.source().poll()
    path.chmod(0o644)
    cluster.directory.chmod(0o777)
    with pytest.raises(SourceError, match="other users can write to it"):
        cluster.source().poll()
    cluster.directory.chmod(0o755)
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))
    with pytest.raises(SourceError, match="links are not followed"):
        cluster.source().poll()


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")
def test_files_of_another_users_collector_are_accepted_in_that_users_directory(cluster: Cluster) -> None:
    assert cluster.round()
    os.chown(cluster.directory, 65534, 65534)
    os.chown(cluster.directory / "n0.json", 65534, 65534)
    cluster.source().poll()
    os.chown(cluster.directory / "n0.json", 1234, 1234)
    with pytest.raises(SourceError, match="other users can write to it"):
        cluster.source().poll()


@pytest.mark.parametrize(("private", "mode"), [("none", 0o644), ("jobs", 0o640), ("users", 0o640), ("accounts", 0o644)])
def test_files_are_not_world_readable_if_slurm_hides_jobs_or_users(cluster: Cluster, private: str, mode: int) -> None:
    cluster.private = private
    assert cluster.round()
    assert (cluster.directory / "n0.json").stat().st_mode & 0o777 == mode


def test_hidden_jobs_are_not_served_without_a_password(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    run = CollectorRun(SlurmCollector(CommandLine(cluster.run), cluster.clock, 90.0), cluster.directory, cluster.clock)
    is_open = True
    run.is_open = lambda: is_open
    site = CollectorSite(run)

    def status() -> int:
        reply = site.answer_at_once(parse_head(f"GET {ANSWERS}n0 HTTP/1.1\r\nHost: x\r\n\r\n".encode()))
        assert reply is not None
        return reply.status

    assert run()
    assert status() == 200
    cluster.private = "users"
    assert not run()
    assert run.answers == {}
    assert status() == 403
    assert "set basic_auth_users or client_auth_type in --web.config.file" in caplog.text
    is_open = False  # a password was set, and the next reload applies it
    assert status() == 200
    is_open = True  # a reload without the password takes effect at once, not only in the next round
    assert status() == 403


def test_a_round_without_an_answer_keeps_the_files_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert cluster.round()
    before = (cluster.directory / "n0.json").read_text()
    cluster.fault = "slurmctld is away"
    assert [cluster.round() for _ in range(3)] == [False] * 3
    assert (cluster.directory / "n0.json").read_text() == before
    cluster.fault = ""
    assert cluster.round()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Slurm answers",
        "the nodes get no new answers",
        "Slurm answers",
    ]


def test_a_collector_that_withholds_every_answer_has_no_success(cluster: Cluster) -> None:
    """An alert reads the time of the last success, and the port answers 403 to every node."""
    collector = SlurmCollector(CommandLine(cluster.run), cluster.clock, 90.0)
    port = CollectorRun(collector, None, cluster.clock)
    port.is_open = lambda: True
    cluster.private = "jobs"
    assert not port()
    assert port.last_success_wall is None
    both = CollectorRun(collector, cluster.directory, cluster.clock)
    both.is_open = lambda: True
    assert not both()
    assert both.last_success_wall == cluster.clock.wall(), "the files are readable"
    cluster.private = "none"
    assert port()
    assert port.last_success_wall == cluster.clock.wall()


def test_a_collector_of_a_cluster_without_gpus_has_no_success(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.used = {}
    assert not cluster.round()
    assert cluster.round.last_success_wall is None
    assert "no node has GPUs in slurm.conf (Gres=)" in caplog.text


def test_a_collector_inside_another_site_serves_only_its_answers(cluster: Cluster) -> None:
    other = Reply(200, "text/plain", b"another's")

    class Host:
        def answer_at_once(self, request: Request) -> Reply | None:
            return other if request.path != "/metrics" else None

        def answer(self, request: Request) -> Reply:
            return other

    cluster.round()
    site = CollectorSite(cluster.round, Host())
    asked = {path: Request("GET", path, "", {}, keeps=True) for path in ("/-/ready", "/metrics", "/", f"{ANSWERS}n0")}
    found = {path: site.answer_at_once(request) or site.answer(request) for path, request in asked.items()}
    assert found.pop(f"{ANSWERS}n0").body.decode() == cluster.round.answers["n0"]
    assert set(found.values()) == {other}


def test_a_collector_serves_answers_metrics_and_probes(cluster: Cluster) -> None:
    site = CollectorSite(cluster.round)

    def get(path: str) -> tuple[int, str]:
        request = Request("GET", path, "", {}, keeps=True)
        reply = site.answer_at_once(request) or site.answer(request)
        return reply.status, reply.body.decode()

    assert get("/-/ready") == (503, "no round has had an answer for a node yet\n")
    assert "\ngpu_slurm_collector_last_success" not in get("/metrics")[1]
    cluster.fault = "slurmctld is away"
    cluster.round()
    assert get("/-/healthy")[0] == 200, "a restart would not bring slurmctld back"
    cluster.fault = ""
    cluster.round()
    assert get("/-/ready")[0] == 200
    assert get(f"{ANSWERS}n0") == (200, cluster.round.answers["n0"])
    assert [get(path)[0] for path in (f"{ANSWERS}n9", f"{ANSWERS}../n0", ANSWERS, "/")] == [404] * 4
    metrics = get("/metrics")[1].splitlines()
    (success,) = (line for line in metrics if line.startswith("gpu_slurm_collector_last_success"))
    assert float(success.split()[1]) == cluster.clock.wall()
    assert [line for line in metrics if line.startswith("gpu_slurm_collector_rounds_total")] == [
        'gpu_slurm_collector_rounds_total{result="success"} 1.0',
        'gpu_slurm_collector_rounds_total{result="error"} 1.0',
    ]


def test_private_data_counts_from_the_next_round_in_both_directions(cluster: Cluster) -> None:
    node = cluster.source()
    hidden = []
    for cluster.private in ("none", "users", "users", "none"):
        assert cluster.round()
        hidden.append(node.poll().hides_users)
        cluster.clock.advance(90.0)
    assert hidden == [False, True, True, False]
    assert set(Counter(text for text in cluster.asked if "listpids" not in text).values()) == {4}


def test_a_node_waits_for_an_answer_that_is_newer_than_its_slurmd(cluster: Cluster, tmp_path: Path) -> None:
    """A reconfigure restarts slurmd, while the collector's last answer has the old PrivateData. The node needs no request
    otherwise, because its prolog writes files.
    """
    (tmp_path / "host").mkdir()
    (tmp_path / "jobs").mkdir(mode=0o755)
    host = Node(tmp_path / "host")
    start_slurmd(host, 700, 1_700_000_100)
    assert cluster.round()
    node = cluster.source(job_files=tmp_path / "jobs", procfs=host.directory / "proc")
    node.poll()
    cluster.private = "users"
    (host.directory / "proc" / "700" / "stat").unlink()
    start_slurmd(host, 701, 1_700_000_900)
    cluster.clock.advance(5.0)
    hidden = []
    for poll in range(24):
        hidden.append(node.poll().hides_users)
        if poll == 17:
            assert cluster.round()
        cluster.clock.advance(5.0)
    assert not any(hidden[:18]) and all(hidden[-5:])


@pytest.mark.parametrize("node", ["../n0", "n0/..", "", ".n0", "n0\n", "a" * 300])
def test_an_invalid_node_name_is_refused(cluster: Cluster, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_slurm_node", lambda *_: True)
    if not node:
        monkeypatch.setenv("SLURMD_NODENAME", "../n0")
    with pytest.raises(ValueError, match="is not a valid NodeName"):
        cluster.source(node)


@given(pictures)
def test_a_written_answer_is_read_back_unchanged(picture: Picture) -> None:
    assert parse_picture(render_picture(picture)) == picture
    assert render_picture(picture).isascii()


@given(pictures, st.data())
def test_any_other_content_of_the_file_is_an_error(picture: Picture, data: st.DataObject) -> None:
    whole = json.loads(render_picture(picture))

    def spoil(value: Any) -> Any:
        if isinstance(value, dict) and value:
            key = data.draw(st.sampled_from(sorted(value)))
            return {**value, key: spoil(value[key])}
        if isinstance(value, list) and value:
            place = data.draw(st.integers(0, len(value) - 1))
            return [*value[:place], spoil(value[place]), *value[place + 1 :]]
        return data.draw(st.sampled_from([None, {}, [[]], float("nan"), "x", -1, [7]]))

    with contextlib.suppress(
        ValueError
    ):  # without an error the changed part does not matter, such as another valid number
        assert isinstance(parse_picture(json.dumps(spoil(whole))), Picture)


@pytest.mark.parametrize(("key", "value"), [("schema", 2), ("asked", float("nan")), ("interval", float("inf"))])
def test_an_answer_of_another_version_or_of_no_time_is_an_error(cluster: Cluster, key: str, value: float) -> None:
    assert cluster.round()
    path = cluster.directory / "n0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(SourceError, match="run the same version|is not a number"):
        cluster.source().poll()


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"schema": 2}', "[" * 100_000, '{"schema": 1}'])
def test_a_text_that_no_collector_writes_is_an_error(cluster: Cluster, text: str) -> None:
    (cluster.directory / "n0.json").write_text(text)
    with pytest.raises(SourceError, match=r"n0\.json: "):
        cluster.source().poll()


@pytest.mark.parametrize("name", ["../n9", "..", "a/../../n9", "n 9", ".n9", "n" * 300, ""])
def test_no_file_is_written_for_an_impossible_node_name(cluster: Cluster, name: str) -> None:
    """The server at slurmrestd's address must not choose where a root process writes."""

    class Asked(CommandLine):
        def read_nodes(self) -> dict[str, NodeRecord]:
            record = super().read_nodes()["n0"]
            return {"n0": record, name: record}

    collector = SlurmCollector(Asked(cluster.run), cluster.clock, 90.0)
    assert CollectorRun(collector, cluster.directory, cluster.clock)()
    assert [path.name for path in cluster.directory.parent.rglob("*.json")] == ["n0.json"]
