"""The fields of the manifests that we write, as their operators and Kubernetes define them.

Sources: names and values, kubernetes.io "Object Names and IDs", "Labels and Selectors" (RFC 1123, RFC 1035); pods,
kubernetes.io API reference v1.32 (PodSpec); Volcano, volcano-sh/volcano config/crd/volcano/bases/batch.volcano.sh_jobs
and its admission webhook (pkg/webhooks/admission/jobs/validate); PyTorchJob, kubeflow/training-operator
manifests/base/crds/kubeflow.org_pytorchjobs and its validation (v1.7 and later: nprocPerNode is a text).
"""

from __future__ import annotations

from anabatic.launch.schema import Fields, Flag, ListOf, MapOf, OneOf, Text, Whole

JOB_NAME = Text(
    "a name of small letters, digits and dashes that begins with a letter and ends with a letter or digit",
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    50,
)
"""Operators name services (RFC 1035) and pods (63 characters with `-worker-999`) after the job."""
LABEL = Text("a name of small letters, digits and dashes", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
NAME = Text("a name of small letters, digits, dashes and dots", _SUBDOMAIN, 253)
KEY = Text("a label's key", rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", 317)
VALUE = Text("a label's value", r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
RESOURCE = Text(
    "a resource such as huawei.com/Ascend910, with its domain",
    rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
    317,
)
"""Kubernetes' own, or a device plugin's (kubernetes.io, "Resource Management": extended resources are qualified)."""
VARIABLE = Text("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*")
QUANTITY = Text(
    "a quantity such as 64Gi or 500m", r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][0-9]+)?", 30
)
PATH = Text("an absolute path without a colon", r"/[^:\0\n]*")
IMAGE = Text("an image", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", 500)
_ANY = Text(pattern=r"(?s:.*)")
_COUNT = Whole(1)

METADATA = Fields(
    {"name": JOB_NAME},
    {"namespace": LABEL, "labels": MapOf(KEY, VALUE), "annotations": MapOf(KEY, _ANY)},
)
_KEY_REF = Fields({"name": NAME, "key": Text("a key of a secret", r"[-._A-Za-z0-9]+", 253)})
_ENV = Fields(
    {"name": VARIABLE},
    {"value": _ANY, "valueFrom": Fields({"secretKeyRef": _KEY_REF})},
    ("value", "valueFrom"),
)
_VOLUME = Fields(
    {"name": LABEL},
    {
        "hostPath": Fields({"path": PATH}, {"type": OneOf(("", "Directory", "File"))}),
        "persistentVolumeClaim": Fields({"claimName": NAME}, {"readOnly": Flag()}),
        "nfs": Fields({"server": Text("a server", r"[A-Za-z0-9.:\[\]-]+"), "path": PATH}, {"readOnly": Flag()}),
        "emptyDir": Fields({}, {"medium": OneOf(("", "Memory")), "sizeLimit": QUANTITY}),
        "configMap": Fields({"name": NAME}),
    },
    ("hostPath", "persistentVolumeClaim", "nfs", "emptyDir", "configMap"),
)
_RESOURCES = Fields({}, {"requests": MapOf(RESOURCE, QUANTITY), "limits": MapOf(RESOURCE, QUANTITY)})
_CONTAINER = Fields(
    {"name": LABEL, "image": IMAGE, "command": ListOf(_ANY, 1)},
    {
        "imagePullPolicy": OneOf(("Always", "IfNotPresent", "Never")),
        "workingDir": PATH,
        "env": ListOf(_ENV, unique="name"),
        "envFrom": ListOf(Fields({"secretRef": Fields({"name": NAME})})),
        "ports": ListOf(Fields({"containerPort": Whole(1, 65535)}, {"name": LABEL})),
        "resources": _RESOURCES,
        "securityContext": Fields({"capabilities": Fields({"add": ListOf(Text("a capability", r"[A-Z_]+"))})}),
        "volumeMounts": ListOf(Fields({"name": LABEL, "mountPath": PATH}, {"readOnly": Flag()}), unique="mountPath"),
    },
)
TEMPLATE = Fields(
    {
        "spec": Fields(
            {"containers": ListOf(_CONTAINER, 1, "name")},
            {
                "restartPolicy": OneOf(("Always", "OnFailure", "Never")),
                "schedulerName": NAME,
                "priorityClassName": NAME,
                "nodeSelector": MapOf(KEY, VALUE),
                "hostNetwork": Flag(),
                "dnsPolicy": OneOf(("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
                "terminationGracePeriodSeconds": Whole(),
                "imagePullSecrets": ListOf(Fields({"name": NAME})),
                "volumes": ListOf(_VOLUME, unique="name"),
            },
        )
    },
    {"metadata": Fields({}, {"labels": MapOf(KEY, VALUE)})},
)
EVENTS = ("*", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed")
ACTIONS = ("AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob")
_POLICIES = ListOf(
    Fields({"action": OneOf(ACTIONS)}, {"event": OneOf(EVENTS), "exitCode": Whole(1, 255)}, ("event", "exitCode"))
)
VOLCANO = Fields(
    {
        "apiVersion": OneOf(("batch.volcano.sh/v1alpha1",)),
        "kind": OneOf(("Job",)),
        "metadata": METADATA,
        "spec": Fields(
            {
                "minAvailable": _COUNT,
                "schedulerName": NAME,
                "tasks": ListOf(
                    Fields({"name": LABEL, "replicas": _COUNT, "template": TEMPLATE}, {"minAvailable": _COUNT}),
                    1,
                    "name",
                ),
            },
            {
                "queue": NAME,
                "priorityClassName": NAME,
                "maxRetry": Whole(),
                "plugins": MapOf(OneOf(("env", "svc", "ssh", "pytorch")), ListOf(_ANY)),
                "policies": _POLICIES,
            },
        ),
    }
)
_REPLICAS = Fields(
    {"replicas": _COUNT, "template": TEMPLATE},
    {"restartPolicy": OneOf(("Always", "OnFailure", "Never", "ExitCode"))},
)
PYTORCHJOB = Fields(
    {
        "apiVersion": OneOf(("kubeflow.org/v1",)),
        "kind": OneOf(("PyTorchJob",)),
        "metadata": METADATA,
        "spec": Fields(
            {"pytorchReplicaSpecs": Fields({"Master": _REPLICAS}, {"Worker": _REPLICAS})},
            {
                "nprocPerNode": Text("a number, auto, cpu or gpu", r"auto|cpu|gpu|[1-9][0-9]*"),
                "runPolicy": Fields(
                    {},
                    {
                        "backoffLimit": Whole(),
                        "cleanPodPolicy": OneOf(("All", "Running", "None")),
                        "schedulingPolicy": Fields({}, {"minAvailable": _COUNT, "queue": NAME, "priorityClass": NAME}),
                    },
                ),
            },
        ),
    }
)
CONFIG_MAP = Fields(
    {
        "apiVersion": OneOf(("v1",)),
        "kind": OneOf(("ConfigMap",)),
        "metadata": Fields({"name": NAME}, {"namespace": LABEL}),
        "data": MapOf(Text("a file's name", r"[-._A-Za-z0-9]+", 253), _ANY),
    }
)
RULES = {"Job": VOLCANO, "PyTorchJob": PYTORCHJOB, "ConfigMap": CONFIG_MAP}
"""By kind."""
