"""XIDs: error codes of NVIDIA's driver.

The driver reports them as events, which a separate thread receives (sampling/events.py). With --collector.xid.kmsg they
also come from the kernel's log (sampling/kernel_log.py). XIDs of a lost GPU are published too, because they explain the
loss. Their metric families are in exposition/catalog.py.
"""

from __future__ import annotations

from gpu_exporter.agent.collectors.contract import Collector

# XIDs after which NVIDIA's catalogue asks to restart the application (docs.nvidia.com/deploy/xid-errors, sheet of
# October 2025, immediate action RESTART_APP): exceptions of the program's commands and of single engines. 94 is a
# contained memory error. 43 and 45 end a program after such an error. 109 is not in this list: it asks for a reset,
# although some sources call it the program's fault.
ENGINES = (39, 40, 41, 60, 68, 70, 71, 72, 75, 76, 77, *range(82, 87), 88, 89, *range(96, 106), *range(126, 136), 139)
APPLICATION = frozenset((8, 11, 13, 25, 31, 32, 43, 45, 69, 80, 94, *ENGINES))
# XIDs that the catalogue says to ignore: events that the board has handled (63 a row was remapped, 92 many single-bit
# errors, 145 an NVLink link that continues to work), firmware faults that were caught, test messages, 154 (a change of
# gpu_recovery_action, also back to none), and 162 (power smoothing works again; its loss is 163). Failed attempts have
# their own codes (64, 157, 161).
INFORMATION = frozenset(
    (14, 37, 38, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 145, 152, 153, 154, 160, 162)
)


LAST = 172  # in the catalogue


def classify(xid: int, severity: str = "") -> str:
    """Returns the class of an XID, from model.XID_CLASSES. An unknown code counts as hardware.

    `severity`: "fatal" or "nonfatal", as the driver reports it; "" if missing.
    """
    if severity:
        return "hardware" if severity == "fatal" else "information"
    if xid in APPLICATION:
        return "application"
    return "information" if xid in INFORMATION else "hardware"


def ends_work(xid: int, kind: str) -> bool:
    """Returns whether the program on the GPU cannot continue after this XID. False if the catalogue lacks the XID."""
    return kind == "application" or is_fault(xid, kind)


def is_fault(xid: int, kind: str) -> bool:
    """Returns whether the XID proves a hardware fault. False if the catalogue does not list the XID."""
    return kind == "hardware" and xid <= LAST


XID = Collector("xid", (), None)
