{{- /* The agent's pod, changed in place: pod (the template), values, image. */}}
{{- define "topoflight.agent" -}}
{{- $values := .values }}
{{- $spec := .pod.spec }}
{{- $agent := first $spec.containers }}
{{- $_ := set $agent "image" .image }}
{{- $_ := set $spec "tolerations" $values.tolerations }}
{{- with $values.runtimeClassName }}{{ $_ := set $spec "runtimeClassName" . }}{{ end }}
{{- with $values.nodeAffinity }}{{ $_ := set $spec "affinity" (dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" .))) }}{{ end }}
{{- with $values.affinity }}{{ $_ := set $spec "affinity" (merge (dict) . ($spec.affinity | default dict)) }}{{ end }}
{{- with $values.nodeSelector }}{{ $_ := set $spec "nodeSelector" . }}{{ end }}
{{- with $values.imagePullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end }}
{{- with $values.priorityClassName }}{{ $_ := set $spec "priorityClassName" . }}{{ end }}
{{- with $values.resources }}{{ $_ := set $agent "resources" . }}{{ end }}
{{- /* labels and annotations that the manifests set win: the selector rests on them */}}
{{- $_ := set .pod.metadata "labels" (merge (dict) .pod.metadata.labels $values.podLabels) }}
{{- $_ := set .pod.metadata "annotations" (merge (dict) .pod.metadata.annotations $values.podAnnotations) }}
{{- with $values.networks }}{{ $_ := set $.pod.metadata.annotations "k8s.v1.cni.cncf.io/networks" . }}{{ end }}
{{- with $values.driverPaths }}{{ $_ := set $agent "env" (append $agent.env (dict "name" "TOPOFLIGHT_DRIVER_PATHS" "value" (join ":" .))) }}{{ end }}
{{- if $values.node.root }}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "host" "hostPath" (dict "path" "/" "type" "Directory"))) }}
{{- $_ := set $agent "volumeMounts" (append $agent.volumeMounts (dict "name" "host" "mountPath" "/host" "readOnly" true)) }}
{{- with $values.node.mountPropagation }}{{ $_ := set (last $agent.volumeMounts) "mountPropagation" . }}{{ end }}
{{- with $values.node.recursiveReadOnly }}{{ $_ := set (last $agent.volumeMounts) "recursiveReadOnly" . }}{{ end }}
{{- end }}
{{- if $values.node.devices }}
{{- $_ := set $spec "volumes" (append $spec.volumes (dict "name" "devices" "hostPath" (dict "path" "/dev/null" "type" "CharDevice"))) }}
{{- $_ := set $agent "volumeMounts" (append $agent.volumeMounts (dict "name" "devices" "mountPath" "/var/run/nvidia-container-devices/all")) }}
{{- end }}
{{- if $values.privileged }}
{{- $_ := set $agent.securityContext "privileged" true }}
{{- $_ := unset $agent.securityContext "allowPrivilegeEscalation" }}
{{- end }}
{{- if $values.hostNetwork }}
{{- $_ := set $spec "hostNetwork" true }}
{{- $_ := set $spec "dnsPolicy" "ClusterFirstWithHostNet" }}
{{- $_ := set (first $agent.ports) "hostPort" 9402 }}
{{- end }}
{{- if $values.openshift }}
{{- $_ := unset $spec.securityContext "runAsUser" }}
{{- $_ := unset $spec.securityContext "runAsGroup" }}
{{- end }}
{{- end }}
