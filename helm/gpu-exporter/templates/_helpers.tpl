{{/* Every template begins with this. `helm upgrade --reuse-values` replaces the chart's defaults by those of the chart
     before, which lack newer keys: then the defaults fill the gaps. Some objects of Kubernetes are kept as they were,
     because a key that is missing there is one that a preset or the site has set to null. */}}
{{- define "gpu-exporter.begin" -}}
{{- $defaults := .Files.Get "files/values.yaml" | fromYaml -}}
{{- if ne (int (.Values.valuesVersion | default 0)) (int $defaults.valuesVersion) -}}
{{- $before := deepCopy .Values -}}
{{- $merged := mergeOverwrite $defaults .Values -}}
{{- range $part := list "agent" "reconciler" -}}
{{- $parts := get $before $part | default dict -}}
{{- range $object := list "podSecurityContext" "securityContext" "resources" -}}
{{- if hasKey $parts $object }}{{ $_ := set (get $merged $part) $object (get $parts $object) }}{{ end -}}
{{- end -}}
{{- if and $parts (not (hasKey $parts "resources")) }}{{ $_ := set (get $merged $part) "resources" dict }}{{ end -}}{{/* every chart had them */}}
{{- end -}}
{{- $_ := set . "Values" $merged -}}
{{- end -}}
{{- include "gpu-exporter.check" . -}}
{{- end }}

{{- define "gpu-exporter.chart" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "gpu-exporter.name" -}}
{{- $chart := include "gpu-exporter.chart" . -}}
{{- if .Values.fullnameOverride -}}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $chart .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $chart | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "gpu-exporter.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end }}

{{/* Selector of one component: (dict "root" $ "component" "agent") */}}
{{- define "gpu-exporter.selector" -}}
app.kubernetes.io/name: {{ include "gpu-exporter.chart" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* A version as a label: Flux adds +DIGEST to it, and a label may hold neither + nor more than 63 characters. */}}
{{- define "gpu-exporter.version" -}}
{{- . | replace "+" "_" | trunc 63 | trimSuffix "-" | trimSuffix "_" | trimSuffix "." -}}
{{- end }}

{{/* The labels of an object, also the site's: each key once, since many tools refuse a second one. Those of the chart come first,
     then "labels", then commonLabels. (dict "root" $ "component" "agent" "labels" LABELS) */}}
{{- define "gpu-exporter.labels" -}}
{{- $version := include "gpu-exporter.version" .root.Chart.AppVersion -}}
{{- $chart := include "gpu-exporter.version" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) -}}
{{- $own := dict "app.kubernetes.io/version" $version "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" $chart -}}
{{- toYaml (merge (include "gpu-exporter.selector" . | fromYaml) $own (.labels | default dict) .root.Values.commonLabels) -}}
{{- end }}

{{/* The metadata of an object: (dict "root" $ "component" "agent" "name" NAME), and if needed "namespace" (none for an object
     of the whole cluster: "-"), "labels" and "annotations". */}}
{{- define "gpu-exporter.metadata" -}}
name: {{ .name | quote }}
{{- if ne (.namespace | default "") "-" }}
namespace: {{ .namespace | default (include "gpu-exporter.namespace" .root) | quote }}
{{- end }}
labels: {{- include "gpu-exporter.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* An image: its registry may be replaced for the whole site, and a tag holds no +. */}}
{{- define "gpu-exporter.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.global.imageRegistry -}}
{{- $first := splitList "/" $repository | first -}}
{{- if or (contains "." $first) (contains ":" $first) (eq $first "localhost") -}}
{{- $repository = trimPrefix (printf "%s/" $first) $repository -}}
{{- end -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .image.digest }}{{ $repository }}@{{ .image.digest }}
{{- else }}{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion | replace "+" "_" }}{{ end -}}
{{- end }}

{{/* The account of one part: (dict "root" $ "part" .Values.agent "component" "agent") */}}
{{- define "gpu-exporter.account" -}}
{{- if .part.serviceAccount.create -}}
{{ .part.serviceAccount.name | default (printf "%s-%s" (include "gpu-exporter.name" .root) .component) }}
{{- else -}}
{{ .part.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* The configuration file, the same for agent and reconciler. */}}
{{- define "gpu-exporter.config" -}}
{{ .Values.settings | default dict | toYaml }}
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
{{- if include "gpu-exporter.isDuration" $value -}}
{{- $text = $text | replace (printf "${%s.seconds}" $name) (include "gpu-exporter.seconds" $value) -}}
{{- $value = include "gpu-exporter.duration" $value -}}
{{- end -}}
{{- $text = $text | replace (printf "${%s}" $name) $value -}}
{{- end -}}
{{- $without := .root.Values.prometheusRule.without -}}
{{- if $without -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $text).groups -}}
{{- $kept := list -}}
{{- range $group.rules -}}
{{- if not (has (.alert | default .title) $without) }}{{ $kept = append $kept . }}{{ end -}}
{{- end -}}
{{- if $kept }}{{ $groups = append $groups (merge (dict "rules" $kept) (omit $group "rules")) }}{{ end -}}
{{- end -}}
{{- $text = ternary (toYaml (merge (dict "groups" $groups) (omit (fromYaml $text) "groups"))) "" (gt (len $groups) 0) -}}
{{- end -}}
{{- $text -}}
{{- end }}

{{/* NAMESPACE/NAME of the reconciler's Lease, which also keeps the pause. */}}
{{- define "gpu-exporter.lease" -}}
{{ .Values.reconciler.lease.namespace | default (include "gpu-exporter.namespace" .) }}/{{ .Values.reconciler.lease.name | default (printf "%s-reconciler" (include "gpu-exporter.name" .)) }}
{{- end }}
