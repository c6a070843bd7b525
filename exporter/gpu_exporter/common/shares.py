"""The arithmetic of a holder's share of a board, with MIG slices and with several holders on one unit.

A board has `board_slices` compute slices (7, or as in model.FEW_SLICES). A GPU instance has whole slices of the board.
A compute instance has slices of its GPU instance, which may be fractions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Boards from T4 to GB200 draw 0.08 to 0.15 of their limit at rest, B300 and GB300 up to 0.17 on warm hosts (see
# devices/products.py for the sources). Dividing the power of a board needs this bound: the idle power cannot be
# measured if its holders are never idle together. On a warm GB300, up to 30 W of its power at rest are divided by
# activity.
REST_MAX_SHARE = 0.15


def divide_gpu_instance(slices: int, compute: Sequence[int]) -> list[float]:
    """Returns the slices of each compute instance in a GPU instance of `slices` compute slices.

    `compute`: the slices that the driver reports for each compute instance, 0 if none. If a value is missing, or the
    sum exceeds `slices`, the division is even.
    """
    if all(compute) and sum(compute) <= slices:
        return [float(part) for part in compute]
    return [slices / len(compute)] * len(compute)


def count_slices(board_slices: int, parts: Iterable[float]) -> float:
    """Returns the divisor of shares: the larger of the board's slices and the sum of `parts`, so no share exceeds 1."""
    return max(float(board_slices), sum(parts))


def board_share(slices: float, whole: float, holders: int = 1) -> float:
    """Returns a holder's share of a board: `holders` share a unit with `slices` of the board's `whole` slices."""
    return slices / whole / holders
