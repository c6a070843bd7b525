"""XIDs: the driver's error codes.

They arrive as events, in a thread of their own (sampling/events.py), with --collector.xid.kmsg from the kernel's log
too (sampling/kernel_log.py), and are published for a lost GPU as well, since it is then that they matter: their
families are in exposition/catalog.py.
"""

from __future__ import annotations

from gpu_exporter.collectors.contract import Collector

# XIDs after which NVIDIA's catalogue asks to restart the application (docs.nvidia.com/deploy/xid-errors, sheet of
# October 2025, immediate action RESTART_APP): exceptions of the program's commands and of single engines; 94 is an
# error of the memory that was contained. 43 and 45 end a program after such an error. 109, which some take for the
# program's fault, asks for a reset.
ENGINES = (39, 40, 41, 60, 68, 70, 71, 72, 75, 76, 77, *range(82, 87), 88, 89, *range(96, 106), *range(126, 136), 139)
APPLICATION = frozenset((8, 11, 13, 25, 31, 32, 43, 45, 69, 80, 94, *ENGINES))
# XIDs that it says to ignore: what the board has dealt with (63 a row was remapped, 92 many single-bit errors, 145 a
# link of NVLink that goes on), faults of firmware that were caught, test messages; and 154, which says that
# gpu_recovery_action has changed, also back to none. Their failures have codes of their own (64, 157, 161).
INFORMATION = frozenset((14, 37, 38, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 145, 152, 153, 154, 160))


def classify(xid: int, severity: str = "") -> str:
    """One of model.XID_CLASSES; what is not known to be anything else is the hardware's fault. `severity`: as told."""
    if severity:
        return "hardware" if severity == "fatal" else "information"
    if xid in APPLICATION:
        return "application"
    return "information" if xid in INFORMATION else "hardware"


XID = Collector("xid", (), None)
