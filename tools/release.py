"""Everything of a release except its publication: `make release-dry-run`. The release workflow calls the same parts.

    python -m tools.release download     tools and dependencies
    python -m tools.release dist         wheels and sdists; each wheel is built twice and must be the same bytes
    python -m tools.release packages     archive, deb and rpm for nodes without Kubernetes; downloads their dependencies
    python -m tools.release chart        the package of the chart
    python -m tools.release sbom         CycloneDX of what the agent and the reconciler install, and their licences
    python -m tools.release use          installs and uses the wheels and the chart, from an empty folder
    python -m tools.release images       both images, built twice and started; needs buildah and mmdebstrap as root
    python -m tools.release sums         SHA256SUMS

Results and LOG are in out/release. As root on Linux, `use` has no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_exporter.common.version import VERSION
from tools import node_package
from tools.files import ROOT
from tools.manifests import find_helm

OUT = ROOT / "out" / "release"
TOOLS, WHEELS = OUT / "tools", OUT / "wheels"
LOCKS = ROOT / "exporter" / "locks"
CHART = ROOT / "helm" / "gpu-exporter"
SCENARIO = {"gpus": [{"model": "H100"}, {"model": "H100"}]}
MACHINES = ("x86_64", "aarch64")
IMAGE_PYTHON = "313"  # of the Dockerfile's BASE
SAID_MAX = 3000  # characters of the output of a command that failed
# Ends with 1 and the error if a file is not valid CycloneDX.
VALIDATE = """
import pathlib, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(pathlib.Path(sys.argv[1]).read_text())) is not None:
    raise SystemExit(str(error))
"""
# What is built where, by the name of its files: the exporter, and the hook for trainings.
DISTRIBUTIONS = {
    "gpu_exporter": "exporter/gpu_exporter/common/version.py",
    "gpu_exporter_torch": "exporter/hook/pyproject.toml",
}
TRAIN = """
from gpu_exporter_torch import observe
with observe(range(60), directory=".") as batches:
    for _ in batches:
        pass
"""
PARTS = {"agent": "web-auth", "reconciler": "reconciler,web-auth"}  # images, and the extras that they install


class ReleaseError(Exception):
    """A part of the release is wrong. The text names the part and the expected state."""


def say(text: str) -> None:
    """Prints a line, and writes it to LOG."""
    print(text, flush=True)
    with (OUT / "LOG").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def run(command: Sequence[object], where: Path = ROOT, **environment: str) -> str:
    """Runs a command. Returns its standard output. Raises ReleaseError with the output of a failed command."""
    text, own = list(map(str, command)), {**os.environ, **environment}
    done = subprocess.run(text, cwd=where, env=own, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr}"[-SAID_MAX:]
        raise ReleaseError(f"{' '.join(text)}: exit code {done.returncode}\n{said}")
    return done.stdout


def make_venv(folder: Path) -> Path:
    """Makes a virtual environment. Returns the path of its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def download() -> None:
    """Downloads the tools of the release, and the dependencies of both images as wheels."""
    python = make_venv(TOOLS)
    checked = ["--quiet", "--disable-pip-version-check", "--require-hashes"]
    # Wheels alone: a source distribution would be built by tools that no lock names.
    run([python, "-m", "pip", "install", *checked, "--only-binary=:all:", "-r", LOCKS / "release.txt"])
    shutil.rmtree(WHEELS, ignore_errors=True)
    fetch = [python, "-m", "pip", "download", *checked]
    for part in PARTS:
        run([*fetch, "--dest", WHEELS, "-r", LOCKS / f"{part}.txt"])
    say(f"download: {len(list(WHEELS.iterdir()))} dependencies")
    for part in PARTS:
        for machine in MACHINES:
            with tempfile.TemporaryDirectory() as folder:
                run([*fetch, "--dest", folder, *for_image(machine), "-r", LOCKS / f"{part}.txt"])
                say(f"download: {part} on {machine}: {len(list(Path(folder).iterdir()))} wheels, each with its hash")


def for_image(machine: str) -> list[str]:
    """Returns options with which pip resolves as in the Dockerfile's image on this machine: only wheels."""
    kinds = [f"--abi={abi}" for abi in (f"cp{IMAGE_PYTHON}", "abi3", "none")]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(17, 37)]
    python = f"{IMAGE_PYTHON[0]}.{IMAGE_PYTHON[1:]}"
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *kinds, *platforms]


