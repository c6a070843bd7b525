"""Finds the node's boot time, if dates of files can be compared with it.

A file's date is by the clock of its last change. A node may boot with a wrong clock, which NTP or a person sets later.
Then a date before the boot proves nothing. The init system makes the link /dev/fd at boot, before the network is up,
and nothing changes this link later. So its date shows the clock at boot.
"""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.common.procfs import Procfs

WITNESS = Path("/dev/fd")
# How far the date of the link may be from the boot time by the present clock: initrd and a correction by NTP take less.
# A container that started later has a later link.
EARLY_S = 600.0
# How long before the boot a file must have been changed last. Longer than EARLY_S, also for a file server whose clock
# differs.
BEFORE_S = 3600.0


def find_boot(procfs: Procfs, witness: Path = WITNESS) -> float | None:
    """Returns the boot time (Unix seconds). None if it is unknown, or if the clock was set since then."""
    boot = procfs.boot_wall()
    try:
        at_boot = witness.lstat().st_ctime
    except OSError:
        return None
    return boot if boot is not None and abs(at_boot - boot) <= EARLY_S else None
