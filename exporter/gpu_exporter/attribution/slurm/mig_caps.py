"""Which MIG instance a capability file opens: /dev/nvidia-caps/nvidia-capN, by /proc/driver/nvidia-caps/mig-minors.

The driver lists there every instance that could be, `gpu0/gi7/access 66` and `gpu0/gi7/ci0/access 67`, with GPUs by the
number of their device file (NVIDIA's MIG User Guide, "Device Nodes and Capabilities").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_exporter.outside import need_whole

PLACE = Path("driver/nvidia-caps/mig-minors")
READ_MAX = 1024 * 1024  # 32 GPUs have some 100 kB
LINE = re.compile(r"gpu(\d{1,4})/gi(\d{1,4})(?:/ci(\d{1,4}))?/access (\d{1,6})")


def read_caps(procfs: Path) -> Mapping[int, str]:
    """By number of the capability file: GPU/INSTANCE, or GPU/INSTANCE/COMPUTE; empty where the driver lists none."""
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
    """The one instance that these files open together, as in `read_caps`; "" where they open none, or several."""
    opened = sorted({known[cap] for cap in caps if cap in known})  # what begins another name comes before it
    if not opened or any(not f"{opened[-1]}/".startswith(f"{name}/") for name in opened):
        return ""
    return opened[-1]
