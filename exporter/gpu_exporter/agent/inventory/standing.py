"""Decides by a table whether a GPU that the driver does not list is missing, away, asleep or foreign. Pure.

The first row that matches decides. A GPU counts as missing until it is proven to be away. A GPU that has never answered
here counts as missing only if the kernel shows that it should work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from gpu_exporter.agent.inventory.pci import UNBOUND, PciFunction

PROVEN_S = 600.0  # how long a card must have answered before an unbound card of the same kind counts as missing


class Case(NamedTuple):
    """The facts about one GPU that the driver does not list.

    - `function`: its entry on the PCI bus, None without an entry.
    - `managed`: name of the kernel driver whose GPUs the exporter reads.
    - `is_gone`: no GPU is bound to that driver, and its module is not loaded.
    - `seen`: the GPU was up in this boot ("now"), in an earlier boot, or never.
    - `probe_failed`: the kernel's log shows that the driver could not start the GPU, which has not answered since.
    - `has_sibling`: a card with the same device id has answered for PROVEN_S.
    - `is_subset`: this container or job got only a part of the GPUs.
    """

    function: PciFunction | None
    managed: str
    is_gone: bool = False
    seen: Literal["now", "before", "never"] = "never"
    probe_failed: bool = False
    has_sibling: bool = False
    is_subset: bool = False


class Standing(NamedTuple):
    """The decision. `kind`: missing, away, asleep, or foreign (the GPU was never expected here).

    `reason`: why the GPU is missing or away; "" if the caller may have a better reason.
    """

    kind: Literal["missing", "away", "asleep", "foreign"]
    reason: str = ""


def _driver(case: Case) -> str:
    return case.function.driver if case.function is not None else ""


Row = tuple[Callable[[Case], bool], Callable[[Case], Standing]]
TABLE: tuple[Row, ...] = (
    # Not on the bus, as far as the bus can be read: only a GPU that was seen here counts as missing.
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
        lambda case: Standing("asleep", "asleep: suspended by runtime power management"),
    ),
    (lambda case: _driver(case) == case.managed and case.seen != "never", lambda case: Standing("missing")),
    (lambda case: _driver(case) == case.managed and case.is_subset, lambda case: Standing("foreign")),
    (
        lambda case: _driver(case) == case.managed,
        lambda case: Standing("missing", f"bound to kernel driver {case.managed}, but not in the driver's list"),
    ),
    # Without any kernel driver. If the driver itself is gone, only that fault is reported.
    (lambda case: case.is_gone, lambda case: Standing("foreign" if case.seen == "never" else "missing")),
    (
        lambda case: case.probe_failed,
        lambda case: Standing("missing", f"kernel driver {case.managed} could not start it: its probe failed"),
    ),
    (lambda case: case.seen == "now", lambda case: Standing("away", "bound to no kernel driver")),
    (
        lambda case: case.seen == "before",
        lambda case: Standing("missing", "bound to no kernel driver; it answered here before the last boot"),
    ),
    (
        lambda case: case.has_sibling,
        lambda case: Standing("missing", "bound to no kernel driver, while others of its kind work"),
    ),
    (lambda case: True, lambda case: Standing("foreign")),
)


def judge(case: Case) -> Standing:
    """Returns the standing in the first row of TABLE that matches."""
    return next(standing(case) for fits, standing in TABLE if fits(case))
