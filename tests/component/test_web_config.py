"""TLS, client certificates and passwords: a real Prometheus scrapes agent and reconciler, the reconciler asks the agent."""

from __future__ import annotations

import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import bcrypt
import pytest
import yaml

from tests.testbed.pages import is_served
from tests.testbed.pki import Authority
from tests.testbed.processes import GPU_EXPORTER, Processes, free_port, wait_for
from tests.testbed.servers import Prometheus

pytestmark = pytest.mark.servers
PASSWORD = "correct horse"


def write_config(path: Path, **tls: str) -> Path:
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    config = {"tls_server_config": tls, "basic_auth_users": {"prometheus": hashed}}
    path.write_text(yaml.safe_dump(config))
    return path


def ask(url: str, authority: Authority, certificate: tuple[Path, Path] | None, password: str = PASSWORD) -> int:
    """The status, 0 if TLS fails."""
    context = ssl.create_default_context(cafile=authority.certificate)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, url, "prometheus", password)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), urllib.request.HTTPBasicAuthHandler(passwords)
    )
    try:
        with opener.open(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return 0


def serial(port: int, authority: Authority, certificate: tuple[Path, Path]) -> str | None:
    """The serial number of the server's certificate. None if the server ends the connection, as it does at a reload."""
    context = ssl.create_default_context(cafile=authority.certificate)
    context.load_cert_chain(*certificate)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            found = tls.getpeercert()
    except OSError:
        return None
    assert found
    return str(found["serialNumber"])


def test_a_port_requires_client_certificates_and_passwords(processes: Processes, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    authority.issue("server", "agent")
    client = authority.issue("client", "prometheus")
    config = write_config(
        tmp_path / "web.yaml",
        cert_file="pki/server.crt",
        key_file="pki/server.key",
        client_auth_type="RequireAndVerifyClientCert",
        client_ca_file="pki/ca.crt",
    )
    (tmp_path / "scenario.yaml").write_text("gpus: [{model: T4}]\n")
    agent, reconciler = free_port(), free_port()
    flag = f"--web.config.file={config}"
    scenario = f"--devices.scenario={tmp_path / 'scenario.yaml'}"
    running = processes.start(
        [*GPU_EXPORTER, flag, scenario, "--state.directory=", f"--web.listen-address=127.0.0.1:{agent}"]
    )
    named = f"https://prometheus:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{agent}"
    source = [f"--source.tls.ca={authority.certificate}"]
    certificate = [f"--source.tls.cert={client[0]}", f"--source.tls.key={client[1]}"]
    dry_run = processes.start(
        [*GPU_EXPORTER, "reconcile", *source, *certificate, flag, f"--web.listen-address=127.0.0.1:{reconciler}"],
        {**os.environ, "GPU_EXPORTER_RECONCILE_SOURCE_EXPORTER": named},
    )
    for port in (agent, reconciler):
        url = f"https://127.0.0.1:{port}/metrics"
        wait_for(lambda url=url: ask(url, authority, client) == 200 or None, url)
        assert ask(url, authority, client, "wrong") == 401
        assert ask(url, authority, None) == 0
        assert ask(url, authority, stranger.issue("client", "prometheus")) == 0
        assert ask(url.replace("https", "http"), authority, client) == 0
        assert ask(url.replace("/metrics", "/-/healthy"), authority, client, "wrong") == 200
    prometheus = Prometheus(
        processes,
        tmp_path / "prometheus",
        {},
        scrape_configs=[
            {
                "job_name": "gpu-exporter",
                "scheme": "https",
                "tls_config": {
                    "ca_file": str(authority.certificate),
                    "cert_file": str(client[0]),
                    "key_file": str(client[1]),
                },
                "basic_auth": {"username": "prometheus", "password": PASSWORD},
                "static_configs": [{"targets": [f"127.0.0.1:{agent}", f"127.0.0.1:{reconciler}"]}],
            }
        ],
    )
    wait_for(lambda: len(prometheus.query("up == 1")) == 2 or None, "both ports to be scraped")
    wait_for(lambda: prometheus.query("gpu_reconciler_last_success_timestamp_seconds > 0") or None, "a whole cycle")
    assert PASSWORD.split()[0] not in dry_run.log()
    before = wait_for(lambda: serial(agent, authority, client), "the certificate")
    authority.issue("server", "agent")
    wait_for(lambda: serial(agent, authority, client) not in (before, None), "the new certificate")
    config.write_text("tls_server_config: {cert_file: nowhere, key_file: nowhere}\n")
    wait_for(lambda: "the previous certificates and passwords remain in use" in running.log() or None, "the complaint")
    assert ask(f"https://127.0.0.1:{agent}/metrics", authority, client) == 200
    now = time.time()
    wait_for(lambda: len(prometheus.query(f"timestamp(up == 1) > {now}")) == 2 or None, "scrapes after all that")


def test_the_reconciler_uses_a_rotated_password_without_a_restart(processes: Processes, tmp_path: Path) -> None:
    config = write_config(tmp_path / "web.yaml")
    (tmp_path / "scenario.yaml").write_text("gpus: [{model: T4}]\n")
    port, own = free_port(), free_port()
    scenario = f"--devices.scenario={tmp_path / 'scenario.yaml'}"
    listen = f"--web.listen-address=127.0.0.1:{port}"
    processes.start([*GPU_EXPORTER, f"--web.config.file={config}", scenario, "--state.directory=", listen])
    wait_for(lambda: is_served(f"http://127.0.0.1:{port}/-/ready", ""), "the agent")
    password = tmp_path / "password"
    password.write_text("wrong\n")
    command = ["reconcile", f"--source.exporter=http://127.0.0.1:{port}", "--no-kubernetes", "--no-slurm"]
    user = ["--source.basic-auth.username=prometheus", f"--source.basic-auth.password-file={password}"]
    running = processes.start(
        [*GPU_EXPORTER, *command, *user, "--interval=1s", f"--web.listen-address=127.0.0.1:{own}"]
    )
    wait_for(lambda: "HTTP status 401" in running.log() or None, "the refusal")
    page, sample = f"http://127.0.0.1:{own}/metrics", "\ngpu_reconciler_last_success_timestamp_seconds "
    assert is_served(page, "\ngpu_reconciler_cycles_total ") and not is_served(page, sample)
    password.write_text(f"{PASSWORD}\n")
    wait_for(lambda: is_served(page, sample), "a cycle with the new password")
    assert PASSWORD not in running.log()


def test_the_dry_run_reads_an_exporter_by_tls_and_reports_tls_errors(processes: Processes, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    authority.issue("server", "agent")
    config = tmp_path / "web.yaml"
    config.write_text("tls_server_config: {cert_file: pki/server.crt, key_file: pki/server.key}\n")
    (tmp_path / "scenario.yaml").write_text("gpus: [{model: T4}]\n")
    port = free_port()
    scenario = f"--devices.scenario={tmp_path / 'scenario.yaml'}"
    address = f"--web.listen-address=127.0.0.1:{port}"
    processes.start([*GPU_EXPORTER, f"--web.config.file={config}", scenario, "--state.directory=", address])
    wait_for(lambda: ask(f"https://127.0.0.1:{port}/-/ready", authority, None) == 200 or None, "the agent")
    command = [*GPU_EXPORTER, "reconcile", "--once", f"--source.exporter=https://127.0.0.1:{port}"]
    for ca, code, text in (
        (authority.certificate, 0, "1 exporter and 0 allocations seen"),
        (stranger.certificate, 3, "certificate verify failed"),
    ):
        running = processes.start([*command, "--no-kubernetes", "--no-slurm", f"--source.tls.ca={ca}"])
        assert running.process.wait(60) == code
        assert text in running.log()
