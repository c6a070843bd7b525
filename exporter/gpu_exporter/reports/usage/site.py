"""Finds the exporters of a site, and describes what each can and cannot show in a report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.common.promql.absence import OTHERS
from gpu_exporter.common.promql.vector import cluster_matchers
from gpu_exporter.reports.history.asking import History, WindowSpan, over
from gpu_exporter.reports.usage.cells import WINDOW_S
from gpu_exporter.reports.usage.model import ReportSource
from gpu_exporter.reports.usage.sources import dcgm, plain
from gpu_exporter.reports.usage.sources.gauges import COVERED_S, Gauges
from gpu_exporter.reports.usage.sources.kube import ALLOCATABLE, PHASE, REQUESTS

NEW_LOOKS, NEW_MAX = 8, 1e7  # hours of the period in which such series are counted; larger numbers are not counts
OWN = "gpu_up"  # one for each GPU that gpu-exporter shows
KUBE = frozenset((REQUESTS, ALLOCATABLE))
KUBE_NAME, OF_KUBE = "kube-state-metrics", "requests, owners and teams of pods"
OF_GPUS = 'resource=~"|nvidia_com_.+"'  # of the metrics with this label
MOST = 0.95
LOOK_S, LOOK_MIN_S, LOOKS = 3600.0, 300.0, 24
EXPORTERS: Mapping[str, Callable[[], Gauges]] = {  # the first that shows a GPU counts
    dcgm.NAME: dcgm.gauges,
    plain.JOBSTATS: plain.jobstats_gauges,
    plain.NVIDIA_GPU_EXPORTER: plain.smi_gauges,
}
NAMES = {
    dcgm.UTILIZATION: dcgm.NAME,
    dcgm.ENGINE: dcgm.NAME,
    plain.SMI_UTILIZATION: plain.NVIDIA_GPU_EXPORTER,
    plain.DUTY_CYCLE: plain.JOBSTATS,
}


class SiteExporters(NamedTuple):
    """The exporters of a site.

    - `metrics`: those of NAMES that exist. `others`: names of exporters that are not read.
    - `seen`: at how many of `looks` moments each metric was found.
    - `series`: the most series of one of `metrics` at a moment. `own`: the same of gpu-exporter.
    - `rest`: GPUs of `metrics` that gpu-exporter does not show, at nearly each moment or more.
    - `new`: series of one of `metrics` that begin in an hour, because pods follow each other.
    - `refusal`: reason why kube-state-metrics is not used, "" without a failed query.
    """

    metrics: frozenset[str]
    others: tuple[str, ...]
    seen: Mapping[str, int]
    looks: int
    series: int
    own: int
    rest: int
    refusal: str = ""
    new: float = 0.0

    @property
    def has_kube(self) -> bool:
        return not self.seen.keys().isdisjoint(KUBE)

    @property
    def prefers_own(self) -> bool:
        """Whether gpu-exporter's own series are there all the time and show nearly all GPUs, or no others are there."""
        own = self.seen.get(OWN, 0)
        is_all = self.own >= MOST * self.series and self.rest <= (1.0 - MOST) * self.own
        return own > 0 and (not self.metrics or (own >= MOST * self.looks and is_all))

    def without_kube(self, refusal: str) -> SiteExporters:
        """Returns the site without kube-state-metrics, a query about which failed for this reason."""
        seen = {name: windows for name, windows in self.seen.items() if name not in KUBE}
        return self._replace(seen=seen, refusal=refusal)

    def covers(self, other: SiteExporters) -> bool:
        """Whether all metrics of `other` were found at nearly each moment."""
        return all(self.seen.get(metric, 0) >= MOST * self.looks for metric in other.metrics)

    @property
    def exporters(self) -> list[str]:
        found = {NAMES[metric] for metric in self.metrics}
        return [name for name in EXPORTERS if name in found]


def find_site(history: History, matcher: str, span: WindowSpan) -> SiteExporters:
    """Returns which exporters have series in the period. Raises AnswerError."""
    site = look_at_site(history, matcher, span)
    return site._replace(new=_find_new(history, matcher, site, span)) if site.metrics else site


def _find_new(history: History, matcher: str, site: SiteExporters, span: WindowSpan) -> float:
    """The series that begin in an hour, on average. 0 if the server does not tell, because they only serve for an
    estimate.
    """
    series = f"{max(site.metrics, key=lambda name: (site.seen[name], name))}{{{matcher}}}"
    step = span._replace(window=max(WINDOW_S, (span.end - span.start) / NEW_LOOKS))
    query = f"count({over('last', series, WINDOW_S)}) - (count({series}) or vector(0))"
    try:
        found = [number for of in history.ask_windows("new", query, step) for number in of.values.values()]
    except AnswerError:
        return 0.0
    return min(NEW_MAX, max(0.0, sum(found) / max(1, len(found))))


def look_at_site(history: History, matcher: str, span: WindowSpan) -> SiteExporters:
    """Returns the same without `new`. Looks at one moment every hour or more often, which is cheap."""
    site = _find(history, matcher, span, max(LOOK_MIN_S, min(LOOK_S, (span.end - span.start) / LOOKS)))
    # A node may exist only between two looks, for instance for a job of every hour.
    return site if site.metrics else _find(history, matcher, span, LOOK_MIN_S)


