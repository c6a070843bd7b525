"""Parts of the rules that are the same at every site: lists of labels, and templates of annotations.

In a rule, ${key} stands for the constant KEY. tools/rules.py fills in these constants, and the settings of the section
`alerts` of the configuration.
"""

from __future__ import annotations

from gpu_exporter.common.model.holders import ALLOCATION_KEY

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
# Stages of the reconciler, empty without one: only then can a wish keep the GPUs.
STAGE = (
    f"{WHO}{{{{ range (query (printf "
    "`group by (stage) (gpu_reconciler_allocation_stage{${reconciler},%s})` $who)) }}{{ .Labels.stage }} {{ end }}"
)
# A GPU of .Labels, as its node's nvidia-smi numbers it; by its UUID where only another exporter reports it.
PLACE = (
    "{{ $gpu := printf `%s on %s` (or .Labels.mig_uuid .Labels.uuid) .Labels.node }}"
    "{{ if .Labels.gpu }}{{ $gpu = printf `GPU %s of %s` .Labels.gpu .Labels.node }}"
    "{{ with .Labels.mig }}{{ $gpu = printf `MIG %s of %s` . $gpu }}{{ end }}{{ end }}"
)


def placed(recording: str) -> str:
    """PromQL: a holder's GPUs in `recording`, with the labels gpu and mig where the exporter reports them."""
    by = "on (node, uuid, mig_uuid)"
    return (
        f"label_replace(allocation:gpu_place:info{{%[1]s}} and {by} {recording}{{%[1]s}}, `what`, `gpu`, ``, ``) "
        f"or {by} {recording}{{%[1]s}}"
    ).replace("`", '"')


def gpus_text(recording: str, hours: str) -> str:
    """Template of an annotation: a holder's GPUs in `recording`, their memory and, unless `hours` is empty, hours and
    cost.

    Names and figures cannot be labels: they change, and each change would be a new alert. So each pending or firing
    alert runs one query (docs/scale.md shows the cost). The query has no matchers for labels that the holder lacks,
    because a matcher for an empty label reads every value of that label. At most ten GPUs are named.
    """
    parts = [placed(recording)]
    if hours:
        # An instance or a shared GPU is a part of a GPU, in hours and in money.
        share = f"max by ({KEY}) (allocation:gpu_share:ratio{{%[1]s}})"
        part = f"max by ({KEY}) ({recording}{{%[1]s}}) * on ({KEY}) {share}"
        parts.append(f'label_replace(sum({part}) / 3600, "what", "hours", "", "")')
        priced = f"{part} * on (cluster, node) group_left () node:gpu_price_per_hour:max"
        parts.append(f'label_replace(sum({priced}) / 3600, "what", "cost", "", "")')
    peak = "max(max_over_time(allocation:gpu_memory_used_bytes:max30m{%[1]s}[${low_over}]))"
    parts.append(f'label_replace({peak}, "what", "peak", "", "")')
    return (
        f"{WHO}"
        "{{ $gpus := `` }}{{ $hours := `` }}{{ $cost := `` }}{{ $peak := `` }}{{ $named := `` }}"
        f"{{{{ range sortByLabel `node` (sortByLabel `gpu` (query (printf `{' or '.join(parts)}` $who))) }}}}"
        "{{ if eq .Labels.what `hours` }}{{ $hours = printf `%.1f` .Value }}"
        "{{ else if eq .Labels.what `cost` }}{{ $cost = printf `%.2f` .Value }}"
        "{{ else if eq .Labels.what `peak` }}{{ $peak = .Value | humanize1024 }}"
        "{{ else if eq (len $named) 10 }}{{ $gpus = printf `%s and others` $gpus }}{{ $named = printf `%s.` $named }}"
        f"{{{{ else if lt (len $named) 10 }}}}{PLACE}"
        "{{ $gpus = printf `%s%s%s` $gpus (or (and $gpus `, `) ``) $gpu }}"
        "{{ $named = printf `%s.` $named }}"
        "{{ end }}{{ end }}{{ with $gpus }}{{ . }}."
        f"{{{{ with $hours }}}} {hours or 'hours'}: {{{{ . }}}}"
        "{{ with $cost }}, at the site's price {{ . }}{{ end }}.{{ end }}"
        "{{ with $peak }} Highest memory use on one GPU in the last ${low_over}: {{ . }}B.{{ end }}{{ end }}"
    )


def stalled_text() -> str:
    """As gpus_text, for the GPUs of a stalled holder: those at rest first, at most ten of each kind."""
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


FIXED = {
    "key": KEY,
    "target": TARGET,
    "holder": HOLDER,
    "gpu": f"{TARGET}, gpu, uuid",
    "tenant": "scheduler, namespace, account, user",
    "owner": "user, account, partition, qos, array_job_id, array_task_id, het_job_id, het_job_offset, "
    "workload, workload_type, team, queue, ${pod_labels}",
    "idle_gpus": gpus_text("allocation:gpu_idle_run_seconds:proven", "Idle GPU-hours so far"),
    "held_gpus": gpus_text("allocation:gpu_idle_run_seconds:known", ""),
    "stalled_gpus": stalled_text(),
    "cause": CAUSE,
    "stage": STAGE,
    "holder_name": "{{ if $labels.job_id }}Job {{ $labels.job_id }}{{ else }}"
    "Pod {{ $labels.namespace }}/{{ $labels.pod }}{{ end }}",
    # The holder's name as its owner knows it.
    "name": "{{ if $labels.array_job_id }}Job {{ $labels.array_job_id }}_{{ $labels.array_task_id }}{{ else if "
    "$labels.het_job_id }}Job {{ $labels.het_job_id }}+{{ $labels.het_job_offset }}{{ else if $labels.job_id }}Job "
    "{{ $labels.job_id }}{{ else }}Pod {{ $labels.namespace }}/{{ $labels.pod }}{{ end }}",
}
