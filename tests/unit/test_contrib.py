"""The files for systemd and Slurm that sites install: the health check does what it says, and fails no node by itself."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest

import gpu_exporter

CONTRIB = Path(gpu_exporter.__file__).parent / "contrib"


def check(tmp_path: Path, status: int, drain: str = "") -> tuple[int, str, list[str]]:
    """How the health check ends, what it says, and what scontrol was told, where gpu-exporter ends with `status`."""
    programs = {
        "gpu-exporter": f'echo "$*" >{tmp_path}/asked; echo "no GPU data: gone" >&2; exit {status}',
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


@pytest.mark.parametrize(("status", "reason"), [(3, "no GPU answers"), (4, "not all GPUs answer")])
def test_a_node_whose_gpus_do_not_answer_is_drained_where_the_site_says_so(
    tmp_path: Path, status: int, reason: str
) -> None:
    said = f"gpu-exporter: {reason}: no GPU data: gone\n"
    assert check(tmp_path, status) == (0, said, [])
    assert (tmp_path / "asked").read_text() == "--once --check=devices --timeout=20s\n"
    assert check(tmp_path, status, "yes") == (
        0,
        said,
        [f"update NodeName=n0 State=DRAIN Reason=gpu-exporter: {reason}"],
    )


@pytest.mark.parametrize("status", [0, 1, 2, 127, 143])
def test_a_check_that_fails_itself_drains_nothing(tmp_path: Path, status: int) -> None:
    assert check(tmp_path, status, "yes") == (0, "", [])


def test_the_unit_is_read_as_systemd_reads_it_and_keeps_its_promises() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(CONTRIB / "systemd" / "gpu-exporter.service", "utf-8")
    service = dict(unit["Service"])
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["StateDirectory"] == "gpu-exporter"  # /var/lib/gpu-exporter, the default of --state.directory
    # Devices of the driver, slurmd's sockets and the processes of others must stay in reach.
    assert not {"PrivateDevices", "ProtectProc", "PrivateNetwork", "PrivateUsers"} & service.keys()


def test_every_script_is_posix_and_may_be_run() -> None:
    scripts = sorted(CONTRIB.rglob("*.sh"))
    assert [script.name for script in scripts] == ["epilog.sh", "health.sh", "prolog.sh"]
    for script in scripts:
        assert script.read_text("utf-8").startswith("#!/bin/sh\n")
        assert script.stat().st_mode & 0o111 == 0o111
        assert subprocess.run(["dash", "-n", str(script)], check=False).returncode == 0
