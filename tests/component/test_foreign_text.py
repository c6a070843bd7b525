"""Text of servers, commands and files reaches a terminal and a log only as short lines without control characters."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from gpu_exporter.common.model.rows import Row
from tests.testbed.peers import STATUS, Peer, Raw, plain, serve
from tests.testbed.pki import Authority
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.testbed.statuses import status_of

pytestmark = pytest.mark.slow
ESCAPES = "\x1b]0;own\x07\x1b[31m\x9b2J\u202egpj\u2066\x7f\x00"
LONG = "A" * 64_000
HOSTILE = ESCAPES + LONG
MOST = 12_000  # bytes of one program's output: a screen or two
LINE_MOST = 2_800  # a row of `top`: six names of 256, a reason of 120 and an advice of 1024 characters


def answers(status: str, body: str, *headers: str) -> Raw:
    return lambda _: plain(status, body, *headers)


def rows(*labels: dict[str, str]) -> str:
    found = [{"metric": each, "value": [time.time(), "7"]} for each in labels]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": found}})


ROW = Row(HOSTILE, HOSTILE, *[1.0] * 4, HOSTILE, HOSTILE, 1.0, 1.0, HOSTILE, HOSTILE, None, 1.0, 1.0, HOSTILE, HOSTILE)
LABELS = {
    **dict.fromkeys(("namespace", "account", "user", "node", "instance", "cause", "pool", "name", "uuid"), HOSTILE),
    "pod": HOSTILE,
    "scheduler": "kubernetes",
}
ANSWERS: dict[str, Raw] = {
    "status line": lambda _: f"HTTP/1.1 {HOSTILE}\r\n\r\n".encode(),
    "status line with CR": lambda _: f"HTTP/1.1 {ESCAPES}\r{ESCAPES} x\r\n\r\n".encode(),
    "status line without HTTP": lambda _: (ESCAPES + "A" * 60_000 + "\r\n\r\n").encode(),
    "version": lambda _: f"HTTP/9.{ESCAPES} 200 OK\r\n\r\n".encode(),
    "reason": answers(f"500 {ESCAPES}{LONG[:60_000]}", "x"),
    "header": answers("200 OK", "{}", f"X-{ESCAPES}: {ESCAPES}{LONG[:60_000]}"),
    "many headers": answers("200 OK", "{}", *[f"X-{i}: {ESCAPES}" for i in range(1000)]),
    "length": answers("200 OK", "{}", f"Content-Length: {ESCAPES}"),
    "chunks": lambda _: f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{ESCAPES}\r\n{HOSTILE}".encode(),
    "redirect": answers("302 Found", "", f"Location: /{ESCAPES}{LONG[:60_000]}"),
    "redirect elsewhere": answers("302 Found", "", f"Location: http://{ESCAPES}@127.0.0.2/{LONG[:60_000]}"),
    "authentication": answers("401 No", HOSTILE, f"WWW-Authenticate: {ESCAPES}"),
    "error of PromQL": answers("422 Bad", json.dumps({"status": "error", "error": HOSTILE})),
    "error in success": answers("200 OK", json.dumps({"status": "error", "error": HOSTILE})),
    "kind": answers("200 OK", json.dumps({"status": "success", "data": {"resultType": HOSTILE, "result": []}})),
    "body": answers("200 OK", HOSTILE),
    "schema": answers("200 OK", json.dumps({"schema": HOSTILE})),
    "labels": answers("200 OK", rows(LABELS)),
    "two clusters": answers("200 OK", rows({"cluster": HOSTILE}, {"cluster": f"b{HOSTILE}"})),
    "renamed labels": answers("200 OK", rows({"exported_pod": HOSTILE, "pod": HOSTILE})),
    "rows of top": answers("200 OK", json.dumps(status_of([ROW, *[ROW._replace(gpu="0")] * 2]))),
    "errors of top": answers(
        "200 OK",
        json.dumps({**STATUS, "driver_up": False, "driver_error": HOSTILE, "attribution": [{"source": HOSTILE, "error": HOSTILE}]}),
    ),
    "page": answers("200 OK", f'gpu_allocation_info{{pod="{HOSTILE}",namespace="x",exported_pod="a"}} 1\n'),
    "API server": answers("403 No", json.dumps({"kind": "Status", "message": HOSTILE, "details": {"name": HOSTILE}})),
    "API server in words": answers("500 No", HOSTILE),
    "note of a pause": answers(
        "200 OK",
        json.dumps({"metadata": {"annotations": {"gpu-exporter.io/pause-until": HOSTILE, "gpu-exporter.io/pause-reason": HOSTILE}}}),
    ),
    "nodes": answers("200 OK", json.dumps({"nodes": [{"name": HOSTILE}, {"name": "n0", "gres": HOSTILE}], "jobs": [{"job_id": HOSTILE}]})),
}  # fmt: skip


def programs(server: str, folder: Path) -> list[list[str]]:
    config = folder / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                "clusters": [{"name": "x", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "x", "user": {}}],
            }
        )
    )
    scenario = folder / "scenario.yaml"
    scenario.write_text("gpus: [{model: H100}]\n")
    token = folder / "token"
    token.write_text("a.eyJzdW4iOiAic2x1cm0ifQ.b")  # of the user slurm
    here = [
        f"--devices.scenario={scenario}",
        "--state.directory=",
        "--attribution.slurm",
        "--attribution.slurm.node=n0",
    ]
    return [
        ["digest", f"--source.prometheus={server}"],
        ["reconcile", "--once", f"--source.prometheus={server}", "--log.level=debug"],
        ["reconcile", "--once", f"--source.exporter={server}", "--log.level=debug"],
        ["explain", "GPU-1", f"--source.prometheus={server}"],
        ["top", "--once", f"--from={server}"],
        ["holders", *here, f"--attribution.slurm.collected={server}"],
        [
            "slurm-collector",
            "--once",
            f"--directory={folder}",
            f"--slurmrestd={server}",
            f"--slurmrestd.token-file={token}",
        ],
        ["pause", "--kubernetes.lease=ml/a", f"--kubernetes.kubeconfig={config}"],
    ]


def check(said: bytes, what: str) -> None:
    assert len(said) <= MOST, f"{what}: {len(said)} bytes: {said[:300]!r}"
    for line in said.decode().split("\n"):
        assert line.isprintable(), f"{what}: {line[:500]!r}"
        assert len(line) <= LINE_MOST, f"{what}: {len(line)} characters: {line[:300]!r}"


def run_all(server: str, folder: Path, what: str, *, chosen: Callable[[list[str]], bool] = lambda _: True) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPU_EXPORTER_")}
    started = [
        (
            flags,
            subprocess.Popen(
                [*GPU_EXPORTER, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ),
        )
        for flags in programs(server, folder)
        if chosen(flags)
    ]
    for flags, process in started:
        said, _ = process.communicate(timeout=120)
        check(said, f"{what}: {' '.join(flags[:3])}")
        assert said and b"Traceback" not in said, f"{what}: {flags}: {said[-2000:]!r}"


@pytest.mark.parametrize("what", ANSWERS)
def test_no_program_prints_raw_or_long_text_of_a_server(what: str, tmp_path: Path) -> None:
    with serve(Peer(raw=ANSWERS[what])) as peer:
        run_all(f"http://{peer.place}", tmp_path, what)
        assert len(peer.seen) > 8, "every program has asked"


@contextmanager
def hostile_certificate(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A certificate with a hostile subject and issuer that is valid for no address."""
    authority = Authority(folder)
    authority._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ESCAPES.replace("\x00", ""))])
    names = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, ESCAPES.replace("\x00", "")) for _ in range(500)]
    key = authority.write_key("server")
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(key.read_bytes(), None)
    certificate = folder / "server.crt"
    certificate.write_bytes(authority._sign(authority._build(x509.Name(names), private.public_key())))  # type: ignore[arg-type]
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    yield certificate, key


