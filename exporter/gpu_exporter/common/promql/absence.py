"""Explains why series of the exporters are missing in a PromQL API: one sentence for the finding, one for the remedy.

Each sentence rests on answers of the API; a missing answer proves nothing. At most seven queries run, only if series
are missing. docs/troubleshooting.md lists the cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import REASON_MAX, one_line, utc
from gpu_exporter.common.promql.vector import VectorRow, literal, quote

Ask: TypeAlias = Callable[[str], list[VectorRow]]  # an instant query; raises AnswerError
BUILD = "gpu_exporter_build_info"  # one for each exporter, also on a node whose driver does not answer
# How far back, in which steps. A step finds the samples of the five minutes before it, unless the series has ended.
PASTS = ("10m:5s", "1d:1m", "7d:5m")
LONGEST = "7d"
TARGETS_MAX = 3  # shown
VALUES_MAX = 5  # shown combinations of labels
LABELS = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"')
# A series of each exporter of GPUs that sites have, and its name.
OTHERS = {
    "DCGM_FI_DEV_GPU_UTIL": "dcgm-exporter",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "dcgm-exporter",
    "nvidia_smi_utilization_gpu_ratio": "nvidia_gpu_exporter",
    "nvidia_gpu_duty_cycle": "nvidia_gpu_prometheus_exporter",
    "gpu_utilization_Percentage": "nvitop-exporter",
    "all_smi_gpu_utilization": "all-smi",
    "ray_node_gpus_utilization": "Ray",
}
SELECTED = (
    "with the Prometheus operator, check that the PodMonitor has the labels that Prometheus selects, often "
    "`release`: kubectl get podmonitors,servicemonitors -A -l app.kubernetes.io/name=gpu-exporter "
    "--show-labels"
)
REACH = (
    "Check that gpu-exporter runs there, and that Prometheus reaches its port: Prometheus shows the error at "
    "Status > Targets"
)
UNKNOWN = "See docs/troubleshooting.md for the queries"
COMPARE = (
    "Compare /metrics of a target with the series in Prometheus, and check metric_relabel_configs of its scrape job"
)


class Absence(NamedTuple):
    """One case of missing series. `kind`: one word for the case. `seen`: the finding. `to_do`: the remedy."""

    kind: str
    seen: str
    to_do: str

    def __str__(self) -> str:
        return f"{self.seen}. {self.to_do}"


FindMonitors: TypeAlias = Callable[[], Absence | None]  # PodMonitors of the cluster; None if they cannot be read


def explain_absence(ask: Ask, matcher: str, wall: float, find_monitors: FindMonitors | None = None) -> Absence:
    """Explains why no series of an exporter matches at `wall` (Unix seconds). Kind "unknown" if the API does not
    answer.

    `matcher`: label matchers of the user. `find_monitors`: called if Prometheus has no target; None without a cluster.
    """
    try:
        found = _matching_before(ask, matcher, wall, find_monitors) or _never_matching(ask, matcher, find_monitors)
    except AnswerError as exc:
        found = Absence("unknown", f"the reason is unknown: {exc}", UNKNOWN)
    head = f"no gpu-exporter series match {{{matcher}}}" if matcher else "there are no gpu-exporter series"
    return found._replace(seen=f"{head}: {found.seen}")


def explain_gaps(ask: Ask, matcher: str, wall: float, needed_s: float) -> list[Absence]:
    """Lists the missing data of exporters that have series: targets, holders, or `needed_s` seconds of history."""
    try:
        found = _failing(ask, matcher), _without_holders(ask, matcher), _young(ask, matcher, wall, needed_s)
        return [each for each in found if each is not None]
    except AnswerError as exc:
        return [Absence("unknown", f"it is unknown whether exporters are missing: {exc}", UNKNOWN)]


def explain_no_hours(ask: Ask, matcher: str, wall: float) -> Absence:
    """Returns the reason why no tenant has a GPU-hour at `wall` (Unix seconds)."""
    try:
        if ask(f"count({BUILD}{{{matcher}}})"):
            return _without_holders(ask, matcher) or Absence(
                "new", "the first holders were just seen", "Ask again later"
            )
    except AnswerError as exc:
        return Absence("unknown", f"the reason is unknown: {exc}", UNKNOWN)
    return explain_absence(ask, matcher, wall)


def last_seen(ask: Ask, selector: str) -> float | None:
    """Returns when a series of this selector last existed (Unix seconds, at most a minute too early). Raises
    AnswerError.

    None if no series existed in the last day.
    """
    rows = ask(f"max_over_time({moments_of(selector)}[1d:1m])")
    return rows[0].value if rows else None


def moments_of(selector: str, by: str = "") -> str:
    """Returns PromQL for the time at each moment at which a series of this selector exists.

    Uses time(), because timestamp() is 150 times as slow (Prometheus 2.42, over a day of 250 series).
    """
    return f"(0 * count {by}({selector}) + time())"


def moment(wall: float) -> str:
    """Formats a time in UTC, to the minute."""
    return utc(wall).strftime("%Y-%m-%d %H:%MZ")


def _matching_before(ask: Ask, matcher: str, wall: float, find_monitors: FindMonitors | None) -> Absence | None:
    """The reason why exporters of the last days no longer match; None if no exporter matched in these days."""
    rows: list[VectorRow] = []
    for past in PASTS:
        rows = rows or ask(f"max_over_time({moments_of(f'{BUILD}{{{matcher}}}', 'by (job)')}[{past}])")
    if not rows:
        return None
    last = max(row.value for row in rows)
    since = f"{moment(last)}, {describe_duration(max(0.0, wall - last))} ago"
    jobs = "|".join(literal(row.labels.get("job", "")) for row in rows[:VALUES_MAX])
    own = ",".join(filter(None, (matcher, f'job=~"{jobs}"')))
    up = ask(f"up{{{own}}} and on (job, instance) {_had_series(matcher, PASTS[-1])}")
    down = [row for row in up if row.value == 0.0] or ([] if up else ask(f"up{{{own}}} == 0"))  # with new addresses
    if down:
        return Absence("down", f"{_count(down, len(up))}; the last series ended at {since}", REACH)
    if up:
        seen = f"the targets answer (up is 1), but the last series of gpu-exporter ended at {since}"
        return Absence("silent", f"{seen}: {_name(up)}", COMPARE)
    seen = f"the last series ended at {since}, and Prometheus now has no target of these exporters (no series `up`)"
    if now := _other_labels(ask, matcher, BUILD):
        to_do = f"Check the scrape job; if these are the same exporters: --source.matcher='{now[0]}'"
        return Absence("moved", f"{seen}; exporters have series with {'; '.join(now)}", to_do)
    return _with_monitors("gone", seen, "If the exporters were not removed, check the scrape job; ", find_monitors)


def _never_matching(ask: Ask, matcher: str, find_monitors: FindMonitors | None) -> Absence:
    """Explains why no exporter has matched in the last days."""
    if now := _other_labels(ask, matcher, BUILD):
        return Absence("excluded", f"exporters have series with {'; '.join(now)}", _choose(now))
    up = ask(f"up{{{matcher}}}") if matcher else []  # without a matcher these are the targets of all jobs
    if down := [row for row in up if row.value == 0.0]:
        return Absence(
            "unreached", f"{_count(down, len(up))}, and none had a series of gpu-exporter in the last {LONGEST}", REACH
        )
    if up:
        seen = f"the targets answer (up is 1), but none had a series of gpu-exporter in the last {LONGEST}"
        return Absence("foreign", f"{seen}: {_name(up)}", COMPARE)
    if before := _other_labels(ask, matcher, f"last_over_time({BUILD}[{LONGEST}])"):
        seen = f"exporters with {'; '.join(before)} had series in the last {LONGEST}, and have none now"
        return _with_monitors("gone", seen, "If the exporters were not removed, check the scrape job; ", find_monitors)
    names = "|".join(OTHERS)
    others = ask(f'count by (__name__) ({{__name__=~"{names}",origin!="gpu-exporter"}})')
    if found := [row for row in others if row.labels.get("__name__") in OTHERS]:
        named = "; ".join(
            f"{row.value:.0f} × {row.labels['__name__']} of {OTHERS[row.labels['__name__']]}" for row in found
        )
        return Absence(
            "others",
            f"Prometheus has only series of other exporters: {named}",
            "These series do not show which holder was idle, and for how long: install gpu-exporter beside "
            "that exporter (docs/other-exporters.md)",
        )
    to_do = "Add a scrape job as in alerts/prometheus.example.yaml; "
    no_target = ", and has no target that matches (no series `up`)" if matcher else ""
    seen = f"Prometheus has had no such series in the last {LONGEST}{no_target}"
    return _with_monitors("never", seen, to_do, find_monitors)


def _with_monitors(kind: str, seen: str, to_do: str, find_monitors: FindMonitors | None) -> Absence:
    """Explains that Prometheus has no target, together with the findings of `find_monitors`, if it has any."""
    found = find_monitors() if find_monitors is not None else None
    if found is None:
        return Absence(kind, seen, f"{to_do}{SELECTED}")
    return found._replace(seen=f"{seen}; {found.seen}")


def _failing(ask: Ask, matcher: str) -> Absence | None:
    """Explains that some targets of the last day do not answer. None if all of them answer."""
    own = f"up{{{matcher}}} and on (job, instance) {_had_series(matcher, '1d:10m')}"
    down = ask(f"({own}) == 0")
    if not down:
        return None
    return Absence("down", f"{_count(down)}, so {'its' if len(down) == 1 else 'their'} GPUs may be missing here", REACH)


def _without_holders(ask: Ask, matcher: str) -> Absence | None:
    """Explains why exporters report no holder at all. None if any exporter reports a holder."""
    if ask(f"count(gpu_allocation_info{{{matcher}}})"):
        return None
    up = {
        row.labels.get("source", ""): row.value
        for row in ask(f"min by (source) (gpu_exporter_attribution_up{{{matcher}}})")
    }
    silent = one_line(", ".join(sorted(source for source, value in up.items() if not value)), REASON_MAX)
    if silent:
        seen = f"no exporter reports a holder, and on some nodes a source of holders does not answer: {silent}"
    else:
        seen = "no exporter reports a holder" + (
            ", and every source of holders answers" if up else ", because no exporter has a source of holders"
        )
    return Absence(
        "unheld", seen, "Run `gpu-exporter holders` on a node: it prints the answers of its sources of holders"
    )


def _young(ask: Ask, matcher: str, wall: float, needed_s: float) -> Absence | None:
    """Explains that the history is shorter than `needed_s` seconds. None if it is long enough."""
    window = f"{needed_s + 300.0:.0f}s:1m"
    rows = ask(f"min_over_time({moments_of(f'{BUILD}{{{matcher}}}')}[{window}])")
    since = rows[0].value if rows else wall
    if wall - since >= needed_s:
        return None
    return Absence(
        "young",
        (
            f"Prometheus has series of the exporters only since {moment(since)}, for "
            f"{describe_duration(max(0.0, wall - since))}"
        ),
        f"A holder appears here after {describe_duration(needed_s)} without activity, so this answer is complete from "
        f"{moment(since + needed_s)} on",
    )


def _had_series(matcher: str, past: str) -> str:
    """Returns PromQL for the targets whose exporter had series in `past`, or in the last minutes, which the steps of
    `past` may miss.
    """
    over = (f"group by (job, instance) (max_over_time({BUILD}{{{matcher}}}[{each}]))" for each in (PASTS[0], past))
    return f"({' or '.join(over)})"


def _other_labels(ask: Ask, matcher: str, series: str) -> list[str]:
    """Lists the existing values of the labels in the user's matcher. Empty if it has no label."""
    labels = list(dict.fromkeys(match[1] for match in LABELS.finditer(matcher)))
    if not labels:
        return []
    rows = ask(f"topk({VALUES_MAX + 1}, count by ({', '.join(labels)}) ({series}))")
    shown = [
        ",".join(f'{label}="{quote(one_line(row.labels.get(label, ""), REASON_MAX))}"' for label in labels)
        for row in rows[:VALUES_MAX]
    ]
    return [*shown, "and others"] if len(rows) > VALUES_MAX else shown


def _choose(values: Sequence[str]) -> str:
    return f"Select the right exporters, for example with --source.matcher='{values[0]}'"


def _count(down: Sequence[VectorRow], of: int = 0) -> str:
    many = len(down) > 1
    whole = f" of {of}" if of > len(down) else ""
    verb = "do" if many else "does"
    return f"{len(down)}{whole} target{'s' * (many or bool(whole))} {verb} not answer (up is 0): {_name(down)}"


def _name(targets: Sequence[VectorRow]) -> str:
    """Names at most TARGETS_MAX targets by node and address."""
    names = sorted({_target(row) for row in targets})
    more = f" and {len(names) - TARGETS_MAX} more" if len(names) > TARGETS_MAX else ""
    return ", ".join(names[:TARGETS_MAX]) + more


def _target(row: VectorRow) -> str:
    node, instance = (one_line(row.labels.get(label, ""), REASON_MAX) for label in ("node", "instance"))
    return f"{node} ({instance})" if node not in ("", instance) else instance