def find_wheel(name: str, folder: Path = OUT / "dist") -> Path:
    (wheel,) = folder.glob(f"{name}-*.whl")
    return wheel


def dist() -> None:
    """Builds the wheels and sdists of the commit, with the commit's date."""
    date = run(["git", "log", "-1", "--format=%ct"]).strip()
    folders = [OUT / "dist", OUT / "dist-again"]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as source:  # a clone: nothing that git does not know gets into a release
            run(["git", "clone", "--quiet", ROOT, source])
            command = [TOOLS / "bin" / "python", "-m", "build", "--no-isolation", "--outdir", folder]
            for place in ("", "exporter/hook"):
                run(command, Path(source, place), SOURCE_DATE_EPOCH=date)
    for name, place in DISTRIBUTIONS.items():
        wheel, again = (find_wheel(name, folder) for folder in folders)
        if wheel.read_bytes() != again.read_bytes():
            raise ReleaseError(f"{wheel.name}: two builds of one commit differ")
        if f"-{VERSION}-" not in wheel.name:
            raise ReleaseError(f"{wheel.name}: {place} must have {VERSION}")
        say(f"dist: {wheel.name} built twice, the same {wheel.stat().st_size} bytes; sdist")
    shutil.rmtree(folders[1])


def packages() -> None:
    """Builds archive, deb and rpm for nodes without Kubernetes. Without rpmbuild, only logs the reason."""
    try:
        lines = node_package.build(OUT / "dist", TOOLS / "bin" / "python")
    except node_package.PackageError as exc:
        raise ReleaseError(str(exc)) from exc
    for line in lines:
        say(f"packages: {line}")


def chart() -> None:
    """Packages the chart. Raises ReleaseError if its version is not the project's."""
    about = (CHART / "Chart.yaml").read_text("utf-8").splitlines()
    if not {f"version: {VERSION}", f"appVersion: {VERSION}"} <= set(about):
        raise ReleaseError(
            f"Chart.yaml: version and appVersion must be {VERSION}, as in exporter/gpu_exporter/common/version.py"
        )
    run([find_helm(), "package", CHART, "--destination", OUT / "dist"])
    say(f"chart: gpu-exporter-{VERSION}.tgz")


def sbom() -> None:
    """Writes an SBOM for each image: its Python packages with their licences. Raises ReleaseError without a licence."""
    wheel = find_wheel("gpu_exporter")
    for part, extras in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            python = make_venv(Path(folder))
            install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", WHEELS]
            run([*install, f"{wheel}[{extras}]"])
            run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip"])
            path = OUT / "dist" / f"gpu-exporter-{part}-{VERSION}.cdx.json"
            run([TOOLS / "bin" / "cyclonedx-py", "environment", "--output-reproducible", "--output-file", path, python])
        components = json.loads(path.read_text("utf-8"))["components"]
        unlicensed = sorted(each["name"] for each in components if not each.get("licenses"))
        if unlicensed:
            raise ReleaseError(f"{path.name}: no licence is known of {', '.join(unlicensed)}")
        say(f"sbom: {part} has {len(components)} components, each with a licence")


