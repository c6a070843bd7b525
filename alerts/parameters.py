"""Parts of the rules that are the same at every site: lists of labels, and templates of annotations.

In a rule, ${key} stands for the constant KEY. tools/rules.py fills in these constants, and the settings of the section
`alerts` of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.common.model.holders import ALLOCATION_KEY
from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.common.model.readings import CORE, WITNESSES_MIN

RUNBOOK = "https://github.com/gpu-exporter/gpu-exporter/blob/main/alerts/runbook.md"
# Empty if the site has not set the address of its Grafana (alerts.grafana).
DASHBOARD = (
    '{{ with "%s" }}{{ . }}/d/gpu-exporter-'
    "{{ if or $labels.pod $labels.job_id }}holder?orgId=1&var-namespace={{ $labels.namespace }}"
    "&var-pod={{ $labels.pod }}&var-jobid={{ $labels.job_id }}"
    "{{ else if $labels.node }}node?orgId=1&var-node={{ $labels.node }}"
    "{{ else }}fleet?orgId=1{{ with $labels.namespace }}&var-namespace={{ . }}{{ end }}{{ end }}"
    "{{ with $labels.cluster }}&var-cluster={{ . }}{{ end }}{{ end }}"
)
TARGET = "cluster, node"  # one node; not instance, which changes with a rollout
KEY = ", ".join((TARGET, *ALLOCATION_KEY))  # one allocation
HOLDER = "cluster, scheduler, namespace, pod, job_id"
IDLE_RUNS, IDLE_HOURS = "allocation:gpu_idle_run_seconds:proven", "Idle GPU-hours so far"
HELD = "allocation:gpu_idle_run_seconds:known"


# Matchers of the alert's holder, in the template variable $who.
WHO = (
    "{{ $who := printf `scheduler=%q` $labels.scheduler }}"
    "{{ with $labels.cluster }}{{ $who = printf `%s,cluster=%q` $who . }}{{ end }}"
    "{{ with $labels.namespace }}{{ $who = printf `%s,namespace=%q` $who . }}{{ end }}"
    "{{ with $labels.pod }}{{ $who = printf `%s,pod=%q` $who . }}{{ end }}"
    "{{ with $labels.job_id }}{{ $who = printf `%s,job_id=%q` $who . }}{{ end }}"
)


# A number as in common/model/meanings.py, without a space: the templates find it by its name.
NUMBER = (
    "{{ if match `_ratio$` .Labels.quantity }}{{ humanizePercentage .Value }}"
    "{{ else if match `_seconds$` .Labels.quantity }}{{ humanizeDuration .Value | reReplaceAll ` ` `` }}"
    "{{ else if match `_bytes$` .Labels.quantity }}{{ humanize1024 .Value }}B"
    "{{ else if match `_bytes_per_second$` .Labels.quantity }}{{ humanize .Value }}B/s"
    "{{ else if ge .Value 1000.0 }}{{ humanize .Value }}{{ else }}{{ printf `%.3g` .Value }}{{ end }}"
)
# Such as `cpu_quota (high confidence) cpus=4 throttled_ratio=40%`. Alertmanager's meanings.tmpl makes a sentence of it.
CAUSE = (
    f"{WHO}{{{{ range sortByLabel `quantity` (query "
    "(printf `holder:gpu_cause:count{%[1]s} or holder:gpu_cause_value:one{%[1]s}` $who)) }}"
    "{{ if .Labels.confidence }}{{ .Labels.cause }} ({{ .Labels.confidence }} confidence)"
    f"{{{{ else }}}} {{{{ .Labels.quantity }}}}={NUMBER}{{{{ end }}}}{{{{ end }}}}"
)
RISE = "gpu_reconciler_allocation_underused_timestamp_seconds"
AT = "at={{ .Value | humanizeTimestamp | reReplaceAll `(:[0-9]{2}):.*` `$1 UTC` }}; "
# Stages of the reconciler, empty without one: only then can a wish keep the GPUs. Before them the time at which a
# candidate becomes underused, such as `at=2026-11-29 14:20 UTC; candidate `.
STAGE = (
    f"{WHO}{{{{ range sortByLabel `stage` (query (printf `group by (stage) "
    f"(gpu_reconciler_allocation_stage{{${{reconciler}},%[1]s}}) or max ({RISE}{{${{reconciler}},%[1]s}})` $who)) }}}}"
    f"{{{{ if .Labels.stage }}}}{{{{ .Labels.stage }}}} {{{{ else }}}}{AT}{{{{ end }}}}{{{{ end }}}}"
)
# A GPU of .Labels, as its node's nvidia-smi numbers it; by its UUID where only another exporter reports it.
PLACE = (
    "{{ $gpu := printf `%s on %s` (or .Labels.mig_uuid .Labels.uuid) .Labels.node }}"
    "{{ if .Labels.gpu }}{{ $gpu = printf `GPU %s of %s` .Labels.gpu .Labels.node }}"
    "{{ with .Labels.mig }}{{ $gpu = printf `MIG %s of %s` . $gpu }}{{ end }}{{ end }}"
)


def placed(recording: str) -> str:
    """Returns PromQL for a holder's GPUs in `recording`, with the labels gpu and mig if the exporter reports them."""
    by = "on (node, uuid, mig_uuid)"
    return (
        f"label_replace(allocation:gpu_place:info{{%[1]s}} and {by} {recording}{{%[1]s}}, `what`, `gpu`, ``, ``) "
        f"or {by} {recording}{{%[1]s}}"
    ).replace("`", '"')


