{{/* A dry run reads the pods that it would mark, and changes nothing. */}}
{{- /* The objects around a pod: for its group, its class, and its exemptions. */ -}}
{{- define "gpu-exporter.dryRunRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list]
{{ include "gpu-exporter.surroundingsRules" . }}
{{- end }}

{{/* What withdrawing a mark needs. */}}
{{- define "gpu-exporter.markRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch]
{{- if .Values.reconciler.condition }}
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "gpu-exporter.reconcilerRules" -}}
{{ include "gpu-exporter.markRules" . }}
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{ include "gpu-exporter.surroundingsRules" . }}
{{- include "gpu-exporter.actionRules" . }}
{{- end }}

{{/* `none`, `shadow` or `act`, and whether one of the kinds is allowed. */}}
{{- define "gpu-exporter.actionMode" -}}
{{ dig "actions" "mode" "none" (.Values.settings | default dict) }}
{{- end }}

{{- define "gpu-exporter.mayDo" -}}
{{- if has .kind (splitList "," (dig "actions" "kinds" "" (.root.Values.settings | default dict) | nospace)) }}true{{ end -}}
{{- end }}

{{/* The rights of each action, only if the site allows it. The rights above include reading these objects. */}}
{{- define "gpu-exporter.actionRules" -}}
{{- $mode := include "gpu-exporter.actionMode" . | trim -}}
{{- if ne $mode "none" }}
{{- if eq $mode "act" }}
{{- /* The object of a deactivated Workload gets a note, because Kueue can create the Workload again. */}}
{{- if or (include "gpu-exporter.mayDo" (dict "root" . "kind" "suspend")) (include "gpu-exporter.mayDo" (dict "root" . "kind" "deactivate")) }}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [patch]
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [patch]
- apiGroups: [kubeflow.org]
  resources: [jaxjobs, mpijobs, paddlejobs, pytorchjobs, tfjobs, xgboostjobs]
  verbs: [patch]
{{- end }}
{{- if include "gpu-exporter.mayDo" (dict "root" . "kind" "stop") }}
- apiGroups: [kubeflow.org]
  resources: [notebooks]
  verbs: [patch]
{{- end }}
{{- end }}
{{- $mayDeactivate := include "gpu-exporter.mayDo" (dict "root" . "kind" "deactivate") }}
{{- if or $mayDeactivate (include "gpu-exporter.mayDo" (dict "root" . "kind" "suspend")) }}
- apiGroups: [kueue.x-k8s.io]   # objects of Kueue are deactivated instead of suspended, since Kueue would resume them
  resources: [workloads]
  verbs: {{ ternary "[get, list, patch]" "[list]" (and (eq $mode "act") (ne $mayDeactivate "")) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "gpu-exporter.surroundingsRules" -}}
- apiGroups: [""]
  resources: [namespaces, replicationcontrollers]
  verbs: [get]
- apiGroups: [""]
  resources: [services]
  verbs: [list]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [list]
- apiGroups: [inference.networking.x-k8s.io]   # releases before v1
  resources: [inferencepools]
  verbs: [list]
- apiGroups: [apps]
  resources: [replicasets, deployments, statefulsets, daemonsets]
  verbs: [get]
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get]
{{- range $group, $resources := .Values.reconciler.ownerResources }}
{{- if $resources }}
- apiGroups: [{{ $group | quote }}]
  resources: {{ toJson $resources }}
  verbs: [get]
{{- end }}
{{- end }}
{{- end }}
