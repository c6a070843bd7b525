"""An API server's answers as bytes, from objects in memory; the product's own code reads them."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from kubernetes import client

from gpu_exporter.reconciler.kubernetes.client.api import Api, failure

CHUNK = 4096
LISTS = {
    "list_namespaced_pod": "Pod",
    "list_pod_for_all_namespaces": "Pod",
    "list_namespaced_service": "Service",
    "list_namespaced_endpoint_slice": "EndpointSlice",
    "list_namespaced_horizontal_pod_autoscaler": "HorizontalPodAutoscaler",
    "list_namespaced_custom_object": "Workload",
}
KINDS = {"batch/v1": {"Job": "jobs"}, "apps/v1": {"ReplicaSet": "replicasets", "Deployment": "deployments"}}


class MemoryApi(Api):
    """`objects`: by kind, each a JSON value or the text of a JSON value. `page`: number of objects per page."""

    def __init__(self, objects: dict[str, list[Any]], page: int = 20) -> None:
        super().__init__(client.ApiClient(client.Configuration()))
        self.objects = objects
        self._page = page

    def _request(self, function: Any, *arguments: Any, **options: Any) -> Generator[bytes, None, None]:
        text = self._answer(function.__name__, arguments, options).encode()
        for at in range(0, len(text), CHUNK):
            yield text[at : at + CHUNK]

    def _answer(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        if name in LISTS:
            rows = [row for row in self.objects.get(LISTS[name], []) if selects(options.get("field_selector"), row)]
            at = int(options.get("_continue") or 0)
            more = str(at + self._page) if at + self._page < len(rows) else ""
            items = ",".join(map(as_text, rows[at : at + self._page]))
            return f'{{"metadata":{{"continue":"{more}"}},"items":[{items}]}}'
        if name == "read_namespace":
            return as_text({"metadata": {"name": arguments[0], "uid": "ns"}})
        if name == "get_api_resources":
            kinds = KINDS.get("/".join(arguments))
            if kinds is None:
                raise failure(404, '{"message": "not served", "details": {}}')
            return as_text({"resources": [{"kind": k, "name": n, "namespaced": True} for k, n in kinds.items()]})
        if name == "get_api_versions":
            return as_text({"groups": []})
        if name in ("get_namespaced_custom_object", "read_namespaced_pod"):
            plural, wanted = (arguments[3], arguments[4]) if len(arguments) > 2 else ("pods", arguments[0])
            kind = next((k for table in KINDS.values() for k, n in table.items() if n == plural), "Pod")
            found = [row for row in self.objects.get(kind, []) if f'"name": "{wanted}"' in as_text(row)[:200]]
            if not found:
                raise failure(404, as_text({"message": "not found", "details": {"name": wanted}}))
            return as_text(found[0])
        raise AssertionError(name)


def selects(selector: str | None, row: Any) -> bool:
    """Whether a field selector for the phase of pods selects this row, as in the API server."""
    phase = row["status"].get("phase") if isinstance(row, dict) and isinstance(row.get("status"), dict) else None
    for part in (selector or "").split(","):
        wanted = part.rpartition("=")[2]
        if part and (phase == wanted) == ("!=" in part):
            return False
    return True


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
