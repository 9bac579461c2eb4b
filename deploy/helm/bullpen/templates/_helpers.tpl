{{- define "bullpen.labels" -}}
app.kubernetes.io/name: bullpen
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "bullpen.selector" -}}
app.kubernetes.io/name: bullpen
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "bullpen.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Time between the removal of a pod from its Service and SIGTERM, so that no client meets a draining gateway. */}}
{{- define "bullpen.preStopSeconds" -}}5{{- end }}

{{/* The program needs the drain, 5 s to answer clients that wait and 10 s to close. */}}
{{- define "bullpen.gracePeriod" -}}
{{ add .drainSeconds 15 (include "bullpen.preStopSeconds" . | int) }}
{{- end }}

{{- define "bullpen.env" -}}
{{- $v := .root.Values -}}
- {name: BULLPEN_DATA, value: /var/lib/bullpen}
- {name: BULLPEN_LISTEN, value: ":8080"}
- {name: BULLPEN_LOG_FORMAT, value: json}
- {name: BULLPEN_DRAIN, value: {{ printf "%ds" (int .values.drainSeconds) | quote }}}
- {name: BULLPEN_NATS, value: {{ $v.nats.url | quote }}}
- {name: BULLPEN_REPLICAS, value: {{ $v.nats.replicas | quote }}}
{{- if $v.nats.credentials }}
- {name: BULLPEN_NATS_CREDS, value: /etc/bullpen/nats.creds}
{{- end }}
{{- if has .role (list "gateway" "worker") }}
- {name: BULLPEN_STORE, value: {{ $v.store.url | quote }}}
{{- if $v.store.key }}
- {name: BULLPEN_STORE_KEY, value: /etc/bullpen/store.key}
{{- end }}
{{- if $v.store.credentials }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: {secretKeyRef: {name: {{ $v.secretName }}, key: access-key-id}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ $v.secretName }}, key: secret-access-key}}
{{- end }}
{{- end }}
{{- if ne .role "worker" }}
- {name: BULLPEN_SECRETS_KEY, value: /etc/bullpen/secrets.key}
{{- end }}
{{- if and $v.redis.enabled (has .role (list "gateway" "webhook")) }}
- name: BULLPEN_REDIS
  valueFrom: {secretKeyRef: {name: {{ $v.secretName }}, key: redis-url}}
{{- end }}
{{- if eq .role "gateway" }}
- name: BULLPEN_BOOTSTRAP_KEY
  valueFrom: {secretKeyRef: {name: {{ $v.secretName }}, key: bootstrap-key}}
{{- end }}
{{- if and $v.autoscaling.enabled (has .role (list "gateway" "scheduler")) }}
- {name: BULLPEN_AUTOSCALE, value: kubernetes}
- {name: BULLPEN_AUTOSCALE_POLICY, value: /etc/bullpen-autoscale/policy.json}
- {name: BULLPEN_KEDA_LISTEN, value: ":9077"}
{{- end }}
{{- if eq .role "worker" }}
- {name: BULLPEN_TUNNEL, value: ":8090"}
- {name: BULLPEN_POOL, value: {{ .values.pool | quote }}}
{{- if not .values.privileged }}
# Of the 65,536 ids that a pod with a user namespace has.
- {name: BULLPEN_UID_RANGE, value: "10000:55296"}
{{- end }}
{{- end }}
{{- range $name, $value := merge (dict) .values.settings $v.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Files of the Secret that a role needs, for root or the group of the pod alone: the program refuses others. */}}
{{- define "bullpen.files" -}}
- name: files
  secret:
    secretName: {{ .root.Values.secretName }}
    defaultMode: {{ eq .role "worker" | ternary "0400" "0440" }}
    items:
      {{- if ne .role "worker" }}
      - {key: secrets.key, path: secrets.key}
      {{- end }}
      {{- if .root.Values.nats.credentials }}
      - {key: nats.creds, path: nats.creds}
      {{- end }}
      {{- if and .root.Values.store.key (has .role (list "gateway" "worker")) }}
      - {key: store.key, path: store.key}
      {{- end }}
{{- end }}

{{- define "bullpen.probes" -}}
# /healthz answers from the first second on, also while NATS is away: a restart would not help then.
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
