"""Finds the scrape interval of each target in each window, which is the time that one sample covers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.sources.zeros import Table, Values

# With the usual labels of several Prometheus in one store (those of the Prometheus operator and of Thanos' documents):
# each of them scrapes at its own interval.
TARGET = ("cluster", "prometheus", "prometheus_replica", "replica", "job", "instance")
BY = ", ".join(TARGET)
BLOCK_S = 600.0  # a part of a window in which most targets were scraped all the time
UP_S = 30.0  # distance of the moments at which a target counts as present
ALIKE = 1.25  # intervals of neighbouring windows that differ by less are the same

Target: TypeAlias = tuple[str, ...]  # the values of the labels TARGET


def target_of(labels: Labels) -> Target:
    given = dict(labels)
    return tuple([given.get(name, "") for name in TARGET])


def ask_targets(series: Iterable[Labels], window: float) -> dict[str, str]:
    """Returns PromQL about the targets of these series, in windows of `window` seconds.

    - `scrapes`: the number of samples of `up`. `answers`: the number of those with value 1.
    - `presence`: the seconds for which the target was scraped. `dense`: the most samples in BLOCK_S.
    """
    jobs = "|".join(sorted({literal(dict(labels).get("job", "")) for labels in series}))
    targets = f'up{{job=~"{jobs}"}}'
    return {
        "scrapes": f"max by ({BY}) ({over('count', targets, window)})",
        "answers": f"max by ({BY}) ({over('sum', targets, window)})",
        "presence": f"max by ({BY}) (count_over_time({targets}[{window * 1000 - 1:.0f}ms:{UP_S:.0f}s])) * {UP_S:.0f}",
        "dense": _most_in_block(targets, window),
    }


def read_intervals(
    history: History, selector: str, counts: Table, tables: Mapping[str, Table], span: WindowSpan
) -> dict[Target, dict[float, float]]:
    """Returns the scrape interval in seconds, by target and by the start of the window.

    `counts`: samples of the series of `selector`. `tables`: the answers to ask_targets(). May raise AnswerError.
    """
    blocks = {target_of(labels): values for labels, values in tables["dense"].items()}
    if any(target_of(labels) not in blocks for labels in counts):  # targets without `up`
        found = history.ask_table("dense", _most_in_block(selector, span.window), span)
        blocks = {target_of(labels): values for labels, values in found.items()} | blocks
    return find_intervals(counts, tables["scrapes"], tables["presence"], blocks, span.window)


def find_intervals(
    counts: Table, scrapes: Table, presence: Table, blocks: Mapping[Target, Values], window: float
) -> dict[Target, dict[float, float]]:
    """Returns the intervals as read_intervals(). `blocks`: the most samples in BLOCK_S, of `up` or of the series.

    `up` has a sample for each scrape, also for a failed scrape, and ends with its target. So the interval is the time
    for which `up` was present, divided by its samples. This time is too long if the server was down, because the gap
    has no marker. In VictoriaMetrics, it is too short after the interval grew. So the samples of a block bound the
    interval. Without `up`, they alone give the interval.
    """
    usual: dict[Target, dict[float, float]] = {}
    most: defaultdict[Target, dict[float, float]] = defaultdict(dict)
    for labels, values in counts.items():
        of_target = most[target_of(labels)]
        for at, count in values.items():
            of_target[at] = max(of_target.get(at, 1.0), count)
    present = {target_of(labels): values for labels, values in presence.items()}
    for labels, values in scrapes.items():
        target = target_of(labels)
        usual[target] = {at: present.get(target, {}).get(at, window) / count for at, count in values.items() if count}
    for target, intervals in usual.items():
        usual[target] = {
            at: min(each for each in (own, *_beside(intervals, at, window)) if own <= ALIKE * each or each == own)
            for at, own in intervals.items()
        }
    found: dict[Target, dict[float, float]] = {}
    for target, samples in most.items():
        of_blocks, own = blocks.get(target, {}), usual.get(target, {})
        bounded = {at: _bound(own.get(at), of_blocks.get(at), samples[at]) for at in samples}
        shortest = min((each for each in bounded.values() if each), default=UP_S)
        found[target] = {at: each or shortest for at, each in bounded.items()}
    return found


def _bound(own: float | None, block: float | None, samples: float) -> float | None:
    """Returns an interval of which `block` samples fit into BLOCK_S. Returns `own` if it is one, None if unknown.

    `samples`: of the window. If the block has all of them, it was perhaps not scraped all the time.
    """
    if not block:
        return own
    is_whole = samples > block
    if own is None:
        return BLOCK_S / block if is_whole else None
    if own * (block - 1.0) > BLOCK_S:
        return min(own, BLOCK_S / block)
    return BLOCK_S / block if is_whole and own * (block + 1.0) < BLOCK_S else own


def _most_in_block(selector: str, window: float) -> str:
    steps = f"[{(window - BLOCK_S) * 1000:.0f}ms:{BLOCK_S / 2:.0f}s]"
    return f"max by ({BY}) (max_over_time({over('count', selector, BLOCK_S)}{steps}))"


def _beside(values: dict[float, float], at: float, window: float) -> list[float]:
    return [values[near] for near in (at - window, at + window) if near in values]
