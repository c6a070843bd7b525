"""Whether a GPU that the driver does not list is missing, away, asleep or none of ours: one table. Pure.

The first row that fits decides. A GPU is missing until it is proved away; what was never seen here is missed only where
the kernel shows that it ought to work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from gpu_exporter.inventory.pci import UNBOUND, PciFunction

PROVEN_S = 600.0  # so long a card has answered before another one of its kind that is unbound counts as missing


class Case(NamedTuple):
    """What is known of one GPU that the driver does not list.

    `function`: on the bus, None where the bus does not show it. `managed`: the driver that ours should have. `is_gone`:
    that driver has no GPU, and its module is not loaded. `seen`: it was up in this boot, in an earlier one, or never.
    `probe_failed`: the kernel's log says that the driver could not start it, and it has not answered since.
    `has_sibling`: a card of its kind has answered for PROVEN_S. `is_subset`: this container or job was given a part of
    the GPUs.
    """

    function: PciFunction | None
    managed: str
    is_gone: bool = False
    seen: Literal["now", "before", "never"] = "never"
    probe_failed: bool = False
    has_sibling: bool = False
    is_subset: bool = False


class Standing(NamedTuple):
    """`kind`: missing (with a reason, "" where others know a better one), away, asleep, or foreign: never ours."""

    kind: Literal["missing", "away", "asleep", "foreign"]
    reason: str = ""


def _driver(case: Case) -> str:
    return case.function.driver if case.function is not None else ""


Row = tuple[Callable[[Case], bool], Callable[[Case], Standing]]
TABLE: tuple[Row, ...] = (
    # Not on the bus as far as it can be read: only who was seen here is missed.
    (
        lambda case: case.function is None,
        lambda case: Standing("foreign" if case.seen == "never" else "missing"),
    ),
    (
        lambda case: _driver(case) not in (case.managed, UNBOUND),
        lambda case: Standing("away", f"bound to kernel driver {_driver(case)}"),
    ),
    (
        lambda case: (
            case.function is not None
            and case.function.override not in ("", case.managed)
            and _driver(case) != case.managed
        ),
        lambda case: Standing("away", f"its driver_override is {case.function.override if case.function else ''}"),
    ),
    (
        lambda case: _driver(case) == case.managed and case.function is not None and case.function.asleep,
        lambda case: Standing("asleep", "asleep: runtime power management has suspended it"),
    ),
    (lambda case: _driver(case) == case.managed and case.seen != "never", lambda case: Standing("missing")),
    (lambda case: _driver(case) == case.managed and case.is_subset, lambda case: Standing("foreign")),
    (
        lambda case: _driver(case) == case.managed,
        lambda case: Standing("missing", f"bound to kernel driver {case.managed}, whose list does not have it"),
    ),
    # Without any driver. Where the driver itself is gone, that is the one fault.
    (lambda case: case.is_gone, lambda case: Standing("foreign" if case.seen == "never" else "missing")),
    (
        lambda case: case.probe_failed,
        lambda case: Standing("missing", f"kernel driver {case.managed} could not start it: its probe failed"),
    ),
    (lambda case: case.seen == "now", lambda case: Standing("away", "bound to no kernel driver")),
    (
        lambda case: case.seen == "before",
        lambda case: Standing("missing", "bound to no kernel driver, and seen here before the last boot"),
    ),
    (
        lambda case: case.has_sibling,
        lambda case: Standing("missing", "bound to no kernel driver, while others of its kind work"),
    ),
    (lambda case: True, lambda case: Standing("foreign")),
)


def judge(case: Case) -> Standing:
    """The first row of TABLE that fits."""
    return next(standing(case) for fits, standing in TABLE if fits(case))
