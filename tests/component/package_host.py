"""Packages of `make packages` in a chroot: their unit as systemd starts it, and what an upgrade keeps."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.chroots import Chroot
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder

Driver = tuple[dict[str, str], list[Path]]  # what a script needs to find it: variables, and folders of the host
GPU = 'gpu_up{gpu="1"'
STATE = "/var/lib/gpu-exporter"
# As systemd starts the unit: with its state directory, its variables and its command. It is ended when it serves. The
# output is empty, or what it has written if it failed.
START = f"""mkdir -p {STATE}
unit=$(find /usr/lib/systemd/system /etc/systemd/system -name gpu-exporter.service -type f)
file=$(sed -n 's/^EnvironmentFile=-//p' "$unit")
set -a
[ ! -f "$file" ] || . "$file"
set +a
: >/started
$(sed -n 's/^ExecStart=//p' "$unit") --no-attribution.kubelet 2>/started &
tries=0
until grep -q 'serving on' /started || [ "$tries" = 600 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -TERM "$!" || :
wait "$!" || cat /started
"""


def make_driver(nvml_directory: Path, nvml_table: NvmlTable) -> Driver:
    """The fake driver with two H100."""
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    names = {"LD_LIBRARY_PATH": str(nvml_directory), "GPU_EXPORTER_NVML_TABLE": str(nvml_table.path)}
    return names, [nvml_directory, nvml_table.path.parent]


def compiled(chroot: Chroot) -> set[str]:
    return {path for path in chroot.files() if path.startswith("/opt/gpu-exporter") and path.endswith(".pyc")}


def read_state(chroot: Chroot) -> str:
    return chroot.run(f"cd {STATE} && find . -type f | sort | xargs sha256sum")


def check_use_and_upgrade(chroot: Chroot, nvml: Driver, upgrade: str, folders: list[Path]) -> None:
    """An installed package: the unit runs, and an upgrade keeps state and settings."""
    environment, places = nvml
    assert len(compiled(chroot)) > 100
    verified = chroot.attempt("systemd-analyze verify gpu-exporter.service gpu-exporter-slurm-collector.service")
    assert (verified.returncode, verified.stderr) == (0, "")
    said = chroot.run(START, environment, places)
    assert said == "", said
    assert "serving on" in chroot.run("cat /started")
    state = read_state(chroot)
    assert "state" in state
    settings = "diagnosis: {window: 20m}"
    chroot.run(f"echo '{settings}' >/etc/gpu-exporter/config.yaml; touch /opt/gpu-exporter/lib/__pycache__/old.pyc")
    chroot.run(upgrade, folders=folders)
    assert read_state(chroot) == state
    assert chroot.run("cat /etc/gpu-exporter/config.yaml") == f"{settings}\n"
    assert chroot.run("stat -c %a /etc/gpu-exporter/environment") == "600\n"
    assert len(compiled(chroot)) > 100 and "/opt/gpu-exporter/lib/__pycache__/old.pyc" not in chroot.files()
    said = chroot.run(START, environment, places)
    assert said == "", said
    log = chroot.run("cat /started")
    assert "diagnosis.window=1200" in log and "counters start at 0" not in log
    enabled = "/etc/systemd/system/multi-user.target.wants/gpu-exporter.service"
    assert chroot.run(f"readlink {enabled}").endswith("/systemd/system/gpu-exporter.service\n")
