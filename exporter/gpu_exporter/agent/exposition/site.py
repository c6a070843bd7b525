"""Serves the exporter's pages: metrics, status page, JSON, tables and probes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gpu_exporter.agent.exposition.publisher import CONTENT_TYPES, Publisher
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.web.hosts import is_expected, own_names
from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, Reply

METRICS = "/api/v1/metrics"  # always served, also with another --web.telemetry-path
HOST_MAX = 253
MISDIRECTED = b"%s is not a known name of this machine: use its IP address, or add the name to --web.hosts\n"
FORMS = {"/": "page", "/api/v1/status": "json", "/api/v1/table": "table", "/api/v1/holders": "holders"}


class ExporterSite:
    """Answers requests. Thread-safe."""

    def __init__(
        self,
        publisher: Publisher,
        readiness: Callable[[], tuple[bool, str]],
        telemetry_path: str = "/metrics",
        hosts: Collection[str] = (),
    ) -> None:
        """`hosts`: further Host names that requests for status page, JSON and tables may use, beside the machine's own
        names.
        """
        self._publisher = publisher
        self._readiness = readiness
        self._telemetry_path = telemetry_path
        self._metrics = {telemetry_path, METRICS}
        self._hosts = own_names() | {host.lower() for host in hosts}

    def answer_at_once(self, request: Request) -> Reply | None:
        """Returns the reply if it needs no rendering (probes, unknown pages, rendered texts), otherwise None."""
        if request.path == "/-/healthy":
            return Reply(200, TEXT, b"gpu-exporter is healthy\n")
        if request.path == "/-/ready":
            is_ready, reason = self._readiness()
            return Reply(200 if is_ready else 503, TEXT, f"{reason}\n".encode())
        if request.path not in self._metrics and request.path not in FORMS:
            return Reply(404, TEXT, f"no such page; try {self._telemetry_path}\n".encode())
        if request.path in FORMS and not is_expected(host := request.headers.get("host", ""), self._hosts):
            return Reply(421, TEXT, MISDIRECTED % one_line(host)[:HOST_MAX].encode())
        form, is_zipped = self._form(request), request.takes_gzip()
        body = None if request.names() else self._publisher.rendered(form, zipped=is_zipped)
        return None if body is None else Reply(200, CONTENT_TYPES[form], body, is_zipped)

    def answer(self, request: Request) -> Reply:
        form, is_zipped = self._form(request), request.takes_gzip()
        body = self._publisher.body(form, zipped=is_zipped, names=request.names())
        return Reply(200, CONTENT_TYPES[form], body, is_zipped)

    def _form(self, request: Request) -> str:
        if request.path in self._metrics:
            return "openmetrics" if request.takes_openmetrics() else "prometheus"
        return FORMS[request.path]