FORMATS = {
    "hours": "printf `%.1f` .Value",
    "cost": "printf `%.2f` .Value",
    "peak": ".Value | humanize1024",
    "cores": "printf `%.1f` .Value",
    "cpus": "printf `%.3g` .Value",
}


def figures(recording: str, hours: str, who: str, by: str) -> dict[str, str]:
    """Returns PromQL by name for the memory of the GPUs in `recording`. With `hours`, also for their hours, their cost,
    and the holder's CPU cores on its busiest node (only if it uses CORE or more there). `by`: the grouping of the sums.
    """
    found = {}
    if hours:
        # An instance or a shared GPU is a part of a GPU, in hours and in money.
        share = f"max by ({KEY}) (allocation:gpu_share:ratio{who})"
        part = f"max by ({KEY}) ({recording}{who}) * on ({KEY}) {share}"
        found["hours"] = f"sum{by}({part}) / 3600"
        found["cost"] = f"sum{by}({part} * on (cluster, node) group_left () node:gpu_price_per_hour:max) / 3600"
        matchers = "${selector}" + who.replace("{", ",").replace("}", "")
        cpus = f"gpu_allocation_host_cpus{{{matchers}}}"
        busy = f"(gpu_allocation_host_activity_ratio{{{matchers}}} * {cpus} >= {CORE:g})"
        found |= {"cores": f"max{by}{busy}", "cpus": f"max{by}({cpus} and {busy})"}
    return {**found, "peak": f"max{by}(max_over_time(allocation:gpu_memory_used_bytes:max30m{who}[${{low_over}}]))"}


def figures_text(hours: str) -> str:
    """Returns the template of a sentence for each of these figures."""
    return (
        f"{{{{ with $hours }}}} {hours or 'hours'}: {{{{ . }}}}"
        "{{ with $cost }}, at the site's price {{ . }}{{ end }}.{{ end }}"
        "{{ with $cores }} It uses {{ . }} of its {{ $cpus }} CPU cores now.{{ end }}"
        "{{ with $peak }} Highest memory use on one GPU in the last ${low_over}: {{ . }}B.{{ end }}"
    )


