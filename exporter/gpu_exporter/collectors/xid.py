"""XIDs: the driver's error codes.

They arrive as events, in a thread of their own (sampling/events.py), with --collector.xid.kmsg from the kernel's log
too (sampling/kernel_log.py), and are published for a lost GPU as well, since it is then that they matter: their
families are in exposition/catalog.py.
"""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector

# XIDs after which NVIDIA's catalogue asks to restart the application, and nothing else
# (docs.nvidia.com/deploy/xid-errors, resolution bucket RESTART_APP). 94 is an error of the memory that was contained.
# 109, which some take for the program's fault, asks for a reset.
APPLICATION = frozenset((8, 13, 31, 41, 43, 45, 68, 94))
# XIDs that record what the board has already dealt with: 63 a row was remapped (before Ampere a page retired), 92 many
# single-bit errors, all of them corrected, 145 a link of NVLink that goes on. Their failures have codes of their own.
INFORMATION = frozenset((63, 92, 145))


def classify(xid: int, severity: str = "") -> str:
    """One of model.XID_CLASSES; what is not known to be anything else is the hardware's fault. `severity`: as told."""
    if severity:
        return "hardware" if severity == "fatal" else "information"
    if xid in APPLICATION:
        return "application"
    return "information" if xid in INFORMATION else "hardware"


XID = Collector("xid", (), None)
