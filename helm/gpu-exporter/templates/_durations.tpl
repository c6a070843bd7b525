{{/* Made from common/durations.py by tools/chart.py: do not edit. */}}

{{/* Seconds of a duration such as 90s, 1h30m, 500ms. */}}
{{- define "gpu-exporter.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|s|m|h|d|w)" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 "w" 604800.0) $unit)) -}}
{{- end -}}
{{- if eq (floor $seconds) $seconds }}{{ int64 $seconds }}{{ else }}{{ $seconds }}{{ end -}}
{{- end }}

{{/* A duration as one number with its unit: PromQL knows neither 1.5h nor 30m1h. */}}
{{- define "gpu-exporter.duration" -}}
{{- $ms := round (mulf 1000.0 (include "gpu-exporter.seconds" . | float64)) 0 | int64 -}}
{{- if not $ms }}0s
{{- else if not (mod $ms 604800000) }}{{ div $ms 604800000 }}w
{{- else if not (mod $ms 86400000) }}{{ div $ms 86400000 }}d
{{- else if not (mod $ms 3600000) }}{{ div $ms 3600000 }}h
{{- else if not (mod $ms 60000) }}{{ div $ms 60000 }}m
{{- else if not (mod $ms 1000) }}{{ div $ms 1000 }}s
{{- else }}{{ $ms }}ms{{ end -}}
{{- end }}

{{- define "gpu-exporter.isDuration" -}}
{{ if regexMatch `^([0-9]+(\.[0-9]+)?(ms|s|m|h|d|w))+$` (toString .) }}true{{ end }}
{{- end }}
