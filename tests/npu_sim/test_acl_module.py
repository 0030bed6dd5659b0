"""`import acl`, `import tbe`: real answers about devices, refusals that name the function."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim


def test_pyacl_without_and_with_torch(sim: Sim) -> None:
    printed = sim.python(
        """
        import ctypes, json
        import acl
        from acl.rt import memcpy

        told = {"init": [acl.init(), acl.init()], "soc": acl.get_soc_name(), "version": acl.get_version()[-1]}
        told["unset"] = acl.rt.get_device()[-1] != 0
        told["count"] = acl.rt.get_device_count()
        told["set"] = [acl.rt.set_device(1), acl.rt.get_device(), acl.rt.set_device(7)]
        told["error"] = acl.get_recent_err_msg()
        at, code = acl.rt.malloc(4 << 20, 0)
        told["malloc"] = code
        free, total, code = acl.rt.get_mem_info(1)
        told["memory"] = [total - free, total, code]
        data = b"simulated"
        told["copied"] = memcpy(at, 9, acl.util.bytes_to_ptr(data), 9, 1)
        host, _ = acl.rt.malloc_host(9)
        told["copied back"] = memcpy(host, 9, at, 9, 2), acl.util.ptr_to_bytes(host, 9).decode()
        told["freed"] = acl.rt.free(at), acl.rt.free_host(host), acl.rt.get_mem_info(1)[0] == total
        stream, _ = acl.rt.create_stream()
        first, _ = acl.rt.create_event()
        told["stream"] = [acl.rt.record_event(first, stream), acl.rt.synchronize_stream(stream),
                          acl.rt.query_event_status(first), acl.rt.destroy_event(first), acl.rt.destroy_stream(stream)]
        told["cores"] = acl.rt.get_device_info(0, 101), acl.get_device_capability(0, 0)

        buffers = {"in": acl.mdl.get_input_size_by_index}  # programs look names up at import
        for call in (buffers["in"], acl.rt.get_ipc_thing, acl.op.execute_v2, acl.himpi):
            try:
                call(1, 2)
            except NotImplementedError as error:
                told.setdefault("missing", []).append(str(error))
        try:
            acl.rt.set_device()
        except TypeError as error:
            told["arguments"] = str(error)
        told["dunder"] = hasattr(acl, "__wrapped__")

        import tbe
        import tbe.common.register as tbe_register
        from tbe.common.platform import get_soc_spec
        from tbe.tikcpp.compile_op import CommonUtility
        from tbe.common.utils import para_check
        told["tbe"] = get_soc_spec("SOC_VERSION"), get_soc_spec("CORE_NUM"), get_soc_spec("AICORE_TYPE")
        told["short"] = get_soc_spec("SHORT_SOC_VERSION")
        for call in (tbe.tvm.placeholder, CommonUtility.is_v220, tbe_register.register_operator, para_check.check_shape,
                     lambda: get_soc_spec("UB_SIZE")):
            try:
                call()
            except NotImplementedError as error:
                told.setdefault("tbe missing", []).append(str(error))

        import torch
        told["torch"] = (torch.ones(3, device="npu:1") + 1).tolist(), torch.npu.current_device(), acl.init()
        print(json.dumps(told))
        """,
        npus=2,
    )
    told = json.loads(printed)
    assert told["init"] == [0, 100002]
    assert told["soc"] == "Ascend910B3" and told["version"] == 0 and told["unset"]
    assert told["count"] == [2, 0] and told["set"] == [0, [1, 0], 107001]
    assert told["error"] == "aclrtSetDevice failed, error code is 107001: Invalid device ID"
    assert told["malloc"] == 0 and told["memory"] == [4 << 20, 64 << 30, 0]
    assert told["copied"] == 0 and told["copied back"] == [0, "simulated"] and told["freed"] == [0, 0, True]
    assert told["stream"] == [0, 0, [1, 0], 0, 0]
    assert told["cores"][0][1] == told["cores"][1][1] == 0 and told["cores"][1][0] == 20
    names = ["acl.mdl.get_input_size_by_index", "acl.rt.get_ipc_thing", "acl.op.execute_v2", "acl.himpi"]
    assert told["missing"] == [f"{name} is not simulated (anabatic sim)" for name in names]
    assert told["arguments"] == "acl.rt.set_device takes 1 arguments, 0 were given" and told["dunder"] is False
    assert told["tbe"] == ["Ascend910B3", 20, "AiCore"] and told["short"] == "Ascend910B"
    names = [
        "tbe.tvm.placeholder",
        "tbe.tikcpp.compile_op.CommonUtility.is_v220",
        "tbe.common.register.register_operator",
    ]
    names += ["tbe.common.utils.para_check.check_shape", 'tbe.common.platform.get_soc_spec("UB_SIZE")']
    assert told["tbe missing"] == [f"{name} is not simulated (anabatic sim)" for name in names]
    assert told["torch"] == [[2.0, 2.0, 2.0], 1, 100002]
