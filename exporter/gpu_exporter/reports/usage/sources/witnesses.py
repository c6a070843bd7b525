"""Finds windows at zero that do not prove idleness: another source showed work, the unit had traffic, or the values are
old.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gpu_exporter.reports.history.asking import Labels
from gpu_exporter.reports.usage.cells import Cell, PlacedSeries
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.boards import OVERLAP, Board, BoardSeries, board_of
from gpu_exporter.reports.usage.sources.intervals import Target, target_of
from gpu_exporter.reports.usage.sources.zeros import FirstPass, Windows

GpuWindow: TypeAlias = tuple[str, str, float]  # cluster, uuid without its prefix, start


class Doubts:
    """Windows at zero that do not prove the idleness of a unit, or of a GPU with all of its instances."""

    def __init__(self) -> None:
        self._windows: defaultdict[tuple[str, ...], set[float]] = defaultdict(set)

    def add(self, windows: Iterable[tuple[tuple[str, ...], set[float]]]) -> None:
        """Adds windows of units (`by_unit`) or of GPUs (`by_gpu`)."""
        for place, starts in windows:
            self._windows[place] |= starts

    def of(self, board: Board) -> set[float]:
        """Returns the windows of a unit that are doubtful."""
        return self._windows.get(board, set()) | self._windows.get(board[:2], set())


def find_contradicted(
    base: FirstPass,
    placed: Mapping[Labels, PlacedSeries],
    boards: Mapping[tuple[Board, float], BoardSeries],
    window: float,
) -> set[tuple[Board, Target, float]]:
    """Returns the windows in which one target reported no work on a unit, although another target reported work, or
    other series of the unit show engine activity.

    The target's zero may come from a profiling counter that stays at 0, or from an exporter that repeats old values.
    """
    engines = {
        (board_of(placed[labels]), start)
        for labels, values in base.engine.items()
        if labels not in base.counts
        for start, value in values.items()
        if value > FLOORS[-1]
    }
    several = {key for key, of in boards.items() if len(of.of_target) > 1 and of.seconds > OVERLAP * window}
    suspects = several | engines
    if not suspects:
        return set()
    floor = FLOORS[-1] if base.is_engine else 0.0
    works: dict[tuple[Board, Target, float], bool] = {}
    for labels, counts in base.counts.items():
        board, target = board_of(placed[labels]), target_of(labels)
        most, engine = base.most.get(labels, {}), base.engine.get(labels, {})
        for start in counts:
            if (board, start) in suspects:
                is_at_work = most.get(start, 0.0) > floor or engine.get(start, 0.0) > FLOORS[-1]
                works[board, target, start] = is_at_work or works.get((board, target, start), False)
    at_work = engines | {(board, start) for (board, _, start), is_at_work in works.items() if is_at_work}
    return {key for key, is_at_work in works.items() if not is_at_work and (key[0], key[2]) in at_work}


def by_gpu(windows: Windows, placed: Mapping[Labels, PlacedSeries]) -> dict[tuple[str, str], set[float]]:
    """Returns the windows of these series by cluster and UUID of the GPU. The instances of a GPU are not
    distinguished.
    """
    found: defaultdict[tuple[str, str], set[float]] = defaultdict(set)
    for board, starts in by_unit(windows, placed).items():
        found[board[:2]] |= starts
    return found


def by_unit(windows: Windows, placed: Mapping[Labels, PlacedSeries]) -> dict[Board, set[float]]:
    """Returns the windows of these series by unit."""
    found: defaultdict[Board, set[float]] = defaultdict(set)
    for labels, starts in windows.items():
        found[board_of(placed[labels])].update(starts)
    return found


def key_of(cell: Cell) -> GpuWindow:
    """Identifies the GPU and window of a cell, with the same name for all exporters."""
    return cell.unit.cluster, common_uuid(cell.unit.uuid), cell.start


def common_uuid(uuid: str) -> str:
    """Returns a GPU's UUID in the form that is common to all exporters."""
    return uuid.lower().removeprefix("gpu-")


def deny_idle(cells: list[Cell], at_work: set[GpuWindow]) -> list[Cell]:
    """Changes idle cells to low use if another cell for the same GPU and window (`at_work`) showed work."""
    if not at_work:
        return cells
    agreed = {key_of(cell) for cell in cells if cell.used + cell.low > 0.0}
    return [_at_work(cell) if (key := key_of(cell)) in at_work and key not in agreed else cell for cell in cells]


def _at_work(cell: Cell) -> Cell:
    zero = cell.idle + cell.unproven
    return cell._replace(low=cell.low + zero, idle=0.0, unproven=0.0, at_floors=tuple(0.0 for _ in cell.at_floors))
