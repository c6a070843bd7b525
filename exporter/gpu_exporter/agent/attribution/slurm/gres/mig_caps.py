"""Finds the MIG instance that a capability file (/dev/nvidia-caps/nvidia-capN) opens.

The driver lists every possible instance in /proc/driver/nvidia-caps/mig-minors, as `gpu0/gi7/access 66` and
`gpu0/gi7/ci0/access 67`. The number after `gpu` is the number of the GPU's device file (NVIDIA's MIG User Guide,
"Device Nodes and Capabilities").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_exporter.common.outside import need_whole

PLACE = Path("driver/nvidia-caps/mig-minors")
READ_MAX = 1024 * 1024  # bytes; 32 GPUs have about 100 kB
LINE = re.compile(r"gpu(\d{1,4})/gi(\d{1,4})(?:/ci(\d{1,4}))?/access (\d{1,6})")


def read_caps(procfs: Path) -> Mapping[int, str]:
    """Returns the instance of each capability file: GPU/INSTANCE or GPU/INSTANCE/COMPUTE, by number of the file.

    Empty if the driver has no list.
    """
    try:
        with (procfs / PLACE).open("rb") as file:
            text = file.read(READ_MAX).decode("ascii", "replace")
    except OSError:
        return {}
    matches = [match for line in text.splitlines() if (match := LINE.fullmatch(line.strip()))]
    return {
        need_whole(match[4]): "/".join(part for part in match.groups()[:3] if part is not None) for match in matches
    }


def find_instance(caps: Sequence[int], known: Mapping[int, str]) -> str:
    """Returns the instance that these files open together, as in `read_caps`. "" if they open no
    instance or several.
    """
    opened = sorted({known[cap] for cap in caps if cap in known})  # a name comes before names that begin with it
    if not opened or any(not f"{opened[-1]}/".startswith(f"{name}/") for name in opened):
        return ""
    return opened[-1]
