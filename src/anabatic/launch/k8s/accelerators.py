"""Resource names of devices in clusters, and the driver files that a container needs.

Sources: MindCluster, "Ascend Device Plugin", "acjob", "vcjob" (gitcode.com/Ascend/mind-cluster, docs/*/scheduling):
resource names, the label ring-controller.atlas, accelerator-type of nodes; Huawei Cloud CCE and ModelArts Lite:
huawei.com/ascend-1980 and the label ring-controller.cce (volcano's plugin configmap1980); mounts: "Run container" of
the CANN images (cann-container-image) and MindCluster's samples; NVIDIA/k8s-device-plugin: nvidia.com/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass

_DRIVER_MOUNTS = (("/usr/local/Ascend/driver", "Directory"), ("/usr/local/dcmi", "Directory"),
           ("/usr/local/bin/npu-smi", "File"), ("/etc/ascend_install.info", "File"))  # fmt: skip
_HCCN_MOUNTS = (("/etc/hccn.conf", "File"),)
"""Addresses of the devices' network ports (RoCE), which HCCL reads for communication between machines."""


@dataclass(frozen=True)
class Accelerator:
    """One value of `--chip`.

    Attributes:
        resource: resource name of the device plugin; empty: no devices are requested.
        labels: labels of the job and its pods that tell the vendor's scheduler plugin the chip.
        mounts: (host path, kind) that a container needs, read-only.
    """

    resource: str
    labels: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


ACCELERATORS: dict[str, Accelerator] = {
    "910b": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910b"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "a3": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910b"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "910a": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "310p": Accelerator("huawei.com/Ascend310P", (("ring-controller.atlas", "ascend-310P"),), _DRIVER_MOUNTS),
    "cce": Accelerator(
        "huawei.com/ascend-1980", (("ring-controller.cce", "ascend-1980"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "nvidia": Accelerator("nvidia.com/gpu"),
    "none": Accelerator(""),
}
