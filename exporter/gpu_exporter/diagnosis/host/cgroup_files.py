"""Reads files of cgroups in both layouts: version 2 has one tree, version 1 has one tree per controller."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from gpu_exporter.common.slurm.hostlist import parse_ranges

READ_MAX = 65_536  # bytes of one file; io.stat has some 100 bytes per block device
CPUACCT = ("cpuacct", "cpu,cpuacct", "cpuacct,cpu")
CPU = ("cpu", *CPUACCT[1:])
BLKIO, CPUSET, MEMORY = ("blkio",), ("cpuset",), ("memory",)
US, NS = 1e-6, 1e-9


class CgroupFiles:
    """The cgroup trees below `root`, where the host mounts /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.is_v2 = (root / "cgroup.controllers").exists()

    def tree(self, names: tuple[str, ...]) -> Path | None:
        """Finds the root folder of a controller, given by one or several names. None if it is not mounted."""
        if self.is_v2:
            return self._root
        return next((path for path in (self._root / name for name in names) if path.is_dir()), None)

    def text(self, names: tuple[str, ...], place: PurePosixPath, file: str) -> str | None:
        """Reads one file of a controller. None if the controller is missing, or if `read_text` returns None."""
        tree = self.tree(names)
        return None if tree is None else read_text(tree / place / file)

    def read_quota(self, place: PurePosixPath) -> float | None:
        """Returns the number of CPUs that the quota of this cgroup allows at the same time. None without a quota."""
        if self.is_v2:
            quota, _, period = (self.text(CPU, place, "cpu.max") or "").strip().partition(" ")
            return ratio(quota, period)
        quota = self.text(CPU, place, "cpu.cfs_quota_us") or ""
        return ratio(quota, self.text(CPU, place, "cpu.cfs_period_us") or "")

    def read_cpus(self, place: PurePosixPath) -> float | None:
        """Returns how many CPUs quota and cpuset of this cgroup allow at a time. None if nothing is known."""
        cpuset = self.text(CPUSET, place, "cpuset.cpus.effective" if self.is_v2 else "cpuset.effective_cpus")
        return least(self.read_quota(place), count(cpuset))

    def read_traffic(self, place: PurePosixPath) -> float | None:
        """Bytes read from and written to block devices. None without the block I/O controller."""
        if not self.is_v2:
            return field(self._read_blkio(place), "Total")
        text = self.text(BLKIO, place, "io.stat")
        return None if text is None else total(text, ("rbytes=", "wbytes="))

    def read_written(self, place: PurePosixPath) -> float | None:
        """Bytes written to block devices. None without the block I/O controller."""
        if self.is_v2:
            text = self.text(BLKIO, place, "io.stat")
            return None if text is None else total(text, ("wbytes=",))
        text = self._read_blkio(place)
        if text is None:
            return None
        words = (line.split() for line in text.splitlines())
        return sum(number(each[2]) or 0.0 for each in words if len(each) == 3 and each[1] == "Write")

    def _read_blkio(self, place: PurePosixPath) -> str | None:
        """Reads the traffic to block devices, including child cgroups. Kernels before 4.9 omit the children."""
        name = "blkio.throttle.io_service_bytes"
        text = self.text(BLKIO, place, f"{name}_recursive")
        return self.text(BLKIO, place, name) if text is None else text


def read_text(path: Path, *, truncates: bool = False) -> str | None:
    """Reads a file. None if it cannot be read or is longer than READ_MAX. `truncates`: cuts a longer file instead."""
    try:
        with path.open("rb") as file:
            data = file.read(READ_MAX)
    except OSError:
        return None
    return data.decode("ascii", "replace") if len(data) < READ_MAX or truncates else None


def field(text: str | None, name: str) -> float | None:
    """Returns the number that follows a name at the start of a line."""
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return number(value)
    return None


def total(text: str, prefixes: tuple[str, ...]) -> float:
    """Returns the sum of the numbers in all words (`name=number`) with one of these prefixes."""
    numbers = (number(word.partition("=")[2]) for word in text.split() if word.startswith(prefixes))
    return sum(each for each in numbers if each is not None)


def number(text: str | None) -> float | None:
    """Returns a number of decimal digits, None for anything else."""
    text = (text or "").strip()
    return float(text) if text.isdecimal() and text.isascii() else None


def ratio(quota: str, period: str) -> float | None:
    """Returns the number of CPUs from quota and period (microseconds). None without a quota, written as `max` or -1."""
    most, each = number(quota), number(period)
    return most / each if most and each else None


def count(text: str | None) -> float | None:
    """Returns the number of CPUs in a list such as 0-3,8; None if the list is empty or invalid."""
    text = (text or "").strip()
    try:
        return float(len(parse_ranges(text))) if text else None
    except ValueError:
        return None


def least(*limits: float | None) -> float | None:
    """Returns the smallest known limit; None if no limit is known."""
    return min((limit for limit in limits if limit is not None), default=None)
