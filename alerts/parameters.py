"""Parts of the rules that are the same at every site: lists of labels, and templates of annotations.

A rule contains ${key} in place of KEY. tools/rules.py fills in these parts, and section `alerts` of the configuration.
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
CAUSES = RUNBOOK.replace("alerts/runbook.md", "docs/causes.md")
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


# The causes of a holder's low utilization, at most three, in the one query of an annotation.
CAUSE_QUERY = (
    'label_replace(topk(3, count by (cause, confidence) (allocation:gpu_cause:info{%[1]s})), "what", "cause", "", "")'
)
CAUSE_ADD = (
    "{{ $cause := printf `%s (%s confidence)` .Labels.cause .Labels.confidence }}"
    "{{ $causes = printf `%s%s%s` $causes (or (and $causes `, `) ``) $cause }}"
)
CAUSE_TEXT = f"{{{{ with $causes }}}} Likely cause: {{{{ . }}}}. Advice: {CAUSES}.{{{{ end }}}}"


def gpus_text(recording: str, hours: str) -> str:
    """Template of an annotation: a holder's GPUs in `recording`, their `hours` if not empty, and their memory use.

    Names and figures cannot be labels: they change, and each change would be a new alert. So each pending or firing
    alert runs one query (docs/scale.md shows the cost). The query has no matchers for labels that the holder lacks,
    because a matcher for an empty label reads every value of that label. At most ten GPUs are named.
    """
    parts = [f"{recording}{{%[1]s}}"]
    if hours:
        parts.append(f'label_replace(sum({recording}{{%[1]s}}) / 3600, "what", "hours", "", "")')
    peak = "max(max_over_time(allocation:gpu_memory_used_bytes:max30m{%[1]s}[${low_over}]))"
    parts += [f'label_replace({peak}, "what", "peak", "", "")', CAUSE_QUERY]
    return (
        f"{WHO}"
        "{{ $gpus := `` }}{{ $hours := `` }}{{ $peak := `` }}{{ $named := `` }}{{ $causes := `` }}"
        f"{{{{ range sortByLabel `uuid` (query (printf `{' or '.join(parts)}` $who)) }}}}"
        "{{ if eq .Labels.what `hours` }}{{ $hours = printf `%.1f` .Value }}"
        "{{ else if eq .Labels.what `peak` }}{{ $peak = .Value | humanize1024 }}"
        f"{{{{ else if eq .Labels.what `cause` }}}}{CAUSE_ADD}"
        "{{ else if eq (len $named) 10 }}{{ $gpus = printf `%s and others` $gpus }}{{ $named = printf `%s.` $named }}"
        "{{ else if lt (len $named) 10 }}{{ if $gpus }}{{ $gpus = printf `%s, ` $gpus }}{{ end }}"
        "{{ $gpus = printf `%s%s on %s` $gpus (or .Labels.mig_uuid .Labels.uuid) .Labels.node }}"
        "{{ $named = printf `%s.` $named }}"
        "{{ end }}{{ end }}{{ with $gpus }}GPUs: {{ . }}."
        f"{{{{ with $hours }}}} {hours or 'hours'}: {{{{ . }}}}.{{{{ end }}}}"
        "{{ with $peak }} Highest memory use on one GPU in the last ${low_over}: {{ . }}B.{{ end }}{{ end }}"
        f"{CAUSE_TEXT}"
    )


def stalled_text() -> str:
    """As gpus_text: the GPUs of a stalled holder, those at rest first, at most ten of each kind."""
    return (
        f"{WHO}{{{{ $late := `` }}}}{{{{ $lates := `` }}}}{{{{ $spin := `` }}}}{{{{ $spins := `` }}}}"
        "{{ $causes := `` }}{{ range sortByLabel `uuid` (query (printf "
        f"`allocation:gpu_stalled_member:info{{%[1]s}} or {CAUSE_QUERY}` $who)) }}}}"
        f"{{{{ if eq .Labels.what `cause` }}}}{CAUSE_ADD}{{{{ else }}}}"
        "{{ $gpu := printf `%s on %s` .Labels.uuid .Labels.node }}"
        "{{ if and (eq .Labels.part `late`) (lt (len $lates) 10) }}"
        "{{ $late = printf `%s%s%s` $late (or (and $late `, `) ``) $gpu }}{{ $lates = printf `%s.` $lates }}"
        "{{ else if and (ne .Labels.part `late`) (lt (len $spins) 10) }}"
        "{{ $spin = printf `%s%s%s` $spin (or (and $spin `, `) ``) $gpu }}{{ $spins = printf `%s.` $spins }}"
        "{{ end }}{{ end }}{{ end }}"
        "{{ with $late }}At 0 %: {{ . }}: the others may wait for it. {{ end }}"
        "{{ with $spin }}Stalled: {{ . }}.{{ end }}"
        f"{CAUSE_TEXT}"
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
    "holder_name": "{{ if $labels.job_id }}Job {{ $labels.job_id }}{{ else }}"
    "Pod {{ $labels.namespace }}/{{ $labels.pod }}{{ end }}",
    # The holder's name as its owner knows it.
    "name": "{{ if $labels.array_job_id }}Job {{ $labels.array_job_id }}_{{ $labels.array_task_id }}{{ else if "
    "$labels.het_job_id }}Job {{ $labels.het_job_id }}+{{ $labels.het_job_offset }}{{ else if $labels.job_id }}Job "
    "{{ $labels.job_id }}{{ else }}Pod {{ $labels.namespace }}/{{ $labels.pod }}{{ end }}",
}
