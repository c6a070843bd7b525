"""The files for systemd and Slurm that sites install: the health check does what it says, and fails no node by itself."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest

import gpu_exporter

CONTRIB = Path(gpu_exporter.__file__).parent / "contrib"


def check(tmp_path: Path, status: int, drain: str = "", said: str = "") -> tuple[int, str, list[str]]:
    """How the health check ends, what it says, and what scontrol was told, where gpu-exporter ends with `status`."""
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
            "gpu-exporter: partial: slurm counts 4 GPUs here, and 3 answer\ngpu-exporter: partial: gpu 2: hung\n",
            "gpu 0: fell off; $(reboot) 'x', and 2 more",
        ),
        (4, f"gpu-exporter: partial: gpu 0: {'x' * 999}\n", f"gpu 0: {'x' * 193}"),
        (4, "", "not all GPUs answer"),
    ],
)
def test_a_node_is_drained_for_the_gpu_and_what_is_wrong_with_it_where_the_site_says_so(
    tmp_path: Path, status: int, said: str, reason: str
) -> None:
    assert check(tmp_path, status, said=said) == (0, said or "\n", [])
    assert (tmp_path / "asked").read_text() == "--once --check=devices --timeout=20s\n"
    told = [f"update NodeName=n0 State=DRAIN Reason=gpu-exporter: {reason}"]
    assert check(tmp_path, status, "yes", said) == (0, said or "\n", told)


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
