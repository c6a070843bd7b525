"""No output contains arguments, names or environments of users' processes. The test plants secrets and searches for them."""

from __future__ import annotations

import gzip
import os
import shutil
import urllib.request
from pathlib import Path

import pytest

from tests.component.test_processes import DOCKER, POD
from tests.testbed.process_node import Node, job, states
from tests.testbed.processes import wait_for

SECRET = "hunter2"
ENVIRONMENT = {**os.environ, "API_TOKEN": f"{SECRET}-environment", f"{SECRET}-name": "1"}
RUN = 'cd "$1" && exec -a "--password={SECRET}-argument" "./$2" 600'.replace("{SECRET}", SECRET)
FORMS = ("prometheus", "openmetrics", "json", "table", "holders")
PAGES = ("/metrics", "/api/v1/status", "/api/v1/table", "/api/v1/holders", "/")


@pytest.mark.parametrize("places", ["cgroups"], indirect=True)
def test_no_output_contains_secrets_of_a_users_process(node: Node, tmp_path: Path) -> None:
    home, state = tmp_path / f"{SECRET}-home", tmp_path / "state"
    home.mkdir()
    program = shutil.copy(shutil.which("sleep") or "", home / f"{SECRET}-comm")
    command = ["bash", "-c", RUN, "bash", str(home), Path(program).name]
    pids = [node.start_process(path, command, ENVIRONMENT) for path in (job(42), job(43), POD, DOCKER)]
    for pid in pids:
        seen = [Path(f"/proc/{pid}/{name}") for name in ("environ", "cmdline", "comm")]
        wait_for(lambda seen=seen: all(SECRET.encode() in path.read_bytes() for path in seen), "what is planted")
        assert SECRET in str(Path(f"/proc/{pid}/exe").readlink())
    node.list_on(0, *pids[:2])  # the holder's process, and a job's process that contradicts the holder
    node.list_on(1, *pids[2:])  # a pod and a container that hold nothing
    node.hold({"uuid": node.uuids[0], "job": "42", "gpus": 1})
    url = node.start("--log.level=debug", f"--state.directory={state}")
    wait_for(lambda: "job 43" in states(url).get("42", ("", ""))[1], "the contradiction")

    outputs = {path: read(url + path) for path in PAGES}
    outputs["openmetrics"] = read(url + "/metrics", "application/openmetrics-text")
    for form in FORMS:
        done = node.once(f"--format={form}", "--log.level=debug", *node.flags())
        outputs[f"--once {form}"] = (done.stdout + done.stderr).encode()
    assert node.once(f"--output={tmp_path / 'gpu.prom'}", *node.flags()).returncode == 0
    recording = tmp_path / "node.rec.gz"
    assert node.run("record", str(recording), "--duration=2s", "--log.level=debug").returncode == 0
    outputs["record"] = gzip.decompress(recording.read_bytes())
    assert node.running is not None
    node.running.stop()  # this writes the state once more
    outputs["log"] = node.log().encode()
    outputs["textfile"] = (tmp_path / "gpu.prom").read_bytes()
    files = [path for path in state.rglob("*") if path.is_file() and path.name != "lock"]
    assert files
    outputs |= {path.name: path.read_bytes() for path in files}
    for name, text in outputs.items():
        assert len(text) > 40, f"{name} says nothing"
        assert SECRET.encode() not in text, name
    assert b"job 43" in outputs["log"]


def read(url: str, accept: str = "*/*") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        return bytes(answer.read())
