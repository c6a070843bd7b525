"""Units with several series at the same time: pods that share a GPU, or targets that report the same GPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gpu_exporter.reports.history.asking import Labels
from gpu_exporter.reports.usage.cells import HolderId, PlacedSeries
from gpu_exporter.reports.usage.sources.intervals import Target, target_of
from gpu_exporter.reports.usage.sources.zeros import Table

OVERLAP = 1.05  # a window with more than this share of its seconds has several series at the same time

Board: TypeAlias = tuple[str, str, str]  # cluster, uuid and id of the instance


@dataclass(slots=True)
class BoardSeries:
    """The series of one unit in one window: the sum of their seconds, the seconds of the longest series, the seconds by
    target, and the holders.
    """

    seconds: float = 0.0
    longest: float = 0.0
    of_target: dict[Target, float] = field(default_factory=dict)
    holders: set[HolderId] = field(default_factory=set)

    def add(self, seconds: float, target: Target, holder: HolderId | None) -> None:
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        self.of_target[target] = self.of_target.get(target, 0.0) + seconds
        if holder is not None:
            self.holders.add(holder)

    def covered(self, window: float) -> float:
        """Returns the seconds in which the unit was sampled."""
        if self.seconds <= OVERLAP * window:
            return self.seconds
        of_target = max(self.of_target.values())  # of several targets, each may have one holder after another
        return self.longest if of_target > OVERLAP * window else of_target


def board_of(place: PlacedSeries) -> Board:
    """Returns the unit of a series. Omits the node, because targets may give it different names."""
    return place.unit.cluster, place.unit.uuid, place.unit.gi


def add_up_boards(
    counts: Table, placed: Mapping[Labels, PlacedSeries], intervals: Mapping[Target, Mapping[float, float]]
) -> dict[tuple[Board, float], BoardSeries]:
    """Adds up the series of each unit, for each window in which a unit has several."""
    series: defaultdict[Board, list[Labels]] = defaultdict(list)
    for labels in counts:
        series[board_of(placed[labels])].append(labels)
    found: dict[tuple[Board, float], BoardSeries] = {}
    for board, of_board in series.items():
        number = Counter(start for labels in of_board for start in counts[labels]) if len(of_board) > 1 else {}
        for labels in of_board:
            target, holder = target_of(labels), placed[labels].holder
            for start, samples in counts[labels].items():
                if number.get(start, 1) > 1:
                    of_window = found.setdefault((board, start), BoardSeries())
                    of_window.add(samples * intervals[target][start], target, holder)
    return found


def find_crowded(
    boards: Mapping[tuple[Board, float], BoardSeries], window: float
) -> tuple[set[tuple[Board, float]], set[Board]]:
    """Returns the units and windows with several series at the same time, and the units that several holders share.

    Targets may report the same GPU, perhaps with other names of its node; then each target has one holder at a time. If
    a unit has several series at the same time in one window, all its windows with several series are listed, because
    the number of samples does not show it where holders start or end.
    """
    several = {board for (board, _), of in boards.items() if of.seconds > OVERLAP * window}
    shared = {board for (board, _), of in boards.items() if max(of.of_target.values()) > OVERLAP * window}
    return {(board, start) for board, start in boards if board in several}, shared
