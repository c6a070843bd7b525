"""Records the OpenAPI definitions of the chart's kinds from releases of Kubernetes, for versions that are not built here.

    python -m tests.testbed.recorded_schemas        downloads the modules, and rewrites tests/fixtures/openapi

Descriptions are left out. Source: api/openapi-spec/swagger.json of the Go module k8s.io/kubernetes (Apache-2.0).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "openapi"
VERSIONS = ("1.30.14", "1.31.14", "1.32.10", "1.33.6", "1.34.2", "1.35.0")  # the newest one runs in the tests
KINDS = frozenset(
    (
        *("ServiceAccount", "ConfigMap", "Service", "Pod", "DaemonSet", "Deployment", "Job", "CronJob"),
        *("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
        *("NetworkPolicy", "PodDisruptionBudget", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    )
)
KIND = "x-kubernetes-group-version-kind"
QUANTITY = "Quantity is a fixed-point"  # tests/testbed/schemas.py recognises a quantity by this


def read_recorded(version: str) -> dict[str, Any]:
    """The recorded part of the answer of /openapi/v2 of this version."""
    (path,) = FOLDER.glob(f"{version}.*json.gz")
    answer: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return answer


def record(version: str, modules: Path) -> None:
    """Download one release, and record what the chart needs of it."""
    download = ["go", "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"]
    done = subprocess.run(download, cwd=modules, capture_output=True, text=True, check=True, timeout=600)
    with zipfile.ZipFile(json.loads(done.stdout)["Zip"]) as archive:
        name = f"k8s.io/kubernetes@v{version}/api/openapi-spec/swagger.json"
        definitions = json.loads(archive.read(name))["definitions"]
    wanted = {name for name, body in definitions.items() if any(each["kind"] in KINDS for each in body.get(KIND, ()))}
    todo = list(wanted)
    while todo:
        text = json.dumps(definitions[todo.pop()])
        found = {name for name in definitions if f'"#/definitions/{name}"' in text} - wanted
        wanted |= found
        todo += found
    kept = {name: _shorten(definitions[name]) for name in sorted(wanted)}
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps({"definitions": kept}, separators=(",", ":"))
    (FOLDER / f"{version}.json.gz").write_bytes(gzip.compress(text.encode("ascii"), 9, mtime=0))


def _shorten(body: Any) -> Any:
    if isinstance(body, list):
        return [_shorten(each) for each in body]
    if not isinstance(body, dict):
        return body
    is_quantity = str(body.get("description", "")).startswith(QUANTITY)
    kept = {key: _shorten(value) for key, value in body.items() if key != "description" or isinstance(value, dict)}
    return {**kept, "description": QUANTITY} if is_quantity else kept


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for each in sys.argv[1:] or VERSIONS:
            record(each, Path(folder))
