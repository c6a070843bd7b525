{{/* What the programs would refuse, the chart refuses first: otherwise every pod of the release ends with an error. The schema
     checks each value alone; here are the rules between values, as in `gpu-exporter check-config`. */}}
{{- define "gpu-exporter.check" -}}
{{- $settings := .Values.settings | default dict -}}
{{- $agent := .Values.agent -}}
{{- $rules := .Files.Get "files/settings.json" | fromJson -}}
{{- $given := dict -}}
{{- range $name, $default := $rules.defaults -}}
{{- $place := splitList "." $name -}}
{{- $_ := set $given $name (dig (first $place) (last $place) $default $settings) -}}
{{- end -}}
{{- range $rules.order -}}
{{- $low := get $given .low -}}
{{- $high := get $given .high -}}
{{- if gt (mulf .times (include "gpu-exporter.number" $low | float64)) (include "gpu-exporter.number" $high | float64) -}}
{{- fail (printf (printf "settings: %s" .words) $low $high) -}}
{{- end -}}
{{- end -}}
{{- range $name, $limit := $rules.least -}}
{{- if lt (include "gpu-exporter.number" (get $given $name) | float64) (include "gpu-exporter.number" $limit.least | float64) -}}
{{- fail (printf "settings.%s (%v) %s" $name (get $given $name) $limit.why) -}}
{{- end -}}
{{- end -}}
{{- range $section, $keys := $settings }}{{ if kindIs "map" $keys }}{{ range $key, $value := $keys -}}
{{- if and (include "gpu-exporter.isDuration" $value) (gt (include "gpu-exporter.number" $value | float64) $rules.longest) -}}
{{- fail (printf "settings.%s.%s (%v) is longer than a year" $section $key $value) -}}
{{- end -}}
{{- end }}{{ end }}{{ end -}}
{{- $names := list -}}
{{- $known := $rules.policies -}}
{{- $all := "" -}}
{{- if gt (len ($settings.policies | default list)) (int $known.most) }}{{ fail (printf "settings.policies: more than %v policies" $known.most) }}{{ end -}}
{{- range $index, $policy := $settings.policies -}}
{{- $first := $policy.candidate_after | default (get $given "policy.candidate_after") -}}
{{- $then := $policy.underused_after | default (get $given "policy.underused_after") -}}
{{- if gt (include "gpu-exporter.number" $first | float64) (include "gpu-exporter.number" $then | float64) -}}
{{- fail (printf "settings.policies[%d] (%v): candidate_after (%v) must not be above underused_after (%v)" $index $policy.name $first $then) -}}
{{- end -}}
{{- if has $policy.name $names }}{{ fail (printf "settings.policies[%d]: the name %v is given twice" $index $policy.name) }}{{ end -}}
{{- $names = append $names $policy.name -}}
{{- if eq $policy.name $known.section }}{{ fail (printf "settings.policies[%d]: the name %s belongs to the section, which decides if no policy matches" $index $known.section) }}{{ end -}}
{{- if $all }}{{ fail (printf "settings.policies[%d] (%v): is never reached, since %v before it matches all holders" $index $policy.name $all) }}{{ end -}}
{{- $match := $policy.match | default dict -}}
{{- if not $match }}{{ $all = $policy.name }}{{ end -}}
{{- $ofPods := pick $match "" -}}
{{- range $known.of_pods }}{{ if hasKey $match . }}{{ $_ := set $ofPods . true }}{{ end }}{{ end -}}
{{- range $known.of_jobs }}{{ if and $ofPods (hasKey $match .) }}{{ fail (printf "settings.policies[%d] (%v): nothing matches: %s are of pods, %s of jobs" $index $policy.name (join ", " $known.of_pods) (join ", " $known.of_jobs)) }}{{ end }}{{ end -}}
{{- range $known.changes }}{{ if and $policy.exempt (hasKey $policy .) }}{{ fail (printf "settings.policies[%d] (%v): exempt holders are not judged, so %s has no effect" $index $policy.name .) }}{{ end }}{{ end -}}
{{- end -}}
{{- include "gpu-exporter.checkExpressions" (dict "name" "gpuResources" "given" .Values.gpuResources) -}}
{{- include "gpu-exporter.checkExpressions" (dict "name" "agent.monitors" "given" $agent.monitors) -}}
{{- with dig "alerts" "resources" "" $settings -}}
{{- include "gpu-exporter.checkExpressions" (dict "name" "settings.alerts.resources" "given" (list .)) -}}
{{- end -}}
{{- $rulesText := "" -}}
{{- range $path, $_ := .Files.Glob "files/rules/**.yaml" }}{{ $rulesText = print $rulesText ($.Files.Get $path) }}{{ end -}}
{{- range .Values.prometheusRule.without -}}
{{- if not (contains (printf "alert: %s\n" .) $rulesText) }}{{ fail (printf "prometheusRule.without: no alert is called %s" .) }}{{ end -}}
{{- end -}}
{{- range $name, $labels := dict "commonLabels" .Values.commonLabels "agent.podLabels" $agent.podLabels "reconciler.podLabels" .Values.reconciler.podLabels -}}
{{- range $key, $_ := $labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key) }}{{ fail (printf "%s: the label %s belongs to the chart" $name $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $name, $part := dict "agent" $agent "reconciler" .Values.reconciler -}}
{{- $hasRights := ternary $.Values.openshift.scc $.Values.reconciler.enabled (eq $name "agent") -}}
{{- if and $hasRights (not $part.serviceAccount.create) (has $part.serviceAccount.name (list "" "default")) -}}
{{- fail (printf "%s.serviceAccount: with create=false, name an account that is not `default`: its rights would be those of every pod of the namespace" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $agent.enabled (eq "trace" (dig "causes" "files" "none" $settings)) (not $agent.processes) -}}
{{- fail "settings.causes.files=trace: the agent sees processes only with agent.processes=true" -}}
{{- end -}}
{{- if and $agent.enabled (eq "read" (dig "training" "files" "none" $settings)) (not $agent.hostActivity) -}}
{{- fail "settings.training.files=read: the agent looks for trainings only with agent.hostActivity=true" -}}
{{- end -}}
{{- if and (not $agent.enabled) .Values.reconciler.enabled (hasPrefix "source-" .Values.prometheusRule.otherExporter) -}}
{{- fail (printf "agent.enabled=false: the reconciler knows no holder of prometheusRule.otherExporter=%s, and where a reconciler runs, alerts report only the holders that it knows; set reconciler.enabled=false. If agents of another installation need a reconciler, install it in a release without prometheusRule" .Values.prometheusRule.otherExporter) -}}
{{- end -}}
{{- if and $agent.xidKmsg (not $agent.privileged) -}}
{{- fail "agent.xidKmsg: only privileged containers may read /dev/kmsg; set agent.privileged=true, or agent.xidKmsg=false" -}}
{{- end -}}
{{- range $name, $part := dict "agent" $agent "reconciler" .Values.reconciler -}}
{{- $host := trimAll "[]" $part.listenAddress -}}
{{- if and (not $part.hostNetwork) (or (hasPrefix "127." $host) (has $host (list "localhost" "::1"))) -}}
{{- fail (printf "%s.listenAddress: at %s of the pod neither the kubelet nor Prometheus reaches it; set %s.hostNetwork=true, or leave the address empty" $name $host $name) -}}
{{- end -}}
{{- if and (eq "None" $part.dnsPolicy) (not $part.dnsConfig) -}}
{{- fail (printf "%s.dnsPolicy: None needs servers in %s.dnsConfig" $name $name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.podMonitor.scrapeTimeout -}}
{{- if gt (include "gpu-exporter.seconds" . | float64) (include "gpu-exporter.seconds" $.Values.podMonitor.interval | float64) -}}
{{- fail (printf "podMonitor.scrapeTimeout (%s): Prometheus refuses more than the interval (%s)" . $.Values.podMonitor.interval) -}}
{{- end -}}
{{- end -}}
{{- $mail := .Values.digest.mail -}}
{{- if and (or $mail.smtp $mail.from $mail.to) (not (and $mail.smtp $mail.from $mail.to)) -}}
{{- fail "digest.mail: smtp, from and to are needed together" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.service.enabled) -}}
{{- fail "serviceMonitor.enabled: a ServiceMonitor finds pods by a Service; set service.enabled=true, or use podMonitor" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled, podMonitor.enabled: enable only one, or Prometheus scrapes each exporter twice" -}}
{{- end -}}
{{- if and .Values.podMonitor.tlsConfig (ne .Values.web.scheme "HTTPS") -}}
{{- fail "podMonitor.tlsConfig: Prometheus uses it with TLS only; set web.scheme=HTTPS" -}}
{{- end -}}
{{- $own := .Values.reconciler.prometheus -}}
{{- if and (or $own.caFile $own.certFile) (not (hasPrefix "https://" .Values.reconciler.prometheusURL)) -}}
{{- fail "reconciler.prometheus.caFile: TLS needs an address with https in reconciler.prometheusURL" -}}
{{- end -}}
{{- if ne (empty $own.certFile) (empty $own.keyFile) -}}
{{- fail "reconciler.prometheus: certFile and keyFile belong together" -}}
{{- end -}}
{{- $inFile := "which every user of the node could read in the list of processes" -}}
{{- if contains "@" .Values.reconciler.prometheusURL -}}
{{- fail (printf "reconciler.prometheusURL: it has a user or password, %s; set reconciler.prometheus.username and passwordFile" $inFile) -}}
{{- end -}}
{{- if contains "@" .Values.reconciler.alertmanagerURL -}}
{{- fail (printf "reconciler.alertmanagerURL: it has a user or password, %s; leave it empty, and set GPU_EXPORTER_RECONCILE_ALERTMANAGER_URL in reconciler.extraEnv from a Secret" $inFile) -}}
{{- end -}}
{{- range $own.headers -}}
{{- if regexMatch "(?i)auth|cookie|credential|key|pass|secret|signature|token" (first (splitList ":" .)) -}}
{{- fail (printf "reconciler.prometheus.headers: one looks like a secret, %s; write it into headerFile" $inFile) -}}
{{- end -}}
{{- end -}}
{{- if and $own.bearerTokenFile $own.username -}}
{{- fail "reconciler.prometheus: use either bearerTokenFile or username" -}}
{{- end -}}
{{- end }}

{{/* Seconds of a duration, or a number as it is. */}}
{{- define "gpu-exporter.number" -}}
{{- if include "gpu-exporter.isDuration" . }}{{ include "gpu-exporter.seconds" . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Refuse an expression that is not one of RE2. A leading `|` matches the empty text, if the rest is valid. */}}
{{- define "gpu-exporter.checkExpressions" -}}
{{- range .given -}}
{{- if not (regexMatch (print "|" .) "") }}{{ fail (printf "%s: %s is not a regular expression of RE2" $.name .) }}{{ end -}}
{{- end -}}
{{- end }}
