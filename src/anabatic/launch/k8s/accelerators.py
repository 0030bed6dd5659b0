"""How clusters call the devices that a pod asks for, and what a container needs of their driver.

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
"""Addresses of the devices' own network ports (RoCE); HCCL between machines reads them."""


@dataclass(frozen=True)
class Accelerator:
    """One row: what `--chip` names.

    Attributes:
        resource: what the device plugin offers; empty: no devices are asked for.
        labels: of the job and its pods, by which the vendor's scheduler plugin knows the chip.
        mounts: (path of the host, kind) that a container needs, read-only.
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
