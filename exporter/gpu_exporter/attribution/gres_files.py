"""Where slurmd has its gres.conf from, and whether what is there now is what it has read."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_exporter.attribution.gres_conf import GpuOrder, GresConfError, order_of, parse_gres_conf
from gpu_exporter.attribution.slurm_words import NodeRecord, SlurmConfig

SLURMD_SLACK_S = 120.0  # slurmd writes a fetched configuration shortly after its start
MAX_CONF = 1024 * 1024  # bytes of a gres.conf; real ones have some kB
REMEDY = "name the file with --attribution.slurm.gres-conf"


def list_places(config: SlurmConfig, node: str, named: Path | None) -> list[Path]:
    """Where slurmd may have its gres.conf from; `named`: the one that the site names, which excludes all others."""
    if named is not None:
        return [named]
    beside = [Path(path).parent for path in (os.environ.get("SLURM_CONF", ""), config.path) if path]
    spool = config.spool.replace("%n", node).replace("%h", os.uname().nodename.partition(".")[0])
    cached = [Path(spool) / "conf-cache"] if spool else []
    directories = [*beside, Path("/run/slurm/conf"), *cached, Path("/etc/slurm")]
    return [directory / "gres.conf" for directory in dict.fromkeys(directories)]


def read_order(places: list[Path], node: str, record: NodeRecord) -> GpuOrder:
    """What IDX means on this node. Several files that are there must agree: which one slurmd read is not known."""
    orders: dict[GpuOrder, Path] = {}
    for path in places:
        try:
            text = _read_text(path)
            changed = _changed_after_start(path, record)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError, GresConfError) as exc:
            return GpuOrder("unknown", problem=f"{path}: {exc}; {REMEDY}")
        if changed:
            return GpuOrder("unknown", problem=changed)
        directory = path.parent
        try:
            lines = parse_gres_conf(text, str(path), lambda name, at=directory: _read_text(at / name))  # type: ignore[misc]
            order = order_of(lines, node, record.configured)
        except GresConfError as exc:
            return GpuOrder("unknown", problem=f"{exc}; {REMEDY}")
        orders.setdefault(order, path)
    if not orders:
        return GpuOrder("unknown", problem=f"no gres.conf at {', '.join(map(str, places))}; {REMEDY}")
    if len(orders) > 1:
        named = " and ".join(map(str, orders.values()))
        return GpuOrder("unknown", problem=f"{named} give the GPUs different orders; {REMEDY}")
    ((order, path),) = orders.items()
    problem = f"{path}: {order.problem}" if order.problem and str(path) not in order.problem else order.problem
    return order._replace(problem=problem)


def _changed_after_start(path: Path, record: NodeRecord) -> str:
    """Why the file may not be what slurmd has read, "" when it is. A fetched copy is written by slurmd itself.

    Raises OSError.
    """
    if record.slurmd_start is None or path.parent.name in ("conf-cache", "conf"):
        return ""
    if path.stat().st_mtime <= record.slurmd_start + SLURMD_SLACK_S:
        return ""
    return f"{path} was changed after slurmd started, which still counts as before: restart slurmd"


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_CONF + 1)
    if len(data) > MAX_CONF:
        raise GresConfError(f"{path}: larger than {MAX_CONF} bytes")
    return data.decode("utf-8")
