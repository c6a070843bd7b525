"""Finds the gres.conf of slurmd, and checks which slurmd has read its present content."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.gres.boot import BEFORE_S
from gpu_exporter.agent.attribution.slurm.gres.conf import (
    GpuOrder,
    GresConfError,
    GresLine,
    Shares,
    count_files,
    find_shares,
    order_of,
    parse_gres_conf,
)
from gpu_exporter.agent.attribution.slurm.gres.epochs import GresContent
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig
from gpu_exporter.common.files import open_named, read_within
from gpu_exporter.common.vendor import Vendor

FETCHED = Path("/run/slurm/conf")  # directory in which slurmd keeps its fetched configuration for commands
SLACK_S = 1.0  # SlurmdStartTime is a whole second; slurmd started within that second
MAX_CONF = 1024 * 1024  # bytes of a gres.conf; real files have a few kB
LINKS_MAX = 40  # as the kernel's limit for one path
REMEDY = "name the file with --attribution.slurm.gres-conf"


class _Replaced(GresConfError):
    """The host has replaced the file, and a mount of one file keeps the old one."""


class _ConfFile(NamedTuple):
    """The content of one gres.conf.

    - `newest`, `newest_path`: time and path of the last change, of this file or of an included file.
    - `shares`: the GPUs that jobs can share.
    - `by_names`: the order depends only on the text of the file.
    """

    order: GpuOrder
    newest: float
    newest_path: Path
    shares: Shares
    by_names: bool


class ConfPlace(NamedTuple):
    """A path of a gres.conf that slurmd may have read. `fetched`: slurmd's own copy, which slurmd uses if it exists."""

    path: Path
    fetched: bool = False


def list_places(config: SlurmConfig, node: str, named: Path | None) -> list[ConfPlace]:
    """Returns the possible paths of slurmd's gres.conf. `named`: the administrator's path, which is
    then the only one.
    """
    spool = config.spool.replace("%n", node).replace("%h", os.uname().nodename.partition(".")[0])
    copies = [FETCHED, *([Path(spool) / "conf-cache"] if spool else [])]
    beside = [Path(path).parent for path in (os.environ.get("SLURM_CONF", ""), config.path) if path]
    directories = [named.parent] if named is not None else [*beside, *copies, Path("/etc/slurm")]
    name = named.name if named is not None else "gres.conf"
    return [ConfPlace(directory / name, directory in copies) for directory in dict.fromkeys(directories)]


def read_order(
    places: Sequence[ConfPlace], node: str, record: NodeRecord, vendor: Vendor, boot: float | None = None
) -> GresContent:
    """Finds the GPU of each IDX of this node in gres.conf.

    If several files exist, they must agree, because the exporter cannot see which file slurmd read. `boot`: the node's
    boot time in Unix seconds, None if dates of files cannot be compared with it.
    """
    orders: dict[GpuOrder, Path] = {}
    since: float | None = record.slurmd_start
    changed: tuple[float, Path] | None = None
    shares: dict[int, frozenset[str]] = {}
    since_boot = boot
    for path, fetched in places:
        try:
            order, newest, file, found, by_names = _read_one(path, node, record, vendor)
        except FileNotFoundError:
            continue
        except _Replaced as exc:
            return _unknown(str(exc))
        except GresConfError as exc:
            return _unknown(f"{exc}; {REMEDY}")
        except OSError as exc:
            return _unknown(f"{path}: {exc.strerror}; {REMEDY}")
        except UnicodeDecodeError as exc:
            return _unknown(f"{path}: {exc}; {REMEDY}")
        orders.setdefault(order, path)
        shares |= {index: kinds | shares.get(index, frozenset()) for index, kinds in found.items()}
        if boot is None or newest >= boot - BEFORE_S or not by_names:
            since_boot = None
        if record.slurmd_start is None or newest < record.slurmd_start + SLACK_S:
            continue
        if fetched:  # slurmd wrote it, at its start or when it read its configuration again
            since = newest if since is None else max(since, newest)
        else:
            changed = max(changed or (newest, file), (newest, file))
    if not orders:
        looked = ", ".join(str(place.path) for place in places)
        return _unknown(f"no gres.conf at {looked}; {REMEDY}")
    if len(orders) > 1:
        named = " and ".join(map(str, orders.values()))
        return _unknown(f"{named} give the GPUs different orders; {REMEDY}")
    ((order, path),) = orders.items()
    problem = f"{path}: {order.problem}" if order.problem and str(path) not in order.problem else order.problem
    order = order._replace(problem=problem)
    if changed is not None:
        return GresContent(order, None, changed[0], str(changed[1]), shares)
    return GresContent(order, since, path=str(path), shares=shares, boot=since_boot)


