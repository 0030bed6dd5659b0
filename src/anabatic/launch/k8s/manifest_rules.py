"""The fields that our manifests use, with their rules: an unknown field, a wrong type or an invalid name is a fault.

The API server and the operators' admission webhooks check the same, but only once there is a cluster.
"""

from __future__ import annotations

from anabatic.launch.k8s.field_rules import (
    BooleanRule,
    ChoiceRule,
    IntegerRule,
    ListRule,
    MapRule,
    ObjectRule,
    TextRule,
)

JOB_NAME = TextRule(
    "a name of small letters, digits and dashes that begins with a letter and ends with a letter or digit",
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    50,
)
"""Operators name services (RFC 1035) and pods (63 characters with `-worker-999`) after the job."""
DNS_LABEL = TextRule("a name of small letters, digits and dashes", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
OBJECT_NAME = TextRule("a name of small letters, digits, dashes and dots", _SUBDOMAIN, 253)
_PREFIX = rf"(?=[^/]{{1,253}}/){_SUBDOMAIN}/"
LABEL_KEY = TextRule("a label's key", rf"({_PREFIX})?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", 317)
LABEL_VALUE = TextRule("a label's value", r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
RESOURCE_NAME = TextRule(
    "a resource such as huawei.com/Ascend910, with its domain",
    rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_PREFIX}[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
    317,
)
"""A resource of Kubernetes or a device plugin (kubernetes.io, "Resource Management": extended ones have a domain)."""
VARIABLE_NAME = TextRule("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*")
QUANTITY = TextRule(
    "a quantity such as 64Gi or 500m", r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][0-9]+)?", 30
)
ABSOLUTE_PATH = TextRule("an absolute path without a colon", r"/[^:\0\n]*")
IMAGE_NAME = TextRule("an image", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", 500)
_ANY_TEXT = TextRule(pattern=r"(?s:.*)")
_COUNT = IntegerRule(1)

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label with the name of a LocalQueue (kueue, pkg/controller/constants/constants.go)."""
LABELS = MapRule(
    LABEL_KEY,
    LABEL_VALUE,
    {
        QUEUE_LABEL: TextRule(OBJECT_NAME.description, _SUBDOMAIN, 63),
        "fault-scheduling": ChoiceRule(("grace", "force", "off")),
        "fault-retry-times": TextRule("a number from 0 to 100", r"[0-9]|[1-9][0-9]|100"),
        "pod-rescheduling": ChoiceRule(("on", "off")),
    },
)
"""Values of MindCluster's labels: mind-cluster v26.1, scheduling/api/volcano.md, labels of a PodGroup."""
ANNOTATIONS = MapRule(LABEL_KEY, _ANY_TEXT, max_bytes=256 << 10)
"""The API server limits all annotations of an object to 256 KiB (apimachinery, api/validation/objectmeta.go)."""
METADATA = ObjectRule({"name": JOB_NAME}, {"namespace": DNS_LABEL, "labels": LABELS, "annotations": ANNOTATIONS})
_KEY_REF = ObjectRule({"name": OBJECT_NAME, "key": TextRule("a key of a secret", r"[-._A-Za-z0-9]+", 253)})
_FIELD_REF = ObjectRule(
    {"fieldPath": TextRule("a field of the pod", r"status\.hostIP|metadata\.annotations\['[^'\n]+'\]")}
)
_ENV_ENTRY = ObjectRule(
    {"name": VARIABLE_NAME},
    {
        "value": _ANY_TEXT,
        "valueFrom": ObjectRule({}, {"secretKeyRef": _KEY_REF, "fieldRef": _FIELD_REF}, ("secretKeyRef", "fieldRef")),
    },
    ("value", "valueFrom"),
)
_VOLUME = ObjectRule(
    {"name": DNS_LABEL},
    {
        "hostPath": ObjectRule({"path": ABSOLUTE_PATH}, {"type": ChoiceRule(("", "Directory", "File"))}),
        "persistentVolumeClaim": ObjectRule({"claimName": OBJECT_NAME}, {"readOnly": BooleanRule()}),
        "nfs": ObjectRule(
            {"server": TextRule("a server", r"[A-Za-z0-9.:\[\]-]+"), "path": ABSOLUTE_PATH}, {"readOnly": BooleanRule()}
        ),
        "emptyDir": ObjectRule({}, {"medium": ChoiceRule(("", "Memory")), "sizeLimit": QUANTITY}),
        "configMap": ObjectRule({"name": OBJECT_NAME}),
    },
    ("hostPath", "persistentVolumeClaim", "nfs", "emptyDir", "configMap"),
)
_RESOURCES = ObjectRule({}, {"requests": MapRule(RESOURCE_NAME, QUANTITY), "limits": MapRule(RESOURCE_NAME, QUANTITY)})
_CONTAINER = ObjectRule(
    {"name": DNS_LABEL, "image": IMAGE_NAME, "command": ListRule(_ANY_TEXT, 1)},
    {
        "imagePullPolicy": ChoiceRule(("Always", "IfNotPresent", "Never")),
        "workingDir": ABSOLUTE_PATH,
        "env": ListRule(_ENV_ENTRY, unique_field="name"),
        "envFrom": ListRule(ObjectRule({"secretRef": ObjectRule({"name": OBJECT_NAME})})),
        "ports": ListRule(ObjectRule({"containerPort": IntegerRule(1, 65535)}, {"name": DNS_LABEL})),
        "resources": _RESOURCES,
        "securityContext": ObjectRule(
            {"capabilities": ObjectRule({"add": ListRule(TextRule("a capability", r"[A-Z_]+"))})}
        ),
        "volumeMounts": ListRule(
            ObjectRule({"name": DNS_LABEL, "mountPath": ABSOLUTE_PATH}, {"readOnly": BooleanRule()}),
            unique_field="mountPath",
        ),
    },
)
_ANTI_AFFINITY_TERM = ObjectRule(
    {
        "topologyKey": LABEL_KEY,
        "labelSelector": ObjectRule(
            {
                "matchExpressions": ListRule(
                    ObjectRule({"key": LABEL_KEY, "operator": ChoiceRule(("In",)), "values": ListRule(LABEL_VALUE, 1)}),
                    1,
                )
            }
        ),
    }
)
_AFFINITY = ObjectRule(
    {
        "podAntiAffinity": ObjectRule(
            {"requiredDuringSchedulingIgnoredDuringExecution": ListRule(_ANTI_AFFINITY_TERM, 1)}
        )
    }
)
POD_TEMPLATE = ObjectRule(
    {
        "spec": ObjectRule(
            {"containers": ListRule(_CONTAINER, 1, "name")},
            {
                "restartPolicy": ChoiceRule(("Always", "OnFailure", "Never")),
                "schedulerName": OBJECT_NAME,
                "priorityClassName": OBJECT_NAME,
                "nodeSelector": MapRule(LABEL_KEY, LABEL_VALUE),
                "affinity": _AFFINITY,
                "hostNetwork": BooleanRule(),
                "dnsPolicy": ChoiceRule(("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
                "terminationGracePeriodSeconds": IntegerRule(),
                "imagePullSecrets": ListRule(ObjectRule({"name": OBJECT_NAME})),
                "volumes": ListRule(_VOLUME, unique_field="name"),
            },
        )
    },
    {"metadata": ObjectRule({}, {"labels": LABELS, "annotations": ANNOTATIONS})},
)
VOLCANO_EVENTS = ("*", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed")
VOLCANO_ACTIONS = ("AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob")
_POLICIES = ListRule(
    ObjectRule(
        {"action": ChoiceRule(VOLCANO_ACTIONS)},
        {"event": ChoiceRule(VOLCANO_EVENTS), "exitCode": IntegerRule(1, 255)},
        ("event", "exitCode"),
    )
)
"""Events and actions that a user may name: volcano v1.15, pkg/webhooks/admission/jobs/validate/util.go."""
VOLCANO_JOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("batch.volcano.sh/v1alpha1",)),
        "kind": ChoiceRule(("Job",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {
                "minAvailable": _COUNT,
                "schedulerName": OBJECT_NAME,
                "tasks": ListRule(
                    ObjectRule(
                        {"name": DNS_LABEL, "replicas": _COUNT, "template": POD_TEMPLATE}, {"minAvailable": _COUNT}
                    ),
                    1,
                    "name",
                ),
            },
            {
                "queue": OBJECT_NAME,
                "priorityClassName": OBJECT_NAME,
                "maxRetry": IntegerRule(),
                "plugins": MapRule(ChoiceRule(("env", "svc", "ssh", "pytorch")), ListRule(_ANY_TEXT)),
                "policies": _POLICIES,
            },
        ),
    }
)
_REPLICAS = ObjectRule(
    {"replicas": _COUNT, "template": POD_TEMPLATE},
    {"restartPolicy": ChoiceRule(("Always", "OnFailure", "Never", "ExitCode"))},
)
PYTORCHJOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("kubeflow.org/v1",)),
        "kind": ChoiceRule(("PyTorchJob",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {"pytorchReplicaSpecs": ObjectRule({"Master": _REPLICAS}, {"Worker": _REPLICAS})},
            {
                "nprocPerNode": TextRule("a number, auto, cpu or gpu", r"auto|cpu|gpu|[1-9][0-9]*"),
                "runPolicy": ObjectRule(
                    {},
                    {
                        "backoffLimit": IntegerRule(),
                        "cleanPodPolicy": ChoiceRule(("All", "Running", "None")),
                        "schedulingPolicy": ObjectRule(
                            {}, {"minAvailable": _COUNT, "queue": OBJECT_NAME, "priorityClass": OBJECT_NAME}
                        ),
                    },
                ),
            },
        ),
    }
)
ASCEND_JOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("mindxdl.gitee.com/v1",)),
        "kind": ChoiceRule(("AscendJob",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {"replicaSpecs": ObjectRule({"Master": _REPLICAS}, {"Worker": _REPLICAS})},
            {
                "schedulerName": OBJECT_NAME,
                "successPolicy": ChoiceRule(("", "AllWorkers")),
                "runPolicy": ObjectRule(
                    {},
                    {
                        "backoffLimit": IntegerRule(),
                        "schedulingPolicy": ObjectRule(
                            {}, {"minAvailable": _COUNT, "queue": OBJECT_NAME, "priorityClass": OBJECT_NAME}
                        ),
                    },
                ),
            },
        ),
    }
)
"""mind-cluster v26.1: the CustomResourceDefinition in component/ascend-operator/build/ascend-operator.yaml, whose pods
have any field, and what ascendjob_validate.go asks for: one Master, a container `ascend`."""
_POD_FAILURE_RULE = ObjectRule(
    {
        "action": ChoiceRule(("FailJob",)),
        "onExitCodes": ObjectRule(
            {"operator": ChoiceRule(("In",)), "values": ListRule(IntegerRule(1, 255), 1)}, {"containerName": DNS_LABEL}
        ),
    }
)
_INDEXED_JOB = ObjectRule(
    {"template": POD_TEMPLATE},
    {
        "completionMode": ChoiceRule(("Indexed",)),
        "parallelism": _COUNT,
        "completions": _COUNT,
        "backoffLimit": IntegerRule(),
        "podFailurePolicy": ObjectRule({"rules": ListRule(_POD_FAILURE_RULE, 1)}),
    },
)
_JOB_SET_SPEC = ObjectRule(
    {
        "replicatedJobs": ListRule(
            ObjectRule(
                {
                    "name": DNS_LABEL,
                    "template": ObjectRule({"spec": _INDEXED_JOB}, {"metadata": ObjectRule({}, {"labels": LABELS})}),
                },
                {"replicas": _COUNT},
            ),
            1,
            "name",
        )
    },
    {
        "network": ObjectRule({}, {"enableDNSHostnames": BooleanRule()}),
        "failurePolicy": ObjectRule(
            {},
            {
                "maxRestarts": IntegerRule(),
                "rules": ListRule(
                    ObjectRule(
                        {
                            "name": TextRule("a rule's name", r"[A-Za-z]([-_A-Za-z0-9]*[A-Za-z0-9])?", 128),
                            "action": ChoiceRule(("FailJobSet", "RestartJobSet")),
                            "onJobFailureReasons": ListRule(ChoiceRule(("PodFailurePolicy", "BackoffLimitExceeded"))),
                        }
                    )
                ),
            },
        ),
    },
)
JOB_SET = ObjectRule(
    {
        "apiVersion": ChoiceRule(("jobset.x-k8s.io/v1alpha2",)),
        "kind": ChoiceRule(("JobSet",)),
        "metadata": METADATA,
        "spec": _JOB_SET_SPEC,
    }
)
TRAINING_RUNTIME = ObjectRule(
    {
        "apiVersion": ChoiceRule(("trainer.kubeflow.org/v1alpha1",)),
        "kind": ChoiceRule(("TrainingRuntime",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {
                "mlPolicy": ObjectRule({"numNodes": _COUNT, "torch": ObjectRule()}),
                "template": ObjectRule({"spec": _JOB_SET_SPEC}),
            }
        ),
    }
)
TRAIN_JOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("trainer.kubeflow.org/v1alpha1",)),
        "kind": ChoiceRule(("TrainJob",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {
                "runtimeRef": ObjectRule({"name": OBJECT_NAME, "kind": ChoiceRule(("TrainingRuntime",))}),
                "trainer": ObjectRule({"numNodes": _COUNT, "numProcPerNode": _COUNT}),
            }
        ),
    }
)
CONFIG_MAP = ObjectRule(
    {
        "apiVersion": ChoiceRule(("v1",)),
        "kind": ChoiceRule(("ConfigMap",)),
        "metadata": ObjectRule({"name": OBJECT_NAME}, {"namespace": DNS_LABEL, "labels": LABELS}),
        "data": MapRule(TextRule("a file's name", r"[-._A-Za-z0-9]+", 253), _ANY_TEXT),
    }
)
SECRET = ObjectRule(
    {
        "apiVersion": ChoiceRule(("v1",)),
        "kind": ChoiceRule(("Secret",)),
        "metadata": ObjectRule({"name": OBJECT_NAME}, {"namespace": DNS_LABEL}),
        "stringData": MapRule(TextRule("a key of a secret", r"[-._A-Za-z0-9]+", 253), _ANY_TEXT),
    }
)
RULES_BY_KIND = {
    "Job": VOLCANO_JOB,
    "PyTorchJob": PYTORCHJOB,
    "AscendJob": ASCEND_JOB,
    "TrainJob": TRAIN_JOB,
    "TrainingRuntime": TRAINING_RUNTIME,
    "JobSet": JOB_SET,
    "ConfigMap": CONFIG_MAP,
    "Secret": SECRET,
}
"""Kind of a manifest -> its rule."""
