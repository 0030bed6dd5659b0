"""acl.rt: devices, contexts, streams, events and memory of the simulated runtime."""

from __future__ import annotations

from acl._binding import bind, find_missing

_FUNCTIONS = {
    "set_device": ("aclrtSetDevice", "i32"),
    "reset_device": ("aclrtResetDevice", "i32"),
    "get_device": ("aclrtGetDevice", ">i32"),
    "get_device_count": ("aclrtGetDeviceCount", ">u32"),
    "get_device_info": ("aclrtGetDeviceInfo", "u32 i32 >i64"),
    "get_run_mode": ("aclrtGetRunMode", ">i32"),
    "device_can_access_peer": ("aclrtDeviceCanAccessPeer", ">i32 i32 i32"),
    "device_enable_peer_access": ("aclrtDeviceEnablePeerAccess", "i32 u32"),
    "device_disable_peer_access": ("aclrtDeviceDisablePeerAccess", "i32"),
    "create_context": ("aclrtCreateContext", ">address i32"),
    "destroy_context": ("aclrtDestroyContext", "address"),
    "set_context": ("aclrtSetCurrentContext", "address"),
    "get_context": ("aclrtGetCurrentContext", ">address"),
    "create_stream": ("aclrtCreateStream", ">address"),
    "create_stream_with_config": ("aclrtCreateStreamWithConfig", ">address u32 u32"),
    "destroy_stream": ("aclrtDestroyStream", "address"),
    "synchronize_stream": ("aclrtSynchronizeStream", "address"),
    "synchronize_stream_with_timeout": ("aclrtSynchronizeStreamWithTimeout", "address i32"),
    "synchronize_device": ("aclrtSynchronizeDevice", ""),
    "synchronize_device_with_timeout": ("aclrtSynchronizeDeviceWithTimeout", "i32"),
    "create_event": ("aclrtCreateEvent", ">address"),
    "create_event_with_flag": ("aclrtCreateEventWithFlag", ">address u32"),
    "destroy_event": ("aclrtDestroyEvent", "address"),
    "record_event": ("aclrtRecordEvent", "address address"),
    "reset_event": ("aclrtResetEvent", "address address"),
    "query_event_status": ("aclrtQueryEventStatus", "address >i32"),
    "synchronize_event": ("aclrtSynchronizeEvent", "address"),
    "stream_wait_event": ("aclrtStreamWaitEvent", "address address"),
    "event_elapsed_time": ("aclrtEventElapsedTime", ">f32 address address"),
    "malloc": ("aclrtMalloc", ">address size i32"),
    "free": ("aclrtFree", "address"),
    "malloc_host": ("aclrtMallocHost", ">address size"),
    "free_host": ("aclrtFreeHost", "address"),
    "memcpy": ("aclrtMemcpy", "address size address size i32"),
    "memcpy_async": ("aclrtMemcpyAsync", "address size address size i32 address"),
    "memset": ("aclrtMemset", "address size i32 size"),
    "memset_async": ("aclrtMemsetAsync", "address size i32 size address"),
    "get_mem_info": ("aclrtGetMemInfo", "i32 >size >size"),
}

globals().update({name: bind(f"acl.rt.{name}", *row) for name, row in _FUNCTIONS.items()})
__all__ = list(_FUNCTIONS)
__getattr__ = find_missing("acl.rt")
