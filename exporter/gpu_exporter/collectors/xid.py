"""XIDs: the driver's error codes.

They arrive as events, in a thread of their own (sampling/events.py), with --collector.xid.kmsg from the kernel's log
too (sampling/kernel_log.py), and are published for a lost GPU as well, since it is then that they matter: their
families are in exposition/catalog.py.
"""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector

# XIDs that a user's program raises on healthy hardware; NVIDIA's device plugin ignores the same ones for its health.
APPLICATION = frozenset((13, 31, 43, 45, 68, 109))
# XIDs that record what the board has already dealt with, by NVIDIA's catalogue: 63 a row was remapped (before Ampere a
# page retired), 92 many single-bit errors, all of them corrected. Their failures have codes of their own (64, 48, 94).
INFORMATION = frozenset((63, 92))


def classify(xid: int) -> str:
    """One of model.XID_CLASSES; what is not known to be anything else is the hardware's fault."""
    if xid in APPLICATION:
        return "application"
    return "information" if xid in INFORMATION else "hardware"


XID = Collector("xid", (), None)