def _find(history: History, matcher: str, span: WindowSpan, each_s: float) -> SiteExporters:
    step = span._replace(window=each_s)
    found: dict[str, tuple[int, float]] = {}
    exporters = {*OTHERS, *NAMES, *dcgm.VIDEO}
    of_gpus = ",".join(filter(None, (OF_GPUS, cluster_part(matcher))))
    refusal = ""
    for names, of_names in ((exporters, matcher), ({OWN}, of_gpus), (KUBE, of_gpus)):
        matchers = ",".join(filter(None, (f'__name__=~"{"|".join(sorted(names))}"', of_names)))
        try:
            found |= history.ask_names("exporters", f"count by (__name__) ({{{matchers}}})", step)
        except AnswerError as exc:
            if names is not KUBE:
                raise
            refusal = str(exc)
    others = tuple(sorted({OTHERS[name] for name in found if name in OTHERS and name not in NAMES}))
    metrics = frozenset(found.keys() & NAMES.keys())
    series = round(max((found[metric][1] for metric in metrics), default=0.0))
    seen = {name: windows for name, (windows, _) in found.items()}
    own = round(found.get(OWN, (0, 0.0))[1])
    rest = _find_rest(history, matcher, metrics, f"{OWN}{{{of_gpus}}}", step) if own and metrics else 0
    return SiteExporters(metrics, others, seen, step.windows, series, own, rest, refusal)


def _find_rest(history: History, matcher: str, metrics: Collection[str], own: str, step: WindowSpan) -> int:
    """The GPUs of these metrics that gpu-exporter does not show, except at a few moments. `own`: its series."""
    names = f'__name__=~"{"|".join(sorted(metrics))}"'
    series = (f"{{{','.join(filter(None, (names, each, matcher)))}}}" for each in ('UUID!=""', 'uuid!=""'))
    upper, lower = (_with_uuid(each, label) for each, label in zip(series, ("UUID", "uuid"), strict=True))
    query = f"count(group by (uuid) ({upper} or {lower}) unless group by (uuid) ({_with_uuid(own, 'uuid')}))"
    numbers = [number for found in history.ask_windows("rest", query, step) for number in found.values.values()]
    few = int((1.0 - MOST) * step.windows)
    return round(sorted(numbers, reverse=True)[few]) if len(numbers) > few else 0


def describe(
    site: SiteExporters,
    sparse: Collection[str] = (),
    facts_refusal: str = "",
    *,
    has_phases: bool = True,
) -> Iterator[ReportSource]:
    """The sources of a report, each with the values that it does not have. `facts_refusal`: why owners and teams are
    not known, "" if they are.
    """
    for name in site.exporters:
        cannot, unseen = [], ""
        if name != dcgm.NAME or dcgm.ENGINE not in site.metrics:
            cannot.append("whether a GPU at zero was idle between two samples: those hours are to be investigated")
            cannot.append("MIG instances, which have no utilization")
        elif name in sparse:
            cannot.append(f"idleness while samples are more than {COVERED_S:.0f} s apart; scrape it every 30 s")
        if name == dcgm.NAME and not all(metric in site.seen for metric in dcgm.VIDEO):
            unseen = "the work of video encoders and decoders"
            cannot.append(f"{unseen}: add {' and '.join(dcgm.VIDEO)} to its fields")
        if name == plain.NVIDIA_GPU_EXPORTER and not site.has_kube:
            cannot.append("holders; install kube-state-metrics, or an exporter that names pods or jobs")
        cannot.append("causes and stalls; install gpu-exporter's agent")
        yield ReportSource(name, "utilization and memory of GPUs", tuple(cannot), unseen)
    if site.refusal:
        yield ReportSource(KUBE_NAME, "nothing: it is not used", (_describe_refusal(OF_KUBE, site.refusal),))
    elif site.has_kube:
        cannot_kube = [] if has_phases else [f"which pods held GPUs: its series {PHASE} are missing"]
        cannot_kube += [_describe_refusal("owners and teams of pods", facts_refusal)] if facts_refusal else []
        yield ReportSource(KUBE_NAME, OF_KUBE, tuple(cannot_kube))


def _describe_refusal(lost: str, reason: str) -> str:
    return f"{lost}: the query failed: {shorten(reason, REASON_MAX)}"


def _with_uuid(series: str, label: str) -> str:
    """PromQL: the series with the UUID in `uuid`, as nvidia_gpu_exporter writes it."""
    return f'label_replace({series}, "uuid", "$1", "{label}", "(?:GPU-)?(.+)")'


def cluster_part(matcher: str) -> str:
    """Returns the user's matchers on the label cluster. Other matchers may not match kube-state-metrics, which has
    another job.
    """
    return ",".join(cluster_matchers(matcher))


def describe_nothing(site: SiteExporters) -> str:
    text = "no series of dcgm-exporter, nvidia_gpu_exporter or jobstats' exporter match in this period"
    if site.others:
        text += f"; it has series of {', '.join(site.others)}, which this report does not read"
    return f"{text}. Take a longer --since, or correct --source.matcher or the address"