def test_no_program_prints_the_names_in_a_certificate(tmp_path: Path) -> None:
    with hostile_certificate(tmp_path) as pair, serve(Peer(), pair) as peer:
        run_all(f"https://{peer.place}", tmp_path, "certificate", chosen=lambda flags: flags[0] != "pause")


def test_no_program_prints_raw_text_of_slurms_commands(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "said").write_text(HOSTILE)
    for name in ("squeue", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("gpus: [{model: H100}]\n")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GPU_EXPORTER_ATTRIBUTION_SLURM": "true"}
    for flags in (
        ["slurm-collector", "--once", f"--directory={tmp_path}", "--log.level=debug"],
        ["holders", f"--devices.scenario={scenario}", "--state.directory=", "--attribution.slurm.node=n0"],
    ):
        command = [*GPU_EXPORTER, *flags]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        check(done.stdout, flags[0])
        assert b"ended with status 1" in done.stdout, done.stdout


def test_pages_and_logs_of_a_daemon_have_no_raw_text_of_its_collector(processes: Processes, tmp_path: Path) -> None:
    """`/metrics` contains names as its format requires."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("gpus: [{model: H100}]\n")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serve(Peer(raw=ANSWERS["status line"])) as peer:
        collected = f"--attribution.slurm.collected=http://{peer.place}"
        here = [f"--devices.scenario={scenario}", "--state.directory=", f"--web.listen-address=127.0.0.1:{port}"]
        slurm = ["--attribution.slurm", "--attribution.slurm.node=n0", collected, "--log.level=debug"]
        running = processes.start([*GPU_EXPORTER, *here, *slurm])
        wait_for(lambda: peer.place in (fetch(f"{url}/api/v1/status") or "") or None, "the error of the source")
        for path in ("/api/v1/status", "/api/v1/holders", "/api/v1/table"):
            text: Any = fetch(url + path)
            assert "127.0.0.1" in text and LONG not in text
            assert all(line.isprintable() for line in text.split("\n")), path
        page = fetch(url) or ""
        assert "held_idle" in page or "unknown" in page
        assert LONG not in page and not any(sign in page for sign in ESCAPES if not sign.isprintable())
    assert running.stop() == 0
    check(running.log().encode(), "the log")
