"""Real Prometheus, Alertmanager and a webhook receiver, on loopback and free ports."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from email import message_from_bytes
from email.message import Message
from email.policy import default as default_policy
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope

from gpu_exporter.common.outside import parse_timestamp
from tests.testbed.processes import Processes, Running, fetch, free_port, wait_for

PACKAGES = "Debian packages prometheus and prometheus-alertmanager"


def require(*programs: str) -> None:
    """Skip the test if a program is missing; fail in CI, where everything is installed."""
    import os

    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        reason = f"{', '.join(missing)} not on PATH: install with `make testbed` (needs root and Debian)"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)


def write_history(directory: Path, lines: Iterable[str]) -> None:
    """Write series into the folder in which a Prometheus begins. `lines`: in the OpenMetrics text format, with times."""
    text = directory / "history.txt"
    ordered = sorted(lines, key=lambda line: line.partition("{")[0])  # the lines of a family have to be together
    text.write_text("\n".join(ordered) + "\n# EOF\n", encoding="utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(directory / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


class Prometheus:
    """One server that scrapes the given targets (node name to host:port)."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        targets: Mapping[str, str],
        *,
        interval: str = "1s",
        rules: Sequence[Path] = (),
        alertmanager: str = "",
        scrape_configs: Sequence[Mapping[str, Any]] = (),
        port: int | None = None,
        flags: Sequence[str] = (),
        program: str | Path = "prometheus",
    ) -> None:
        """`scrape_configs`: used instead of `targets` if given."""
        require(str(program))
        directory.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": list(scrape_configs)
            or [
                {
                    "job_name": "gpu-exporter",
                    "honor_labels": True,
                    "static_configs": [
                        {"targets": [address], "labels": {"node": node, "instance": node}}
                        for node, address in targets.items()
                    ],
                }
            ],
        }
        if alertmanager:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.running = processes.start(
            [
                program,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *flags,
            ]
        )
        wait_for(lambda: fetch(f"{self.url}/-/ready"), "Prometheus to be ready")

    def query(self, expression: str, time: float | None = None) -> list[tuple[dict[str, str], float]]:
        """An instant query: labels and value of each element."""
        parameters = {"query": expression, **({} if time is None else {"time": f"{time:.3f}"})}
        text = fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode(parameters)}", timeout_s=30.0)
        assert text is not None, f"query failed: {expression}"
        return [(row["metric"], float(row["value"][1])) for row in json.loads(text)["data"]["result"]]

    def complete_until(self) -> float | None:
        """A moment whose data are complete: every target has been scraped, and every rule evaluated, after it.

        On a busy machine, samples and recordings of the last seconds still arrive. The answer to a query for an earlier
        moment no longer changes. None until everything was scraped and evaluated once.
        """
        scraped = self.query("timestamp(up)")
        targets = json.loads(fetch(f"{self.url}/api/v1/targets?state=active") or "")["data"]["activeTargets"]
        groups = json.loads(fetch(f"{self.url}/api/v1/rules") or "")["data"]["groups"]
        evaluated = [parse_timestamp(group["lastEvaluation"]) or 0.0 for group in groups]
        moment = min([moment for _, moment in scraped] + evaluated, default=0.0)
        return moment - 0.001 if moment > 0.0 and len(scraped) == len(targets) else None

    def samples(self, selector: str, label: str = "uuid") -> dict[str, list[tuple[float, float]]]:
        """Raw samples of a range selector by the value of a label: (time, value)."""
        text = fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': selector})}")
        assert text is not None
        return {
            row["metric"].get(label, ""): [(float(t), float(v)) for t, v in row["values"]]
            for row in json.loads(text)["data"]["result"]
        }


class Webhook:
    """Keeps every notification that Alertmanager posts."""

    def __init__(self) -> None:
        received: list[dict[str, Any]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        self.received = received
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


ALERTMANAGER = Path(__file__).resolve().parents[2] / "alerts" / "alertmanager"


def start_alertmanager(
    processes: Processes,
    directory: Path,
    webhook: str = "",
    *,
    mail_port: int = 0,
    port: int | None = None,
    text: str = "",
) -> tuple[Running, str]:
    """Alertmanager with the project's configuration, short waits and no office hours; the program and its host:port.

    `webhook` gets the owners' notifications, including resolved alerts. `mail_port`: of an SMTP server; without it, no
    mail is sent. `text`: a configuration that replaces the project's.
    """
    require("prometheus-alertmanager")
    directory.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load(text or (ALERTMANAGER / "alertmanager.yaml").read_text("utf-8"))
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": "1s", "group_interval": "2s"}
        route.pop("active_time_intervals", None)
    for receiver in config["receivers"]:
        if not mail_port:
            receiver.pop("email_configs", None)
        if webhook and receiver["name"] == "gpu-owners":
            receiver["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    config["global"] |= {"smtp_smarthost": f"127.0.0.1:{mail_port or 25}"}
    (directory / "alertmanager.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for template in ALERTMANAGER.glob("*.tmpl"):
        if not (directory / template.name).exists():
            shutil.copy(template, directory)
    port = port or free_port()
    running = processes.start(
        [
            "prometheus-alertmanager",
            f"--config.file={directory / 'alertmanager.yaml'}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ]
    )
    wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "Alertmanager to be ready")
    return running, f"127.0.0.1:{port}"


class Mailbox:
    """An SMTP server that keeps every mail."""

    def __init__(self) -> None:
        self.mails: list[Message] = []
        self._controller = Controller(self, hostname="127.0.0.1", port=free_port())
        self._controller.start()
        self.port = int(self._controller.port)

    async def handle_DATA(self, server: object, session: object, envelope: Envelope) -> str:
        self.mails.append(message_from_bytes(envelope.original_content or b"", policy=default_policy))
        return "250 kept"

    def to(self, address: str, subject: str = "") -> list[Message]:
        """Mails to this address whose subject contains `subject`."""
        return [mail for mail in self.mails if mail["To"] == address and subject in mail["Subject"]]

    def close(self) -> None:
        self._controller.stop()
