"""JSON Schemas for kubeconform from a live API server and from CRDs, since kubeconform's own need the network.

Each kind gets its own file with every definition that it uses. Objects with named properties accept no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

REFERENCE = "#/definitions/"


def read_crd(path: Path) -> dict[str, Any]:
    """A definition has thousands of lines, for which the parser in Python takes a second."""
    return dict(yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def write_schemas(openapi: dict[str, Any], crds: Path, directory: Path) -> str:
    """Write one schema per kind; returns kubeconform's --schema-location. `openapi`: the answer of /openapi/v2."""
    definitions = {name: _close(body) for name, body in openapi["definitions"].items()}
    for name, body in definitions.items():
        for kind in openapi["definitions"][name].get("x-kubernetes-group-version-kind", ()):
            reached = _reach(body, definitions)
            schema = {**body, "definitions": {each: definitions[each] for each in reached}}
            _write(directory, kind["group"], kind["version"], kind["kind"], schema)
    for path in crds.glob("*.yaml"):
        crd = read_crd(path)["spec"]
        for version in crd["versions"]:
            schema = _close(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            _write(directory, crd["group"], version["name"], crd["names"]["kind"], schema)
    return f"{directory}/{{{{ .Group }}}}_{{{{ .ResourceAPIVersion }}}}_{{{{ .ResourceKind }}}}.json"


def _write(directory: Path, group: str, version: str, kind: str, schema: dict[str, Any]) -> None:
    group = group or version  # kubeconform uses v1 as the name of the core group
    (directory / f"{group}_{version}_{kind.lower()}.json").write_text(json.dumps(schema))


def _close(body: Any) -> Any:
    """A copy in which unknown properties are errors, and numbers with units may be numbers or texts."""
    if isinstance(body, list):
        return [_close(each) for each in body]
    if not isinstance(body, dict):
        return body
    if body.get("format") == "int-or-string" or body.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    if str(body.get("description", "")).startswith("Quantity is a fixed-point"):
        return {"type": ["string", "number"]}
    copy = {key: _close(value) for key, value in body.items() if key != "description"}
    if isinstance(body.get("properties"), dict) and "additionalProperties" not in body and body.get("type") == "object":
        copy["additionalProperties"] = False
    return copy


def _reach(body: Any, definitions: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    todo = [body]
    while todo:
        current = todo.pop()
        if isinstance(current, list):
            todo += current
        elif isinstance(current, dict):
            reference = current.get("$ref", "")
            name = reference.removeprefix(REFERENCE) if isinstance(reference, str) else ""
            if name in definitions and name not in found:
                found.add(name)
                todo.append(definitions[name])
            todo += current.values()
    return found
