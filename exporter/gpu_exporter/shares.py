"""What part of a board a holder has: the arithmetic of MIG slices and of holders that share.

A board has `board_slices` compute slices (7, or 4 on model.FOUR_SLICES). GPU instances have whole
slices of it, compute instances have slices of their GPU instance. Pure; slices of compute instances may be fractions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Boards from T4 to B200 draw 0.10 to 0.15 of their limit at rest (see devices/products.py for the sources). Whoever
# divides a board needs a bound, since holders that never rest together hide what rest is.
REST_MAX_SHARE = 0.15


def divide_gpu_instance(slices: int, compute: Sequence[int]) -> list[float]:
    """Slices of each compute instance of one GPU instance that has `slices`.

    `compute`: what the driver reports for each, 0 where it reports none. Where one is missing, or they come to more
    than there is, the GPU instance is divided evenly.
    """
    if all(compute) and sum(compute) <= slices:
        return [float(part) for part in compute]
    return [slices / len(compute)] * len(compute)


def count_slices(board_slices: int, parts: Iterable[float]) -> float:
    """The slices to divide by: the board's, or more where a driver reports more, so that shares never exceed 1."""
    return max(float(board_slices), sum(parts))


def board_share(slices: float, whole: float, holders: int = 1) -> float:
    """Share of the board, 0 to 1, of one of `holders` that share `slices` of `whole`."""
    return slices / whole / holders
