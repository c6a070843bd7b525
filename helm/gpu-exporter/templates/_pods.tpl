{{/* The kubelet's probe. It names the program's listen address, unless the program listens on every address.
     (dict "root" $ "part" .Values.agent "path" "/-/ready" "probe" .Values.agent.readinessProbe) */}}
{{- define "gpu-exporter.probe" -}}
{{- $own := dict -}}
{{- range $key, $value := .probe }}{{ if not (kindIs "invalid" $value) }}{{ $_ := set $own $key $value }}{{ end }}{{ end -}}
{{- if not (pick $own "exec" "grpc" "httpGet" "tcpSocket") -}}
httpGet:
  path: {{ .path }}
  port: metrics
  scheme: {{ .root.Values.web.scheme }}
  {{- $host := trimAll "[]" .part.listenAddress }}
  {{- if not (has $host (list "" "::" "0.0.0.0")) }}
  host: {{ $host | quote }}
  {{- end }}
{{- end }}
{{- with $own }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels and annotations of a pod: (dict "root" $ "part" .Values.agent "component" "agent" "annotations" ANNOTATIONS) */}}
{{- define "gpu-exporter.podMetadata" -}}
labels: {{- include "gpu-exporter.labels" (dict "root" .root "component" .component "labels" .part.podLabels) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .part.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The security context of a container: no rights, then the site's own. (dict "root" $ "part" .Values.agent) */}}
{{- define "gpu-exporter.noRights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpu-exporter.securityContext" -}}
{{- toYaml (mergeOverwrite (include "gpu-exporter.noRights" . | fromYaml) (deepCopy (.part.securityContext | default dict))) }}
{{- end }}

{{/* The right to trace processes only where open files are read for causes (settings.causes.files). */}}
{{- define "gpu-exporter.agentSecurityContext" -}}
{{- $agent := .Values.agent -}}
{{- $own := include "gpu-exporter.noRights" . | fromYaml -}}
{{- if $agent.privileged -}}
{{- $own = dict "privileged" true "readOnlyRootFilesystem" true -}}
{{- else if eq "trace" (dig "causes" "files" "none" (.Values.settings | default dict)) -}}
{{- $_ := set $own.capabilities "add" (list "SYS_PTRACE") -}}
{{- end -}}
{{- toYaml (mergeOverwrite (merge (dict "runAsUser" 0) $own) (deepCopy ($agent.securityContext | default dict))) }}
{{- end }}

{{/* What the pods of all parts have in common: (dict "root" $ "part" .Values.agent). The API server drops `hostNetwork: false`,
     so each `kubectl apply` would find a difference. */}}
{{- define "gpu-exporter.pod" -}}
enableServiceLinks: false
{{- if .part.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with .part.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" .part.hostNetwork) }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .part.dnsConfig }}
dnsConfig: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with concat .root.Values.imagePullSecrets (.root.Values.global.imagePullSecrets | default list) | uniq }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where the reconciler reads its evidence. */}}
{{- define "gpu-exporter.sourceFlags" -}}
{{- $flags := list (printf "--source.prometheus=%s" .Values.reconciler.prometheusURL) (printf "--source.matcher=%s" .Values.reconciler.matcher) -}}
{{- $own := .Values.reconciler.prometheus -}}
{{- range $flag, $value := dict "tls.ca" $own.caFile "tls.cert" $own.certFile "tls.key" $own.keyFile "bearer-token-file" $own.bearerTokenFile "basic-auth.username" $own.username "basic-auth.password-file" $own.passwordFile "header-file" $own.headerFile -}}
{{- if $value }}{{ $flags = append $flags (printf "--source.%s=%s" $flag $value) }}{{ end -}}
{{- end -}}
{{- range $own.headers }}{{ $flags = append $flags (printf "--source.header=%s" .) }}{{ end -}}
{{- range $flags }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* The container of the reconciler, its cleanup and its test. */}}
{{- define "gpu-exporter.reconcilerContainer" -}}
image: {{ include "gpu-exporter.image" (dict "root" . "image" .Values.reconciler.image) | quote }}
imagePullPolicy: {{ .Values.reconciler.image.pullPolicy }}
{{- with .Values.reconciler.extraEnv }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "gpu-exporter.securityContext" (dict "root" . "part" .Values.reconciler) | nindent 2 }}
resources: {{- toYaml (.Values.reconciler.resources | default dict) | nindent 2 }}
{{- end }}
