"""Files for systemd and Slurm that sites install: the health check works as documented, and its faults fail no node."""

from __future__ import annotations

import configparser
import os
import subprocess
from pathlib import Path

import pytest

import gpu_exporter

CONTRIB = Path(gpu_exporter.__file__).parent / "contrib"


def check(tmp_path: Path, status: int, drain: str = "", said: str = "") -> tuple[int, str, list[str]]:
    """Exit code and output of the health check, and the calls of scontrol, if gpu-exporter ends with `status`."""
    (tmp_path / "said").write_text(said, "utf-8")
    programs = {
        "gpu-exporter": f'echo "$*" >{tmp_path}/asked; cat {tmp_path}/said >&2; exit {status}',
        "scontrol": f'echo "$*" >>{tmp_path}/told',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(
        ["sh", str(CONTRIB / "slurm" / "health.sh")],
        env=environment | ({"GPU_EXPORTER_DRAIN": drain} if drain else {}),
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    told = tmp_path / "told"
    return done.returncode, done.stdout, told.read_text("utf-8").splitlines() if told.exists() else []


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (3, "gpu-exporter: no GPU data: the driver is gone\n", "no GPU data: the driver is gone"),
        (4, "gpu-exporter: partial: gpu 3 asks for a reset\n", "gpu 3 asks for a reset"),
        (
            4,
            "gpu-exporter: warning: old\ngpu-exporter: partial: gpu 0: fell off; $(reboot) 'x'\n"
            "gpu-exporter: partial: slurm counts 4 GPUs here, but 3 answer\ngpu-exporter: partial: gpu 2: hung\n",
            "gpu 0: fell off; $(reboot) 'x', and 2 more",
        ),
        (4, f"gpu-exporter: partial: gpu 0: {'x' * 999}\n", f"gpu 0: {'x' * 193}"),
        (4, "", "not all GPUs answer"),
    ],
)
def test_a_node_is_drained_with_the_gpu_and_its_fault_as_reason_if_the_site_configured_it(
    tmp_path: Path, status: int, said: str, reason: str
) -> None:
    assert check(tmp_path, status, said=said) == (0, said or "\n", [])
    assert (tmp_path / "asked").read_text() == "--once --check=devices --timeout=20s\n"
    told = [f"update NodeName=n0 State=DRAIN Reason=gpu-exporter: {reason}"]
    assert check(tmp_path, status, "yes", said) == (0, said or "\n", told)


@pytest.mark.parametrize("status", [0, 1, 2, 143])
def test_a_health_check_that_itself_fails_drains_no_node(tmp_path: Path, status: int) -> None:
    assert check(tmp_path, status, "yes") == (0, "", [])


@pytest.mark.parametrize("mode", [None, 0o644], ids=["missing", "not executable"])
def test_a_health_check_without_gpu_exporter_reports_it_and_drains_no_node(tmp_path: Path, mode: int | None) -> None:
    if mode is not None:
        (tmp_path / "gpu-exporter").touch(mode)
    done = subprocess.run(
        ["sh", str(CONTRIB / "slurm" / "health.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GPU_EXPORTER_DRAIN": "yes"},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-health: cannot run gpu-exporter, so the GPUs are not checked: ")
    assert done.stdout.count("\n") == 1


def test_the_systemd_unit_has_the_documented_settings() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(CONTRIB / "systemd" / "gpu-exporter.service", "utf-8")
    service = dict(unit["Service"])
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["StateDirectory"] == "gpu-exporter"  # /var/lib/gpu-exporter, the default of --state.directory
    # The driver's devices, slurmd's sockets and the processes of other users must remain accessible.
    assert not {"PrivateDevices", "ProtectProc", "PrivateNetwork", "PrivateUsers"} & service.keys()


def test_every_script_is_posix_and_executable() -> None:
    scripts = sorted(CONTRIB.rglob("*.sh"))
    assert [script.name for script in scripts] == ["epilog.sh", "health.sh", "prolog.sh"]
    for script in scripts:
        assert script.read_text("utf-8").startswith("#!/bin/sh\n")
        assert script.stat().st_mode & 0o111 == 0o111
        assert subprocess.run(["dash", "-n", str(script)], check=False).returncode == 0


def run_script(name: str, tmp_path: Path, **environment: str) -> int:
    variables = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_UID": "1000",
        "SLURM_JOB_GPUS": "0",
        "GPU_EXPORTER_JOB_FILES": str(tmp_path / "jobs"),
    }
    script = CONTRIB / "slurm" / name
    return subprocess.run(["sh", str(script)], env=variables | environment, check=False, timeout=30).returncode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as slurmd is: the folder becomes the user's")
def test_the_prolog_gives_a_job_a_folder_for_its_training_and_the_epilog_removes_it(tmp_path: Path) -> None:
    training, kept = tmp_path / "training", tmp_path / "kept"
    assert run_script("prolog.sh", tmp_path) == 0
    assert not training.exists()
    assert run_script("prolog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training)) == 0
    folder = training / "42"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777, training.stat().st_uid) == (1000, 0o755, 0)
    kept.mkdir()
    (kept / "file").touch()
    (folder / "link").symlink_to(kept)
    assert run_script("epilog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training)) == 0
    assert not folder.exists() and (kept / "file").exists()
    for bad in ("relative", "", "../x"):
        assert run_script("epilog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=bad) == 0
    assert run_script("prolog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training), SLURM_JOB_UID="") == 0
    assert not folder.exists()
