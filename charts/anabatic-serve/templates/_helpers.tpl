{{/* Name of all objects: the release and, unless the release has it in its own name, the chart. */}}
{{- define "anabatic-serve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "anabatic-serve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* One row a chip: resource, label of the vendor's scheduler, whether MindCluster schedules it, files of the driver. */}}
{{- define "anabatic-serve.chips" -}}
910b: {resource: huawei.com/Ascend910, label: ring-controller.atlas, value: ascend-910b, driver: true}
a3: {resource: huawei.com/Ascend910, label: ring-controller.atlas, value: ascend-910b, driver: true}
910a: {resource: huawei.com/Ascend910, label: ring-controller.atlas, value: ascend-910, driver: true}
310p: {resource: huawei.com/Ascend310P, label: ring-controller.atlas, value: ascend-310P, driver: true}
"950": {resource: huawei.com/npu, label: ring-controller.atlas, value: ascend-npu, driver: true}
cce: {resource: huawei.com/ascend-1980, label: ring-controller.cce, value: ascend-1980, driver: true}
nvidia: {resource: nvidia.com/gpu}
none: {resource: ""}
{{- end -}}
