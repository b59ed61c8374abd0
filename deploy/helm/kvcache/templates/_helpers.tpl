{{- define "kvcache.labels" -}}
app.kubernetes.io/name: kvcache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvcache.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (ternary "cuda" "cpu" .Values.gpu.enabled) }}
{{- end }}

{{/* Whole numbers as such: Helm reads them as floats, and 1073741824 would come out as 1.073741824e+09. */}}
{{- define "kvcache.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end }}
{{- end }}

{{/* What the values stand for, as settings; `config` comes on top. */}}
{{- define "kvcache.settings" -}}
{{- $values := .Values -}}
{{- $settings := dict "shared_memory_dir" "/shared" -}}
{{- if $values.persistence.enabled }}{{ $_ := set $settings "disk_dir" "/data" }}{{ end -}}
{{- if $values.gpu.enabled }}{{ $_ := set $settings "device" "cuda" }}{{ end -}}
{{- if $values.insecure }}{{ $_ := set $settings "insecure" "true" }}{{ end -}}
{{- if $values.tls.secret }}
  {{- $_ := set $settings "tls_cert" "/etc/kvcache/tls/tls.crt" }}
  {{- $_ := set $settings "tls_key" "/etc/kvcache/tls/tls.key" }}
  {{- with $values.tls.clientCaKey }}{{ $_ := set $settings "tls_client_ca" (printf "/etc/kvcache/tls/%s" .) }}{{ end -}}
{{- end -}}
{{- if $values.tokens.secret }}{{ $_ := set $settings "tokens_file" "/etc/kvcache/tokens/tokens.toml" }}{{ end -}}
{{- range $name, $value := merge (deepCopy $values.config) $settings }}
KVCACHE_{{ upper $name }}: {{ include "kvcache.scalar" $value | quote }}
{{- end }}
{{- end }}

{{/* How commands inside the pod reach the service beside them: the probes, and whoever comes by `kubectl exec`. */}}
{{- define "kvcache.client" }}
KVCACHE_CLIENT_TARGET: localhost:50051
KVCACHE_CLIENT_ADMIN_TARGET: localhost:50052
{{- if .Values.tls.secret }}
KVCACHE_CLIENT_TLS_CA: /etc/kvcache/tls/ca.crt
{{- if .Values.tls.clientCaKey }}
KVCACHE_CLIENT_TLS_CERT: /etc/kvcache/tls/tls.crt
KVCACHE_CLIENT_TLS_KEY: /etc/kvcache/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* A kubelet's own gRPC probe knows no TLS. */}}
{{- define "kvcache.probe" -}}
{{- if .Values.tls.secret -}}
exec: {command: [kvcache, health]}
{{- else -}}
grpc: {port: 50051}
{{- end }}
{{- end }}

{{- define "kvcache.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvcache.refusals" -}}
{{- $values := .Values -}}
{{- if and (not $values.insecure) (not $values.tls.secret) }}{{ fail "tls.secret is empty: name a Secret with tls.crt, tls.key and ca.crt, or say insecure: true" }}{{ end -}}
{{- if and (not $values.insecure) (not $values.tokens.secret) (not $values.tls.clientCaKey) }}{{ fail "nobody is asked who he is: set tokens.secret or tls.clientCaKey, or say insecure: true" }}{{ end -}}
{{- if and $values.tls.clientCaKey (not $values.tls.secret) }}{{ fail "tls.clientCaKey is set, but tls.secret is not: clients' certificates need TLS" }}{{ end -}}
{{- if and (eq $values.mode "nodeLocal") $values.autoscaling.enabled }}{{ fail "autoscaling.enabled: a DaemonSet has one pod a node; use mode: central" }}{{ end -}}
{{- if and (eq $values.mode "central") $values.sharedMemory.hostPath }}{{ fail "sharedMemory.hostPath: workers of a central service may be on other nodes; use mode: nodeLocal" }}{{ end -}}
{{- end }}

{{- define "kvcache.pod" -}}
metadata:
  labels:
    {{- include "kvcache.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    checksum/settings: {{ include "kvcache.settings" . | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ .Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false  # a Service named kvcache would set KVCACHE_PORT, which is no setting
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- $folders := list }}
  {{- if eq .Values.mode "nodeLocal" }}
  {{- if .Values.persistence.enabled }}{{ $folders = append $folders (dict "name" "data" "path" "/data") }}{{ end }}
  {{- if .Values.sharedMemory.hostPath }}{{ $folders = append $folders (dict "name" "shared" "path" "/shared") }}{{ end }}
  {{- end }}
  {{- with $folders }}
  # The node's folders come into being as root's; this hands them over and ends.
  initContainers:
    - name: folders
      image: {{ include "kvcache.image" $ }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      command: [chown, "10001:10001"{{ range . }}, {{ .path }}{{ end }}]
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          add: [CHOWN]
      volumeMounts:
        {{- range . }}
        - {name: {{ .name }}, mountPath: {{ .path }}}
        {{- end }}
  {{- end }}
  containers:
    - name: kvcache
      image: {{ include "kvcache.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      envFrom:
        - configMapRef: {name: {{ .Release.Name }}-settings}
      {{- if or .Values.redis.secret .Values.environment }}
      env:
        {{- with .Values.redis.secret }}
        - name: KVCACHE_REDIS_URL
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: url}
        {{- end }}
        {{- range $name, $value := .Values.environment }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9464}
      # Ready ends before the process does: no new worker comes while it drains.
      startupProbe:
        {{- include "kvcache.probe" . | nindent 8 }}
        timeoutSeconds: 10
        periodSeconds: 5
        failureThreshold: 60
      readinessProbe:
        {{- include "kvcache.probe" . | nindent 8 }}
        timeoutSeconds: 10
        periodSeconds: 10
      livenessProbe:
        {{- include "kvcache.probe" . | nindent 8 }}
        timeoutSeconds: 10
        periodSeconds: 30
        failureThreshold: 4
      {{- $resources := deepCopy .Values.resources }}
      {{- if .Values.gpu.enabled }}
      {{- $limits := merge (dict "nvidia.com/gpu" .Values.gpu.count) ($resources.limits | default dict) }}
      {{- $_ := set $resources "limits" $limits }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      securityContext: {{- include "kvcache.container-security" . | nindent 8 }}
      volumeMounts:
        {{- if .Values.tls.secret }}
        - {name: tls, mountPath: /etc/kvcache/tls, readOnly: true}
        {{- end }}
        {{- if .Values.tokens.secret }}
        - {name: tokens, mountPath: /etc/kvcache/tokens, readOnly: true}
        {{- end }}
        {{- if .Values.persistence.enabled }}
        - {name: data, mountPath: /data}
        {{- end }}
        - {name: shared, mountPath: /shared}
        - {name: tmp, mountPath: /tmp}
  volumes:
    {{- with .Values.tls.secret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.tokens.secret }}
    - name: tokens
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if and (eq .Values.mode "nodeLocal") .Values.persistence.enabled }}
    - name: data
      hostPath: {path: {{ .Values.persistence.hostPath }}, type: DirectoryOrCreate}
    {{- end }}
    - name: shared
      {{- if .Values.sharedMemory.hostPath }}
      hostPath: {path: {{ .Values.sharedMemory.hostPath }}, type: DirectoryOrCreate}
      {{- else }}
      emptyDir: {sizeLimit: 64Mi}  # nobody else is on it: workers take the stream
      {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
{{- end }}
