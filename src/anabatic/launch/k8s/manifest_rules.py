"""Rules for the fields of the generated manifests, as their operators and Kubernetes define them.

Sources: names and values, kubernetes.io "Object Names and IDs", "Labels and Selectors" (RFC 1123, RFC 1035); pods,
kubernetes.io API reference v1.32 (PodSpec); Volcano, volcano-sh/volcano config/crd/volcano/bases/batch.volcano.sh_jobs
and its admission webhook (pkg/webhooks/admission/jobs/validate); PyTorchJob, kubeflow/training-operator
manifests/base/crds/kubeflow.org_pytorchjobs and its validation (v1.7 and later: nprocPerNode is a text).
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
LABEL_KEY = TextRule("a label's key", rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", 317)
LABEL_VALUE = TextRule("a label's value", r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
RESOURCE_NAME = TextRule(
    "a resource such as huawei.com/Ascend910, with its domain",
    rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
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

METADATA = ObjectRule(
    {"name": JOB_NAME},
    {"namespace": DNS_LABEL, "labels": MapRule(LABEL_KEY, LABEL_VALUE), "annotations": MapRule(LABEL_KEY, _ANY_TEXT)},
)
_KEY_REF = ObjectRule({"name": OBJECT_NAME, "key": TextRule("a key of a secret", r"[-._A-Za-z0-9]+", 253)})
_ENV_ENTRY = ObjectRule(
    {"name": VARIABLE_NAME},
    {"value": _ANY_TEXT, "valueFrom": ObjectRule({"secretKeyRef": _KEY_REF})},
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
POD_TEMPLATE = ObjectRule(
    {
        "spec": ObjectRule(
            {"containers": ListRule(_CONTAINER, 1, "name")},
            {
                "restartPolicy": ChoiceRule(("Always", "OnFailure", "Never")),
                "schedulerName": OBJECT_NAME,
                "priorityClassName": OBJECT_NAME,
                "nodeSelector": MapRule(LABEL_KEY, LABEL_VALUE),
                "hostNetwork": BooleanRule(),
                "dnsPolicy": ChoiceRule(("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
                "terminationGracePeriodSeconds": IntegerRule(),
                "imagePullSecrets": ListRule(ObjectRule({"name": OBJECT_NAME})),
                "volumes": ListRule(_VOLUME, unique_field="name"),
            },
        )
    },
    {"metadata": ObjectRule({}, {"labels": MapRule(LABEL_KEY, LABEL_VALUE)})},
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
CONFIG_MAP = ObjectRule(
    {
        "apiVersion": ChoiceRule(("v1",)),
        "kind": ChoiceRule(("ConfigMap",)),
        "metadata": ObjectRule({"name": OBJECT_NAME}, {"namespace": DNS_LABEL}),
        "data": MapRule(TextRule("a file's name", r"[-._A-Za-z0-9]+", 253), _ANY_TEXT),
    }
)
RULES_BY_KIND = {"Job": VOLCANO_JOB, "PyTorchJob": PYTORCHJOB, "ConfigMap": CONFIG_MAP}
"""Kind of a manifest -> its rule."""
