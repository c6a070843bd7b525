"""XIDs: the driver's error codes.

They arrive as events, in a thread of their own (sampling/events.py), and are published for a lost GPU too, since it is
then that they matter: their families are in exposition/catalog.py.
"""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector

# XIDs that a user's program raises on healthy hardware; NVIDIA's device plugin ignores the same ones for its health.
APPLICATION = frozenset((13, 31, 43, 45, 68, 109))


def classify(xid: int) -> str:
    """`application` or `hardware`; what is not known to be the program's fault is the hardware's."""
    return "application" if xid in APPLICATION else "hardware"


XID = Collector("xid", (), None)
