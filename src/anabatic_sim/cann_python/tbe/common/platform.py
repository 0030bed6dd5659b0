"""TBE's description of the chip of a simulated machine."""

from __future__ import annotations

import acl
from acl._binding import find_missing

__all__ = ["get_soc_spec"]
__getattr__ = find_missing("tbe.common.platform")

_CUBE_CORES = 0
"""aclDeviceInfo: ACL_DEVICE_INFO_AI_CORE_NUM (acl_base.h)."""

_SHORT_VERSIONS = ("Ascend910B", "Ascend910_93", "Ascend950", "Ascend310P", "Ascend910")
"""Operators' names of chip families: `Short_SoC_version` of CANN platform files (Ascend/ops-nn, Ascend/torchair)."""


def get_soc_spec(key: str) -> str | int:
    """Return `SOC_VERSION`, `SHORT_SOC_VERSION`, `AICORE_TYPE` or `CORE_NUM` (reference of get_soc_spec, hiascend.com).

    Raises:
        NotImplementedError: another key; sizes of buffers inside the cores are not simulated.
    """
    if key == "SOC_VERSION":
        return acl.get_soc_name() or ""
    if key == "SHORT_SOC_VERSION":
        name = acl.get_soc_name() or ""
        return next((short for short in _SHORT_VERSIONS if name.startswith(short)), name)
    if key == "AICORE_TYPE":
        return "AiCore"
    if key == "CORE_NUM":
        return int(acl.get_device_capability(0, _CUBE_CORES)[0])
    raise NotImplementedError(f'tbe.common.platform.get_soc_spec("{key}") is not simulated (anabatic sim)')