def use() -> None:
    """Installs the wheels and renders the packaged chart, without any other file of the checkout."""
    wheel, (package,) = find_wheel("gpu_exporter"), (OUT / "dist").glob("*.tgz")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "scenario.yaml").write_text(json.dumps(SCENARIO), encoding="utf-8")
        python = make_venv(home / "venv")
        install: list[object] = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", WHEELS]
        alone = offline()
        run([*alone, *install, f"{wheel}[reconciler,web-auth]"], home, HOME=folder)
        program = home / "venv" / "bin" / "gpu-exporter"
        once = [program, "--once", "--no-attribution.slurm", "--devices.scenario=scenario.yaml"]
        metrics = run([*alone, *once], home, HOME=folder)
        if "\ngpu_up{" not in metrics:
            raise ReleaseError(f"{wheel.name}: --once on a scenario prints no gpu_up")
        version = run([*alone, program, "--version"], home, HOME=folder)
        if VERSION not in version:
            raise ReleaseError(f"{wheel.name}: --version prints {version.strip()}, expected {VERSION}")
        network = "without a network" if alone else "with a network, since this user cannot take it away"
        say(f"use: {wheel.name} installed without an index, {network}; --once prints {len(metrics.splitlines())} lines")
        use_hook(find_wheel("gpu_exporter_torch"), home, alone)
        helm = find_helm()
        run(["tar", "xzf", package], home)
        for preset in ("", *sorted(path.stem for path in (CHART / "presets").glob("*.yaml"))):
            values = ["--values", f"gpu-exporter/presets/{preset}.yaml"] if preset else []
            run([helm, "lint", "--strict", package, *values], home, HOME=folder)
            text = run([helm, "template", "gpus", package, *values], home, HOME=folder)
            if f"/agent:{VERSION}" not in text:
                raise ReleaseError(f"{package.name}: the agent's image has not the tag {VERSION}")
        say(f"use: {package.name} linted and rendered with every preset")


def use_hook(wheel: Path, home: Path, alone: list[str]) -> None:
    """Observes a training loop in an environment that contains only the hook."""
    python = make_venv(home / "training")
    run([*alone, python, "-m", "pip", "install", "--quiet", "--no-index", wheel], home)
    run([*alone, python, "-c", TRAIN], home)
    (report,) = home.glob("run-*.json")
    steps = json.loads(report.read_text("utf-8"))["steps"]
    if steps != 60:
        raise ReleaseError(f"{wheel.name}: the report of a loop of 60 steps has {steps}")
    say(f"use: {wheel.name} installed alone; a loop of {steps} steps writes its report")


def images() -> None:
    """Builds both images twice and starts them. Without root or the needed programs, only logs the reason."""
    missing = [name for name in ("buildah", "mmdebstrap", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not on PATH" if missing else "this user is not root"
        say(f"images: NOT BUILT, since {why}; the workflow builds and starts them with docker")
        return
    date = run(["git", "log", "-1", "--format=%ct"]).strip()
    folder = OUT / "images"  # beside what is published: the workflow pushes images that it has built itself
    folder.mkdir(exist_ok=True)
    for line in run([sys.executable, "-m", "tests.testbed.images", folder, VERSION, date]).splitlines():
        say(f"images: {line}")
    (base,) = folder.glob("*.cdx.json")
    run([TOOLS / "bin" / "python", "-c", VALIDATE, base])
    components = json.loads(base.read_text("utf-8"))["components"]
    say(f"images: their base has {len(components)} components, each with a licence or the file that has it")


def offline() -> list[str]:
    """Returns the prefix that runs a command without network. Empty if this process may not do that."""
    command = ["unshare", "--net", "--"]
    able = (
        shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    )
    return command if able else []


def sums() -> None:
    paths = sorted(path for path in (OUT / "dist").iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    (OUT / "dist" / "SHA256SUMS").write_text("".join(lines), encoding="ascii")
    say(f"sums: {len(lines)} files")


def pictures() -> None:
    """Checks that the pictures in docs show the dashboards of the release."""
    listed = (ROOT / "docs" / "pictures" / "drawn-from.txt").read_text("ascii")
    drawn = {name: digest for digest, name in (line.split() for line in listed.splitlines())}
    boards = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
    old = [path.name for path in boards if drawn.get(path.name) != hashlib.sha256(path.read_bytes()).hexdigest()]
    if old:
        raise ReleaseError(f"docs/pictures are older than {', '.join(old)}: python -m tests.preview.dashboards --save")
    say(f"pictures: {len(boards)} dashboards drawn as they are")


STEPS: dict[str, Callable[[], None]] = {
    "pictures": pictures,
    "download": download,
    "dist": dist,
    "packages": packages,
    "chart": chart,
    "sbom": sbom,
    "use": use,
    "images": images,
    "sums": sums,
}


def main(arguments: list[str]) -> int:
    """Runs the named parts, by default all. Returns the exit code."""
    unknown = [name for name in arguments if name not in STEPS]
    if unknown:
        print(f"no part {unknown[0]}: the parts are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    for name in arguments or STEPS:
        try:
            STEPS[name]()
        except ReleaseError as exc:
            print(f"release: {name}: {exc}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
