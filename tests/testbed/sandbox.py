"""Namespaces in which containerd and a kubelet run as on a node; when they end, everything inside is removed.

The kubelet uses fixed paths, cgroups, mounts and sysctls of the machine. Here it gets a mount namespace with scratch
folders over /var/lib, /var/log and /run, files over the sysctls that it sets, its own cgroup, and a process namespace
whose end kills every process in it. A janitor outside waits for the end of this process, for any reason, and then
removes cgroups and scratch folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.testbed.processes import Processes, Running, wait_for

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "gpu-exporter-test-"
SYSCTLS = (  # set by the kubelet
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
INIT = """
set -e
mount --make-rprivate /
mount --make-rshared /
mount -t proc proc /proc
for folder in lib log; do mount --bind "$1/var-$folder" /var/$folder; done
cat /etc/resolv.conf > "$1/resolv.conf"  # with systemd-resolved it is a link into /run
target=$(readlink -f /etc/resolv.conf)
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lock
case $target in /run/*) mkdir -p "${target%/*}"; cp "$1/resolv.conf" "$target" ;; esac
n=0
for name in $2; do
  [ -e /proc/sys/$name ] || continue
  n=$((n + 1))
  cat /proc/sys/$name > "$1/sysctl-$n"
  mount --bind "$1/sysctl-$n" /proc/sys/$name
done
touch "$1/ready"
# The first process of the namespace collects orphans, as init does.
while :; do sleep 3600 & wait $!; done
"""
JANITOR = """
init=
while read -r line; do init=$line; done
while [ -n "$init" ] && [ -d "/proc/$init" ]; do
  # A runtime that was killed while it had stopped a container left it frozen, and nothing frozen ends.
  find "$2/freezer/$3" -name freezer.state 2>/dev/null | while read -r file; do echo THAWED > "$file"; done
  sleep 0.05
done
for root in "$2" "$2"/*; do
  [ -d "$root/$3" ] || continue
  n=0
  while [ -d "$root/$3" ] && [ $n -lt 300 ]; do
    find "$root/$3" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    n=$((n + 1))
  done
  [ ! -d "$root/$3" ] || exit 1
done
rm -rf --one-file-system "$1"
"""


class Sandbox:
    """One set of namespaces; needs root."""

    def __init__(self, processes: Processes) -> None:
        if os.geteuid() != 0:
            assert not os.environ.get("CI"), "CI runs the kubelet tests as root"
            pytest.skip("namespaces and cgroups need root")
        if missing := lacks():
            assert not os.environ.get("CI"), missing
            pytest.skip(missing)
        self._processes = processes
        self.scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.name = self.scratch.name
        self._janitor = subprocess.Popen(
            ["setsid", "sh", "-c", JANITOR, "janitor", str(self.scratch), str(CGROUPS), self.name],
            stdin=subprocess.PIPE,
        )
        self._outer: Running | None = None
        try:
            for folder in ("var-lib", "var-log"):
                (self.scratch / folder).mkdir()
            self._make_cgroups()
            self._outer = processes.start(
                [
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--propagation", "private"),
                    *("sh", "-c", INIT, "sandbox", self.scratch, " ".join(SYSCTLS)),
                ]
            )
            wait_for((self.scratch / "ready").exists, "the sandbox")
            self.init_pid = children(self._outer.process.pid)[0]
            assert self._janitor.stdin is not None
            self._janitor.stdin.write(f"{self.init_pid}\n".encode())
            self._janitor.stdin.flush()
        except BaseException:
            self.close()
            raise

    def _make_cgroups(self) -> None:
        for controller in CGROUPS.iterdir():
            if not controller.is_dir() or controller.is_symlink():
                continue
            folder = controller / self.name
            folder.mkdir()
            if controller.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):  # a cgroup with an empty file accepts no process
                    (folder / file).write_text((controller / file).read_text())

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs `command` inside the sandbox."""
        return ["nsenter", f"--target={self.init_pid}", "--mount", "--pid", "--wd=/", "--", *map(str, command)]

    def start(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Inside:
        """Start a program inside the sandbox."""
        return Inside(self._processes.start(self.command(*command), environment, name=Path(command[0]).name))

    def run(self, *command: str | Path, timeout_s: float = 120.0) -> str:
        """Run a program inside the sandbox to its end; returns its output."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def close(self) -> None:
        """End everything inside, and wait until all of it is removed."""
        if self._outer is not None:
            self._outer.stop(signal.SIGKILL)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        assert self._janitor.wait(300) == 0, f"the janitor could not remove all of {self.name}"


class Inside:
    """A program inside the sandbox. nsenter waits for it outside, and does not forward signals."""

    def __init__(self, running: Running) -> None:
        self._running = running
        found = wait_for(lambda: children(running.process.pid) or None, "the program to start")
        self.pid = found[0]

    def log(self) -> str:
        return self._running.log()

    def is_alive(self) -> bool:
        return self._running.process.poll() is None

    def stop(self, with_signal: int = signal.SIGTERM, timeout_s: float = 10.0) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, with_signal)
        try:
            self._running.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._running.process.wait(timeout_s)


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def lacks() -> str:
    """Why a sandbox is not possible here, "" if it is possible."""
    if (CGROUPS / "cgroup.controllers").exists():
        return "the test bed's kubelet needs the controllers of cgroup v1; this machine has only v2"
    probe = ["unshare", "--mount", "--pid", "--fork", "true"]
    if not os.access(CGROUPS / "memory", os.W_OK) or subprocess.run(probe, capture_output=True, check=False).returncode:
        return "namespaces and cgroups need a root with all of its privileges"
    return ""


def left_behind(name: str = PREFIX) -> list[str]:
    """Cgroups, scratch folders and mounts of one sandbox, or of all."""
    roots = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
    cgroups = [str(path) for root in roots for path in root.glob(f"{name}*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"/{name}" in line]
    return cgroups + mounts + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}*")]
