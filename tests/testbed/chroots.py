"""Root file systems of other Debian releases, and copies of them in which a test changes files as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.testbed.programs import fresh_entry
from tests.testbed.servers import require

# For a Debian release in development: its package lists are valid for a week, and a mirror may be older.
UNDATED = '--aptopt=Acquire::Check-Valid-Until "false"'
# In namespaces of its own, so that nothing remains mounted and no process remains.
ENTER = """set -e
root=$1/root script=$2; shift 2
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$root/../upper,workdir=$root/../work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for folder; do mkdir -p "$root$folder"; mount --bind "$folder" "$root$folder"; done
cat /etc/resolv.conf >"$root/etc/resolv.conf"
# Without exec: systemctl detects a chroot by the root of the first process, and starts nothing there.
chroot "$root" env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root sh -euc "$script"
"""


def debian_root(name: str, suite: str, packages: Sequence[str]) -> Path:
    """A root file system of a Debian release with these packages, built once into the cache (about 20 s)."""
    require("mmdebstrap")
    if os.geteuid() != 0:
        assert not os.environ.get("CI"), "CI runs these tests as root"
        pytest.skip("a chroot needs root")
    with fresh_entry(name) as (target, making):
        if making is not None:
            root = making / "root"
            include = f"--include={','.join(packages)}"
            command = ["mmdebstrap", "--quiet", "--variant=minbase", UNDATED, include, suite, str(root)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            assert done.returncode == 0, done.stderr[-2000:]
            root.rename(target)
    return target


class Chroot:
    """A root file system whose changes are in `folder` only, and remain from one script to the next."""

    def __init__(self, lower: Path, folder: Path) -> None:
        self._lower, self._folder = lower, folder
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)

    def attempt(
        self, script: str, environment: Mapping[str, str] | None = None, folders: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of sh as root. `folders` of the host are seen under their own names."""
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "sh", "-c", ENTER, "enter"]
        return subprocess.run(
            [*command, str(self._folder), script, *map(str, folders)],
            env={"PATH": os.environ["PATH"], "LOWER": str(self._lower), **(environment or {})},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def run(self, script: str, environment: Mapping[str, str] | None = None, folders: Sequence[Path] = ()) -> str:
        """What a script prints. It must not fail."""
        done = self.attempt(script, environment, folders)
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def files(self) -> set[str]:
        """Every path, without the logs, caches and lists of package managers."""
        left_out = (
            "/proc",
            "/dev",
            "/run",
            "/var/log",
            "/var/cache",
            "/var/lib/dpkg",
            "/var/lib/apt",
            "/var/lib/rpm",
            "/root",
        )
        prune = " -o ".join(f"-path {each}" for each in left_out)
        return set(self.run(f"find / -xdev \\( {prune} \\) -prune -o -print").splitlines())
