{{- define "gpu-exporter.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{/* Selector of one component: (dict "root" $ "component" "agent") */}}
{{- define "gpu-exporter.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "gpu-exporter.labels" -}}
{{ include "gpu-exporter.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- /* Flux adds +DIGEST to the version, and a label may hold neither + nor more than 63 characters. */}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | trimSuffix "_" | trimSuffix "." }}
{{- end }}

{{- define "gpu-exporter.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The configuration file, the same for agent and reconciler. */}}
{{- define "gpu-exporter.config" -}}
{{ .Values.settings | default dict | toYaml }}
{{- end }}

{{/* Seconds of a duration such as 90s, 30m, 2h, 500ms. */}}
{{- define "gpu-exporter.seconds" -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds := mulf $number (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit) -}}
{{- if eq (floor $seconds) $seconds }}{{ int64 $seconds }}{{ else }}{{ $seconds }}{{ end -}}
{{- end }}

{{/* One rules file with the site's values. */}}
{{- define "gpu-exporter.rules" -}}
{{- $text := .root.Files.Get .file -}}
{{- $defaults := .root.Files.Get "files/alerts.json" | fromJson -}}
{{- range $name, $value := merge (deepCopy ((.root.Values.settings).alerts | default dict)) $defaults -}}
{{- $value = toString $value -}}
{{- if and (eq $name "resources") (not (hasKey (($.root.Values.settings).alerts | default dict) "resources")) -}}
{{- $value = prepend $.root.Values.gpuResources $value | join "|" | replace "\\." "_" | replace "/" "_" | replace "-" "_" -}}
{{- if not (regexMatch "^[a-zA-Z0-9_|().+*?]+$" $value) -}}
{{- fail (printf "settings.alerts.resources: name the resources of gpuResources as kube-state-metrics writes them, such as example_com_h100; they are not known from %q" $value) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "[a-z]$" $value -}}
{{- $text = $text | replace (printf "${%s.seconds}" $name) (include "gpu-exporter.seconds" $value) -}}
{{- end -}}
{{- $text = $text | replace (printf "${%s}" $name) $value -}}
{{- end -}}
{{- $text -}}
{{- end }}

{{/* The kubelet's probe. It names the program's listen address, unless the program listens on every address.
     (dict "root" $ "address" ADDRESS) */}}
{{- define "gpu-exporter.probe" -}}
scheme: {{ .root.Values.web.scheme }}
{{- $host := trimAll "[]" .address }}
{{- if not (has $host (list "" "::" "0.0.0.0")) }}
host: {{ $host | quote }}
{{- end }}
{{- end }}

{{/* How a Prometheus of the operator scrapes the port. */}}
{{- define "gpu-exporter.scheme" -}}
{{- if eq .Values.web.scheme "HTTPS" }}
scheme: https
{{- with .Values.podMonitor.tlsConfig }}
tlsConfig: {{- toYaml . | nindent 2 }}
{{- end }}
{{- else if .Values.podMonitor.tlsConfig }}
{{- fail "podMonitor.tlsConfig: Prometheus uses it with TLS only; set web.scheme=HTTPS" }}
{{- end }}
{{- with .Values.podMonitor.basicAuth }}
basicAuth: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The security context of every container: no rights. */}}
{{- define "gpu-exporter.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* As above. The right to trace processes only where open files are read for causes (settings.causes.files). */}}
{{- define "gpu-exporter.agentSecurityContext" -}}
{{- if eq "trace" (dig "causes" "files" "none" .Values.settings) }}
{{- if not .Values.agent.processes }}
{{- fail "settings.causes.files=trace: the agent sees processes only with agent.processes=true" }}
{{- end }}
{{- include "gpu-exporter.securityContext" . | replace "{drop: [ALL]}" "{drop: [ALL], add: [SYS_PTRACE]}" }}
{{- else }}
{{- include "gpu-exporter.securityContext" . }}
{{- end }}
{{- end }}

{{/* Shared by the reconciler and its cleanup: parts of the pod and the container, and their rights. */}}
{{- define "gpu-exporter.reconcilerPod" -}}
enableServiceLinks: false
hostNetwork: {{ .Values.reconciler.hostNetwork }}
{{- with .Values.reconciler.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532}
{{- with .Values.reconciler.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.reconciler.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.reconciler.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- define "gpu-exporter.reconcilerContainer" -}}
image: {{ include "gpu-exporter.image" (dict "root" . "image" .Values.reconciler.image) | quote }}
imagePullPolicy: {{ .Values.reconciler.image.pullPolicy }}
{{- with .Values.reconciler.extraEnv }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "gpu-exporter.securityContext" . | nindent 2 }}
{{- end }}

{{/* A dry run reads the pods that it would mark, and changes nothing. */}}
{{- /* The objects around a pod: for its group, its class, and its exemptions. */ -}}
{{- define "gpu-exporter.dryRunRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list]
{{ include "gpu-exporter.surroundingsRules" . }}
{{- end }}

{{- define "gpu-exporter.markRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, patch]
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
- apiGroups: [apps]
  resources: [replicasets, deployments, statefulsets, daemonsets]
  verbs: [get]
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get]
{{- range $group, $resources := .Values.reconciler.ownerResources }}
- apiGroups: [{{ $group | quote }}]
  resources: {{ toJson $resources }}
  verbs: [get]
{{- end }}
{{- end }}
