"""Finds the gres.conf of slurmd, and checks whether slurmd has read its present content."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.gres.conf import (
    GpuOrder,
    GresConfError,
    order_of,
    parse_gres_conf,
    shares_gpus,
)
from gpu_exporter.agent.attribution.slurm.gres.epochs import GresContent
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig
from gpu_exporter.common.files import open_named, read_within
from gpu_exporter.common.vendor import Vendor

FETCHED = Path("/run/slurm/conf")  # directory in which slurmd keeps its fetched configuration for commands
SLACK_S = 1.0  # SlurmdStartTime is a whole second; slurmd started within that second
MAX_CONF = 1024 * 1024  # bytes of a gres.conf; real files have a few kB
REMEDY = "name the file with --attribution.slurm.gres-conf"


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


def read_order(places: Sequence[ConfPlace], node: str, record: NodeRecord, vendor: Vendor) -> GresContent:
    """Reads from gres.conf which GPU each IDX of this node means.

    If several files exist, they must agree, because the exporter cannot see which file slurmd read.
    """
    orders: dict[GpuOrder, Path] = {}
    since: float | None = record.slurmd_start
    changed: tuple[float, Path] | None = None
    shares = False
    for path, fetched in places:
        try:
            order, newest, file, has_shares = _read_one(path, node, record, vendor)
        except FileNotFoundError:
            continue
        except GresConfError as exc:
            return _unknown(f"{exc}; {REMEDY}")
        except OSError as exc:
            return _unknown(f"{path}: {exc.strerror}; {REMEDY}")
        except UnicodeDecodeError as exc:
            return _unknown(f"{path}: {exc}; {REMEDY}")
        orders.setdefault(order, path)
        shares = shares or has_shares
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
    return GresContent(order, since, path=str(path), shares=shares)


def _unknown(problem: str) -> GresContent:
    return GresContent(GpuOrder("unknown", problem=problem))


def _read_one(path: Path, node: str, record: NodeRecord, vendor: Vendor) -> tuple[GpuOrder, float, Path, bool]:
    """Returns the order in one file, the time and path of the last changed file, and whether jobs can share GPUs.

    The last changed file is this file or an included file. Raises OSError, UnicodeDecodeError, GresConfError.
    """
    dates: list[tuple[float, Path]] = []
    lines = parse_gres_conf(_read_text(path, dates), str(path), lambda name: _read_text(path.parent / name, dates))
    order = order_of(lines, node, record.configured, vendor, lambda name: _minor_of(name, vendor))
    newest, file = max(dates)
    return order, newest, file, shares_gpus(lines, node)


def _minor_of(name: str, vendor: Vendor) -> int | None:
    """Returns the minor number of a GPU's device file. None if it is missing (as in a container) or is not a GPU."""
    try:
        status = Path(name).stat()
    except (OSError, ValueError):
        return None
    is_ours = stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == vendor.device_major
    return os.minor(status.st_rdev) if is_ours else None


def _read_text(path: Path, dates: list[tuple[float, Path]]) -> str:
    """Returns the text of a file. Appends the time of its last change (content or attributes) to `dates`.

    Raises OSError, UnicodeDecodeError.
    """
    with open_named(path) as file:
        status = os.fstat(file.fileno())
        data = read_within(file, path, MAX_CONF)
    dates.append((max(status.st_mtime, status.st_ctime), path))
    return data.decode("utf-8")
