"""pyACL on a simulated machine: devices, memory, streams and events; everything else raises, naming itself."""

from __future__ import annotations

import ctypes

from acl import rt, util
from acl._binding import bind, find_missing, library

__all__ = ["finalize", "get_device_capability", "get_soc_name", "get_version", "init", "rt", "util"]

library.aclrtGetSocName.restype = ctypes.c_char_p
library.aclGetRecentErrMsg.restype = ctypes.c_char_p

_init = bind("acl.init", "aclInit", "address")
finalize = bind("acl.finalize", "aclFinalize", "")
get_version = bind("acl.get_version", "aclrtGetVersion", ">i32 >i32 >i32")
get_device_capability = bind("acl.get_device_capability", "aclGetDeviceCapability", "u32 i32 >i64")
__getattr__ = find_missing("acl")


def init(config_path: str | None = None) -> int:
    """Initialize the runtime; the configuration file (dumps, profiling) is not read."""
    del config_path
    return int(_init(None))


def get_soc_name() -> str | None:
    """Return the name of the chip, as `Ascend910B3`."""
    name = library.aclrtGetSocName()
    return name.decode() if name else None


def get_recent_err_msg() -> str | None:
    """Return the text of this thread's last error, once."""
    text = library.aclGetRecentErrMsg()
    return text.decode(errors="replace") if text else None