def gpus_text(recording: str, hours: str) -> str:
    """Returns the template of an annotation: a holder's GPUs in `recording`, and the memory in use. With `hours`, also
    hours and cost.

    The template runs a query, because names and figures cannot be labels: they change, and each change would be a new
    alert. Each pending or firing alert runs it once (docs/scale.md shows the cost). The query has no matchers for
    labels that the holder lacks, because a matcher for an empty label reads every value of that label. At most ten GPUs
    are named.
    """
    found = figures(recording, hours, "{%[1]s}", "")
    parts = [placed(recording), *(f'label_replace({query}, "what", "{name}", "", "")' for name, query in found.items())]
    return (
        f"{WHO}"
        "{{ $gpus := `` }}{{ $hours := `` }}{{ $cost := `` }}{{ $peak := `` }}{{ $cores := `` }}{{ $cpus := `` }}"
        "{{ $named := `` }}"
        f"{{{{ range sortByLabel `node` (sortByLabel `gpu` (query (printf `{' or '.join(parts)}` $who))) }}}}"
        f"{{{{ if eq .Labels.what `hours` }}}}{{{{ $hours = {FORMATS['hours']} }}}}"
        f"{{{{ else if eq .Labels.what `cost` }}}}{{{{ $cost = {FORMATS['cost']} }}}}"
        f"{{{{ else if eq .Labels.what `peak` }}}}{{{{ $peak = {FORMATS['peak']} }}}}"
        f"{{{{ else if eq .Labels.what `cores` }}}}{{{{ $cores = {FORMATS['cores']} }}}}"
        f"{{{{ else if eq .Labels.what `cpus` }}}}{{{{ $cpus = {FORMATS['cpus']} }}}}"
        "{{ else if eq (len $named) 10 }}{{ $gpus = printf `%s and others` $gpus }}{{ $named = printf `%s.` $named }}"
        f"{{{{ else if lt (len $named) 10 }}}}{PLACE}"
        "{{ $gpus = printf `%s%s%s` $gpus (or (and $gpus `, `) ``) $gpu }}"
        "{{ $named = printf `%s.` $named }}"
        "{{ end }}{{ end }}{{ with $gpus }}{{ . }}."
        f"{figures_text(hours)}{{{{ end }}}}"
    )


def stalled_text() -> str:
    """Returns a template as gpus_text does, for the GPUs of a stalled holder: first GPUs at rest, then stalled ones, at
    most ten of each.
    """
    members = "allocation:gpu_stalled_member:info"
    late = placed(f"{members}X").replace("X{%[1]s}", '{part="late",%[1]s}').replace('"gpu"', '"late"')
    spin = placed(f"{members}X").replace("X{%[1]s}", '{part!="late",%[1]s}')
    return (
        f"{WHO}{{{{ $late := `` }}}}{{{{ $lates := `` }}}}{{{{ $spin := `` }}}}{{{{ $spins := `` }}}}"
        f"{{{{ range sortByLabel `node` (sortByLabel `gpu` (query (printf `{late} or {spin}` $who))) }}}}{PLACE}"
        "{{ if and (or (eq .Labels.part `late`) (eq .Labels.what `late`)) (lt (len $lates) 10) }}"
        "{{ $late = printf `%s%s%s` $late (or (and $late `, `) ``) $gpu }}{{ $lates = printf `%s.` $lates }}"
        "{{ else if and (ne .Labels.part `late`) (ne .Labels.what `late`) (lt (len $spins) 10) }}"
        "{{ $spin = printf `%s%s%s` $spin (or (and $spin `, `) ``) $gpu }}{{ $spins = printf `%s.` $spins }}"
        "{{ end }}{{ end }}"
        "{{ with $late }}At 0 %: {{ . }}: the others may wait for it. {{ end }}"
        "{{ with $spin }}Stalled: {{ . }}.{{ end }}"
    )


class Fact(NamedTuple):
    """An additional query of a Grafana rule, with at most one row for each holder. `labels`: the labels that the text
    uses.
    """

    query: str
    labels: str = ""


class Second(NamedTuple):
    """An annotation for Grafana, whose templates cannot run queries. The text reads each fact as $fact.NAME, within
    `with`.
    """

    facts: Mapping[str, Fact]
    text: str


def one(query: str) -> str:
    return f"topk by ({HOLDER}) (1, {query})"


def place_fact(recording: str) -> Fact:
    """Returns the number of GPUs in `recording`, and the place of one of them, because Grafana has one row for each
    alert.
    """
    place = f"allocation:gpu_place:info and on ({KEY}) {recording} or on ({KEY}) {recording}"
    count = f"count by ({HOLDER}) (group by ({KEY}) ({recording}))"
    return Fact(f"0 * {one(place)} + on ({HOLDER}) group_left () {count}", "node, uuid, mig_uuid, gpu, mig")


PLACED = f"{PLACE}{{{{ $gpu }}}}{{{{ if gt .Value 1.0 }}}} and others, {{{{ .Value }}}} in all{{{{ end }}}}"


def second_gpus(recording: str, hours: str) -> Second:
    """Returns gpus_text for Grafana, with one GPU named."""
    found = figures(recording, hours, "", f" by ({HOLDER}) ")
    read = "".join(
        f"{{{{ ${name} := `` }}}}{{{{ with $fact.{name} }}}}{{{{ ${name} = {FORMATS[name]} }}}}{{{{ end }}}}"
        if name in found
        else f"{{{{ ${name} := `` }}}}"
        for name in FORMATS
    )
    return Second(
        {"place": place_fact(recording), **{name: Fact(query) for name, query in found.items()}},
        f"{read}{{{{ with $fact.place }}}}{PLACED}.{figures_text(hours)}{{{{ end }}}}",
    )


