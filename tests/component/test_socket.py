"""The daemon's unix socket: its readers under any umask, and the output of `--once` for other users."""

from __future__ import annotations

import contextlib
import grp
import os
import shutil
import socket as sockets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.runtime.once import DaemonUnreadable, read_from_daemon, run_once
from gpu_exporter.common.model.views import AgentStatus, View
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, run_exporter, wait_for

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")
NOBODY = 65534


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory that does not exist yet, below a folder that every user can enter."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    yield base / "state"
    shutil.rmtree(base)


def start(processes: Processes, environment: dict[str, str], state: Path, umask: str, *flags: str) -> Path:
    """Start a daemon with this umask. Returns its socket."""
    port = free_port()
    command = [*GPU_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", f"--state.directory={state}", *QUIET, *flags]
    processes.start(["sh", "-c", f'umask {umask}; exec "$@"', "sh", *command], environment)
    wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "the daemon")
    return state / "gpu-exporter.sock"


@contextlib.contextmanager
def as_somebody_else(socket: Path, *, in_group: bool = False) -> Iterator[None]:
    """Run the block as another user. Without root it runs as the same user, whom the socket's mode then excludes."""
    if os.geteuid() != 0:
        if not in_group:
            socket.chmod(0)
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(os.getgid() if in_group else NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(groups)


@pytest.mark.parametrize("umask", ["000", "077"])
def test_only_the_group_can_read_the_socket_under_any_umask(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, state: Path, umask: str
) -> None:
    socket = start(processes, nvml_environment, state, umask)
    assert socket.stat().st_mode & 0o777 == 0o660
    assert state.stat().st_mode & 0o777 == 0o755  # the group can reach the socket, and no other user can replace it
    assert {path.name: path.stat().st_mode & 0o022 for path in state.iterdir() if path != socket} == {
        path.name: 0 for path in state.iterdir() if path != socket
    }
    with as_somebody_else(socket, in_group=True):
        assert "gpu_driver_up" in (read_from_daemon(socket, "prometheus", 5.0) or "")
    with as_somebody_else(socket), pytest.raises(DaemonUnreadable) as refused:
        read_from_daemon(socket, "prometheus", 5.0)
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert str(refused.value) == (
        f"{socket}: not readable as uid {uid}, only for group {grp.getgrgid(socket.stat().st_gid).gr_name}; join its group, or start the daemon with "
        "--web.socket-mode=0666"
    )


@pytest.mark.parametrize(("mode", "bits"), [("0666", 0o666), ("600", 0o600)])
def test_a_site_can_open_or_close_the_socket(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    state: Path,
    mode: str,
    bits: int,
) -> None:
    socket = start(processes, nvml_environment, state, "077", f"--web.socket-mode={mode}")
    assert socket.stat().st_mode & 0o777 == bits
    if bits & 0o006:
        with as_somebody_else(socket, in_group=True):
            assert "gpu_driver_up" in (read_from_daemon(socket, "prometheus", 5.0) or "")


def test_once_gives_the_reason_for_reading_the_gpus_itself(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    state: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    socket = start(processes, nvml_environment, state, "022")
    status = AgentStatus("TEST", "nvml", False, "no driver", 0, 0, 1.0, None)
    with as_somebody_else(socket):
        assert run_once(lambda: View(0.0, status, (), ()), "prometheus", None, 5.0, socket, "nvml") == 0
    shown = capsys.readouterr()
    assert 'gpu_exporter_build_info{version="TEST"' in shown.out
    first, second = shown.err.splitlines()
    assert first.startswith(f"gpu-exporter: {socket}: not readable as uid ")
    assert first.endswith("; showing a single reading without history")
    assert second == "gpu-exporter: no GPU is expected here: no driver"


def test_once_without_a_daemon_does_not_mention_one(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, state: Path
) -> None:
    for _ in range(2):
        done = run_exporter("--once", *QUIET, f"--state.directory={state}", environment=nvml_environment)
        assert "sock" not in done.stderr
        state.mkdir(exist_ok=True)


@pytest.mark.parametrize("mode", ["rw", "0999", "12345", "0o660", ""])
def test_an_invalid_socket_mode_is_refused(mode: str) -> None:
    done = run_exporter(f"--web.socket-mode={mode}")
    assert done.returncode == 2
    assert f"argument --web.socket-mode: {mode!r} is not a file mode such as 0660" in done.stderr


def plant(state: Path) -> dict[str, bytes | None]:
    """What another user may make in a directory with a sticky bit before the exporter does: pipes, and a forged list.

    Returns the contents of the directory.
    """
    state.mkdir()
    for name in ("state", "slurm-jobs.json", "slurm-orders.json", "slurm-users.json", "identity.key", "lock"):
        os.mkfifo(state / name, 0o666)
    (state / "devices.json").write_text('{"version": 1, "boot_id": "x", "devices": [], "seen": {}, "left_out": []}')
    state.chmod(0o1777)
    return {path.name: path.read_bytes() if path.is_file() else None for path in state.iterdir()}


def test_a_state_directory_in_which_every_user_may_write_is_not_used_by_any_part(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, state: Path
) -> None:
    planted = plant(state)
    refusal = f"{state}: every user can write in it (mode 1777): chmod o-w; "
    port = free_port()
    flags = [f"--state.directory={state}", "--attribution.slurm", "--no-attribution.kubelet"]
    command = [*GPU_EXPORTER, f"--web.listen-address=127.0.0.1:{port}", *flags]
    running = processes.start(command, nvml_environment)
    assert "gpu_driver_up" in wait_for(lambda: fetch(f"http://127.0.0.1:{port}/metrics"), "the daemon")
    assert f"{refusal}the exporter does not use this directory, so counters start at 0" in running.log()
    assert {path.name: path.read_bytes() if path.is_file() else None for path in state.iterdir()} == planted


def test_once_does_not_ask_a_daemon_whose_socket_any_user_could_have_made(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, state: Path
) -> None:
    planted = plant(state)
    with sockets.socket(sockets.AF_UNIX) as forged:
        forged.bind(str(state / "gpu-exporter.sock"))
        forged.listen()
        forged.setblocking(False)
        out = run_exporter("--once", *QUIET, f"--state.directory={state}", environment=nvml_environment)
        with pytest.raises(BlockingIOError):
            forged.accept()
    refusal = f"{state}: every user can write in it (mode 1777): chmod o-w; the command ignores this directory"
    assert f"gpu-exporter: {refusal}" in out.stderr
    assert "gpu_driver_up" in out.stdout
    (state / "gpu-exporter.sock").unlink()
    assert {path.name: path.read_bytes() if path.is_file() else None for path in state.iterdir()} == planted