def count_named(places: Sequence[ConfPlace], node: str, vendor: Vendor) -> int:
    """Returns how many GPUs the first readable file names for this node, 0 if it names none or cannot be read."""
    for path, _ in places:
        try:
            return count_files(_read_lines(path, []), node, vendor)
        except (OSError, UnicodeDecodeError, GresConfError):
            continue
    return 0


def _unknown(problem: str) -> GresContent:
    return GresContent(GpuOrder("unknown", problem=problem))


def _read_one(path: Path, node: str, record: NodeRecord, vendor: Vendor) -> _ConfFile:
    """Raises OSError, UnicodeDecodeError, GresConfError."""
    dates: list[tuple[float, Path]] = []
    lines = _read_lines(path, dates)
    order = order_of(lines, node, record.configured, vendor, lambda name: _minor_of(name, vendor))
    newest, file = max(dates)
    shares = find_shares(lines, node, order, vendor, lambda name: _minor_of(name, vendor))
    return _ConfFile(order, newest, file, shares, _is_by_names(order, lines, node, record, vendor))


def _is_by_names(order: GpuOrder, lines: list[GresLine], node: str, record: NodeRecord, vendor: Vendor) -> bool:
    """Returns whether the order depends only on the names of device files in gres.conf.

    Otherwise it depends on the links in /dev, on the order of the types in slurm.conf, or on NVML (AutoDetect).
    """
    if order.kind != "minor" or len(record.configured) != 1:
        return False
    try:
        return order == order_of(lines, node, record.configured, vendor)
    except GresConfError:
        return False


def _read_lines(path: Path, dates: list[tuple[float, Path]]) -> list[GresLine]:
    """Returns the lines of a file and of the files that it includes. `dates`, errors: see _read_text, _read_one."""
    return parse_gres_conf(_read_text(path, dates), str(path), lambda name: _read_text(path.parent / name, dates))


def _minor_of(name: str, vendor: Vendor) -> int | None:
    """Returns the minor number of a GPU's device file. None if it is missing (as in a container) or is not a GPU."""
    try:
        status = Path(name).stat()
    except (OSError, ValueError):
        return None
    is_ours = stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == vendor.device_major
    return os.minor(status.st_rdev) if is_ours else None


def _read_text(path: Path, dates: list[tuple[float, Path]]) -> str:
    """Returns the text of a file. Appends the time of its last change (content or attributes) to `dates`, and the times
    of the links on its path, because a new link leads to another file with an old date.

    Raises OSError, UnicodeDecodeError, GresConfError.
    """
    with open_named(path) as file:
        status = os.fstat(file.fileno())
        if not status.st_nlink:
            raise _Replaced(f"{path}: the host has replaced this file: mount its directory instead of the file")
        data = read_within(file, path, MAX_CONF)
    dates.append((max(status.st_mtime, status.st_ctime, *_list_link_dates(path)), path))
    return data.decode("utf-8")


def _list_link_dates(path: Path) -> Iterator[float]:
    """Yields the time of the last change of each link on a path. Raises OSError."""
    at, parts, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while parts:
        part = parts.pop()
        each = at.parent if part == ".." else at / part
        if not each.is_symlink():
            at = each
            continue
        links += 1
        if links > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        yield each.lstat().st_ctime
        target = each.readlink()
        at = Path("/") if target.is_absolute() else at
        parts += reversed([word for word in target.parts if word != "/"])