def second_stalled() -> Second:
    """Returns stalled_text for Grafana, with one GPU of each kind named."""
    members = "allocation:gpu_stalled_member:info"
    return Second(
        {"late": place_fact(f'{members}{{part="late"}}'), "stalled": place_fact(f'{members}{{part!="late"}}')},
        f"{{{{ with $fact.late }}}}At 0 %: {PLACED}: the others may wait for it. {{{{ end }}}}"
        f"{{{{ with $fact.stalled }}}}Stalled: {PLACED}.{{{{ end }}}}",
    )


def number_slots() -> list[list[str]]:
    """Divides the quantities of all causes into slots. Each cause has at most one quantity in each slot, and its sorted
    quantities are in the order of the slots.
    """
    chains = [sorted(meaning.quantities) for meaning in CAUSES.values()]
    slots: dict[str, int] = {}
    for each in sorted({quantity for chain in chains for quantity in chain}):
        before = [slots[name] for chain in chains if each in chain for name in chain if name < each]
        slots[each] = max(before, default=-1) + 1
    return [[name for name in slots if slots[name] == slot] for slot in sorted(set(slots.values()))]


def second_cause() -> Second:
    """Returns CAUSE for Grafana. Each number has its own query."""
    names = {f"number{slot}": "|".join(each) for slot, each in enumerate(number_slots())}
    numbers = {
        name: Fact(one(f'holder:gpu_cause_value:one{{quantity=~"{each}"}}'), "quantity") for name, each in names.items()
    }
    shown = "".join(f"{{{{ with $fact.{name} }}}} {{{{ .Labels.quantity }}}}={NUMBER}{{{{ end }}}}" for name in names)
    cause = "{{ .Labels.cause }} ({{ .Labels.confidence }} confidence)"
    return Second(
        {"cause": Fact(one("holder:gpu_cause:count"), "cause, confidence"), **numbers},
        f"{{{{ with $fact.cause }}}}{cause}{shown}{{{{ end }}}}",
    )


STAGES = f"count by ({HOLDER}, stage) (gpu_reconciler_allocation_stage{{${{reconciler}}}})"
# The annotations of Grafana's copies in place of those of FIXED that query.
SECOND: Mapping[str, Second] = {
    "idle_gpus": second_gpus(IDLE_RUNS, IDLE_HOURS),
    "held_gpus": second_gpus(HELD, ""),
    "stalled_gpus": second_stalled(),
    "cause": second_cause(),
    "stage": Second(
        {"at": Fact(f"max by ({HOLDER}) ({RISE}{{${{reconciler}}}})"), "stage": Fact(one(STAGES), "stage")},
        f"{{{{ with $fact.at }}}}{AT}{{{{ end }}}}{{{{ with $fact.stage }}}}{{{{ .Labels.stage }}}} {{{{ end }}}}",
    ),
}
FIXED = {
    "key": KEY,
    "target": TARGET,
    "witnesses_min": str(WITNESSES_MIN),
    "holder": HOLDER,
    "gpu": f"{TARGET}, gpu, uuid",
    "tenant": "scheduler, namespace, account, user",
    "owner": "user, account, partition, qos, array_job_id, array_task_id, het_job_id, het_job_offset, "
    "workload, workload_type, team, queue, ${pod_labels}",
    "idle_gpus": gpus_text(IDLE_RUNS, IDLE_HOURS),
    "held_gpus": gpus_text(HELD, ""),
    "stalled_gpus": stalled_text(),
    "cause": CAUSE,
    "stage": STAGE,
    # The holder's name as its owner knows it.
    "name": "{{ if $labels.array_job_id }}Job {{ $labels.array_job_id }}_{{ $labels.array_task_id }}{{ else if "
    "$labels.het_job_id }}Job {{ $labels.het_job_id }}+{{ $labels.het_job_offset }}{{ else if $labels.job_id }}Job "
    "{{ $labels.job_id }}{{ else }}Pod {{ $labels.namespace }}/{{ $labels.pod }}{{ end }}",
}
