"""Renders the chart as plain manifests, for sites without Helm: `make manifests PRESET=gke VALUES=my-values.yaml`.

Uses Helm from PATH, otherwise builds the version that the tests use. Omits hooks and the rights of the cleanup job,
because `kubectl apply` would run the hooks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tools.files import ROOT

CHART = ROOT / "helm" / "gpu-exporter"
CLEANUP = "# Source: gpu-exporter/templates/cleanup.yaml\n"


def find_helm() -> str:
    """Returns the path of Helm. Raises RuntimeError if Helm is not on PATH and cannot be built."""
    if found := shutil.which("helm"):
        return found
    from tests.testbed.programs import build

    return str(build("helm"))


def main(arguments: list[str]) -> int:
    """Writes the manifests. Returns Helm's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="", help="the name of a file in presets/")
    parser.add_argument("--values", default="", help="a file with your own values")
    parser.add_argument("--namespace", default="gpu-exporter")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "manifests.yaml")
    options = parser.parse_args(arguments)
    presets = {path.stem: path for path in (CHART / "presets").glob("*.yaml")}
    if options.preset and options.preset not in presets:
        parser.error(f"no preset {options.preset}: the presets are {', '.join(sorted(presets))}")
    files = [*([str(presets[options.preset])] if options.preset else []), *([options.values] if options.values else [])]
    given = [part for path in files for part in ("--values", path)]
    command = [find_helm(), "template", "gpu-exporter", str(CHART), f"--namespace={options.namespace}", "--no-hooks"]
    done = subprocess.run([*command, *given], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        objects = [each for each in done.stdout.split("\n---\n") if CLEANUP not in each]
        options.output.write_text("\n---\n".join(objects), encoding="utf-8")
        print(f"wrote {options.output}. Next:")
        print(f"  kubectl create namespace {options.namespace} && kubectl apply -f {options.output}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
