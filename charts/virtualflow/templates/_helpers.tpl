{{/* Names leave room for what is put behind them. */}}
{{- define "virtualflow.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "virtualflow.fullname" -}}
{{- $name := include "virtualflow.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The Deployment, its account, its Lease, and everything else that is the operator's. */}}
{{- define "virtualflow.operator" -}}
{{- printf "%s-operator" (include "virtualflow.fullname" .) -}}
{{- end -}}

{{/* Cluster-wide objects bear the namespace, so that releases of one name in two namespaces do not meet. */}}
{{- define "virtualflow.clusterName" -}}
{{- printf "%s-%s" (include "virtualflow.operator" .) .Release.Namespace -}}
{{- end -}}

{{- define "virtualflow.instanceLabels" -}}
app.kubernetes.io/name: {{ include "virtualflow.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects the operator's pods, and no job's: those have another component. */}}
{{- define "virtualflow.selectorLabels" -}}
{{ include "virtualflow.instanceLabels" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* The turn servers of the nodes, and what selects their pods. */}}
{{- define "virtualflow.turns" -}}
{{- printf "%s-turns" (include "virtualflow.fullname" .) -}}
{{- end -}}

{{- define "virtualflow.turnsLabels" -}}
{{ include "virtualflow.instanceLabels" . }}
app.kubernetes.io/component: turns
{{- end -}}

{{- define "virtualflow.commonLabels" -}}
app.kubernetes.io/part-of: virtualflow
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "virtualflow.labels" -}}
{{ include "virtualflow.selectorLabels" . }}
{{ include "virtualflow.commonLabels" . }}
{{- end -}}

{{- define "virtualflow.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "virtualflow.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "virtualflow.keySecret" -}}
{{- default (printf "%s-key" (include "virtualflow.operator" .)) .Values.key.existingSecret -}}
{{- end -}}

{{- define "virtualflow.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Their names, separated by commas. */}}
{{- define "virtualflow.pullSecrets" -}}
{{- $names := list -}}
{{- range .Values.imagePullSecrets -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* key=value,key=value of the operator's pods, for the NetworkPolicies that it makes for jobs. */}}
{{- define "virtualflow.operatorSelector" -}}
{{- $pairs := list -}}
{{- range $key, $value := include "virtualflow.selectorLabels" . | fromYaml -}}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{/* The namespaces that are named, separated by commas; empty: all. */}}
{{- define "virtualflow.namespaces" -}}
{{- if kindIs "slice" .Values.namespaces -}}{{- join "," .Values.namespaces -}}{{- end -}}
{{- end -}}

{{/* What the operator may do where its jobs are. docs/how-to/security.md says why it needs each of them. */}}
{{- define "virtualflow.jobRules" -}}
- apiGroups: [virtualflow.dev]
  resources: [virtualflowjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [virtualflow.dev]
  resources: [virtualflowjobs/status]
  verbs: [patch]
- apiGroups: [virtualflow.dev]
  resources: [virtualflowjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, update]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
{{- end -}}

{{- define "virtualflow.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [virtualflow.dev]
  resources: [virtualflowqueues]
  verbs: [get, list, watch]
- apiGroups: [virtualflow.dev]
  resources: [virtualflowqueues/status]
  verbs: [patch]
{{- if .Values.metrics.authentication }}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* Whose token the monitors send, which opens nothing but the metrics. */}}
{{- define "virtualflow.metricsReader" -}}
{{- printf "%s-metrics" (include "virtualflow.operator" .) -}}
{{- end -}}

{{/* What an endpoint of a monitor says of it. */}}
{{- define "virtualflow.metricsAuthorization" -}}
{{- if .Values.metrics.authentication -}}
authorization:
  credentials:
    name: {{ include "virtualflow.metricsReader" . }}
    key: token
{{- end }}
{{- end -}}

{{- define "virtualflow.subjects" -}}
- kind: ServiceAccount
  name: {{ include "virtualflow.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
