"""The shipped units, confined as by systemd: the allowed paths are writable, and no other path is."""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_exporter
from tests.testbed.processes import GPU_EXPORTER, Processes
from tests.testbed.slurm import start_slurm

UNITS = Path(gpu_exporter.__file__).parent / "contrib" / "systemd"
# ProtectSystem=strict: the whole tree is read-only, except for the unit's paths. PrivateTmp gives the unit its own /tmp.
CONFINED = """set -e
mount --make-rprivate /
for place in {places}; do [ -d "$place" ] && mount --bind "$place" "$place"; done
mount -o remount,bind,ro /
exec setpriv --no-new-privs --bounding-set={caps} --inh-caps=-all {command}
"""


def read_unit(name: str) -> dict[str, str]:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS / f"{name}.service", "utf-8")
    return dict(unit["Service"])


def run_confined(name: str, *flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run gpu-exporter with these flags, and with only the writable paths and capabilities of the unit."""
    if os.geteuid() != 0:
        assert not os.environ.get("CI"), "CI runs these tests as root"
        pytest.skip("a mount namespace needs root")
    service = read_unit(name)
    assert service["ProtectSystem"] == "strict"
    places = [place.lstrip("-") for place in service.get("ReadWritePaths", "").split()]
    places.append(f"/var/lib/{service['StateDirectory']}")
    (Path(places[-1])).mkdir(exist_ok=True)  # as systemd does
    caps = ",".join(
        ["-all", *(f"+{cap.lower().removeprefix('cap_')}" for cap in service["CapabilityBoundingSet"].split())]
    )
    script = CONFINED.format(places=shlex.join(places), caps=caps, command=shlex.join([*GPU_EXPORTER, *flags]))
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture
def made() -> Iterator[list[Path]]:
    """Files and folders that a test makes outside its own folder, the outermost first. They are removed at its end."""
    paths: list[Path] = []
    yield paths
    for path in reversed(paths):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("folder", ["/var/lib/node_exporter", "/var/lib/prometheus/node-exporter"])
def test_the_unit_can_write_the_textfile_for_node_exporter(
    made: list[Path], nvml_environment: dict[str, str], folder: str
) -> None:
    for path in (*reversed(Path(folder).parents), Path(folder)):
        if not path.exists():
            path.mkdir()
            made.append(path)
    text = Path(folder) / f"gpu-{uuid.uuid4().hex}.prom"
    made.append(text)
    flags = ("--once", "--no-attribution.slurm", "--no-attribution.kubelet", f"--output={text}")
    done = run_confined("gpu-exporter", *flags, environment=nvml_environment)
    assert text.exists(), done.stderr + done.stdout
    assert "gpu_exporter_build_info" in text.read_text("utf-8")
    elsewhere = Path(f"/var/gpu-{uuid.uuid4().hex}.prom")
    done = run_confined("gpu-exporter", *flags[:-1], f"--output={elsewhere}", environment=nvml_environment)
    assert not elsewhere.exists()
    assert "Read-only file system" in done.stderr


def test_a_textfile_outside_of_the_units_paths_ends_the_exporter_at_its_start(nvml_environment: dict[str, str]) -> None:
    elsewhere = Path(f"/var/gpu-{uuid.uuid4().hex}.prom")
    flags = ("--no-attribution.slurm", "--no-attribution.kubelet", f"--textfile.output={elsewhere}")
    done = run_confined("gpu-exporter", *flags, environment=nvml_environment)
    assert (done.returncode, elsewhere.exists()) == (2, False)
    reason = "Read-only file system; add the directory to ReadWritePaths= of the systemd unit"
    assert done.stderr.splitlines()[-1] == f"gpu-exporter: cannot write {elsewhere}: {reason}"


@pytest.mark.slurm
def test_the_unit_can_write_the_collectors_directory(made: list[Path], processes: Processes) -> None:
    folder = Path("/var/lib") / read_unit("gpu-exporter-slurm-collector")["StateDirectory"]
    with start_slurm(processes) as slurm:
        done = run_confined(
            "gpu-exporter-slurm-collector", "slurm-collector", f"--directory={folder}", "--once",
            environment=slurm.environment,
        )  # fmt: skip
        made += [folder, folder / "n0.json"]
        assert (done.returncode, (folder / "n0.json").is_file()) == (0, True), done.stderr
