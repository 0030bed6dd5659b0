"""Devices, memory, streams, events, random numbers of the simulated runtime, seen through torch_npu."""

from __future__ import annotations

import json
import textwrap

import pytest

from npu_sim.conftest import Sim


def test_a_tensor_on_the_device(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        x = torch.randn(4, 4, device="npu:1")
        same = torch.equal((x @ x).cpu(), x.cpu() @ x.cpu())
        print(same, torch.npu.device_count(), torch.npu.get_device_name(0), x.device, torch.npu.is_available())
        """,
        npus=2,
    )
    assert printed == "True 2 Ascend910B3 npu:1 True"


def test_visible_devices(sim: Sim) -> None:
    code = "import torch; print(torch.npu.device_count())"
    assert sim.python(code, npus=8, ASCEND_RT_VISIBLE_DEVICES="1,3,9") == "2"
    assert sim.python(code, npus=8, ASCEND_RT_VISIBLE_DEVICES="3,1") == "0"  # must ascend (torch_npu's own check)


@pytest.mark.parametrize(
    ("chip", "soc", "bf16"),
    [
        ("910B4", "Ascend910B4", True),
        ("910C", "Ascend910_9391", True),
        ("950DT", "Ascend950DT_9582", True),
        ("910A", "Ascend910A", False),
        ("310P", "Ascend310P3", False),
    ],
)
def test_chips(sim: Sim, chip: str, soc: str, bf16: bool) -> None:
    printed = sim.python(
        """
        import torch
        x = torch.ones(3, device="npu")
        try:
            (x.bfloat16() + 1).sum().item()
            works = True
        except RuntimeError as error:
            works = "DT_BFLOAT16" not in str(error) and "?"
        print(torch.npu.get_device_name(0), torch.npu.is_bf16_supported(), works, (x.half() + 1).sum().item())
        """,
        flags=["--chip", chip],
    )
    assert printed == f"{soc} {bf16} {bf16} 6.0"


def test_the_real_out_of_memory(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        held = []
        try:
            while True:
                held.append(torch.empty(100 << 20, dtype=torch.uint8, device="npu"))
        except torch.OutOfMemoryError as error:
            print(str(error))
        print(len(held), torch.npu.memory_stats()["num_ooms"], torch.npu.mem_get_info()[1])
        held.clear()
        torch.npu.empty_cache()
        print(torch.npu.memory_reserved(), torch.npu.mem_get_info()[0])
        """,
        flags=["--hbm", "512MiB"],
    )
    error, counts, after = printed.splitlines()
    assert error.startswith("NPU out of memory. Tried to allocate 102.00 MiB (NPU 0; 512.00 MiB total capacity;")
    assert counts == f"5 1 {2**29}"
    assert after == f"0 {2**29}"


def test_expandable_segments(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        a = torch.ones(50 << 20, dtype=torch.uint8, device="npu")
        b = torch.ones(70 << 20, dtype=torch.uint8, device="npu")
        print(a.sum().item() + b.sum().item(), torch.npu.memory_snapshot()[0]["is_expandable"])
        """,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    assert printed == f"{120 << 20} True"


def test_memory_is_counted_over_processes(sim: Sim) -> None:
    printed = sim.python(
        """
        import subprocess, sys, torch
        other = "import torch; x = torch.empty(300 << 20, dtype=torch.uint8, device='npu'); print(flush=True); input()"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child = subprocess.Popen([sys.executable, "-c", other], **pipes)
        child.stdout.readline()
        torch.npu.set_device(0)
        during = torch.npu.mem_get_info()[0] >> 20
        try:
            torch.empty(300 << 20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError:
            print("full")
        child.kill()
        child.wait()
        torch.empty(300 << 20, dtype=torch.uint8, device="npu")
        print(during < 220, torch.npu.memory_allocated())
        """,
        flags=["--hbm", "512MiB"],
    )
    assert printed == "full\nTrue 0"


def test_statistics(sim: Sim) -> None:
    printed = sim.python(
        """
        import json, torch
        x = torch.ones(1000, 1000, device="npu")
        y = x + 1
        del x
        stats = torch.npu.memory_stats()
        memory = [torch.npu.memory_allocated(), torch.npu.max_memory_allocated()]
        print(json.dumps([*memory, stats["allocation.all.current"]]))
        """
    )
    current, peak, blocks = json.loads(printed)
    assert 4_000_000 <= current < 4_010_000
    assert 8_000_000 <= peak < 8_020_000
    assert blocks == 1


def test_streams_events_and_pinned_memory(sim: Sim) -> None:
    printed = sim.python(
        """
        import time, torch
        side = torch.npu.Stream()
        x = torch.ones(10).pin_memory()
        with torch.npu.stream(side):
            y = x.to("npu", non_blocking=True) * 2
        torch.npu.current_stream().wait_stream(side)
        y.record_stream(torch.npu.current_stream())
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        before = time.monotonic()
        start.record(); time.sleep(0.02); end.record(); end.synchronize()
        whole = 1000 * (time.monotonic() - before)
        event = torch.Event("npu"); event.record(); event.synchronize()
        print(x.is_pinned(), torch.ones(2).is_pinned(), y.sum().item())
        print(19 < start.elapsed_time(end) < whole + 1, event.query())
        """,
        ANABATIC_SIM_CLOCK="host",  # by default events read the estimated time, in which sleeping takes none
    )
    assert printed == "True False 20.0\nTrue True"


def test_random_numbers(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        torch.manual_seed(3); a = torch.randn(9, device="npu")
        state = torch.npu.get_rng_state(); b = torch.rand(9, device="npu")
        torch.npu.set_rng_state(state); c = torch.rand(9, device="npu")
        torch.manual_seed(3); d = torch.randn(9, device="npu")
        print(torch.equal(a, d), torch.equal(b, c), torch.equal(a, b))
        torch.manual_seed(4); e = torch.randperm(50, device="npu")
        torch.manual_seed(4); f = torch.randperm(50, device="npu"); print(torch.equal(e, f), e.sum().item())
        torch.manual_seed(5); host = torch.rand(2)
        torch.manual_seed(5); torch.rand(3, device="npu"); torch.randperm(3, device="npu")
        torch.nn.functional.dropout(torch.ones(5, device="npu"))
        print(torch.equal(host, torch.rand(2)))
        x = torch.randn(100_000, device="npu")
        kept = torch.nn.functional.dropout(torch.ones(100_000, device="npu"), 0.25).mean()
        print(abs(x.mean().item()) < 0.02, abs(x.std().item() - 1) < 0.02, abs(kept.item() - 1) < 0.02)
        """
    )
    assert printed == "True True False\nTrue 1225\nTrue\nTrue True True"


def test_what_two_devices_refuse(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        for other in (torch.ones(3), torch.ones(3, device="npu:1")):
            try:
                torch.ones(3, device="npu:0") + other
            except RuntimeError as error:
                print(error)
        """,
        npus=2,
    )
    same = "Expected all tensors to be on the same device, but found at least two devices, npu:0 and"
    assert printed == f"{same} cpu!\n{same} npu:1!"


def test_the_task_queue_stays_off(sim: Sim) -> None:
    code = """
    import os
    os.environ["TASK_QUEUE_ENABLE"] = "2"
    import torch
    print((torch.ones(3, device="npu") + 1).tolist())
    """
    assert sim.python(code, TASK_QUEUE_ENABLE="1") == "[2.0, 2.0, 2.0]"


def test_saving_and_loading(sim: Sim) -> None:
    printed = sim.python(
        """
        import io, torch
        file = io.BytesIO()
        torch.save({"a": torch.arange(6, device="npu")[2:4]}, file)
        file.seek(0); there = torch.load(file)["a"]
        file.seek(0); here = torch.load(file, map_location="cpu")["a"]
        print(there.device, there.tolist(), here.device, here.tolist())
        """
    )
    assert printed == "npu:0 [2, 3] cpu [2, 3]"


def test_a_cast_to_double_gives_float_and_wrong_arguments_have_a_code(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        x = torch.ones(3, device="npu")
        print(x.double().dtype, x.to(torch.float64).dtype, x.to("cpu", torch.float64).dtype, x.half().dtype)
        try:
            torch.div(x, x, rounding_mode="up")
        except RuntimeError as error:
            print("but found 'up'" in str(error), str(error).splitlines()[1].endswith("ERR01001 OPS invalid parameter"))
        """
    )
    assert printed == "torch.float32 torch.float32 torch.float64 torch.float16\nTrue True"


def test_saturation_of_a_chip_with_infinities(sim: Sim) -> None:
    code = """
    import torch, torch_npu
    large = torch.full((2,), 40000.0, dtype=torch.float16, device="npu")
    print((large + large).tolist())
    """
    flag = "print(torch_npu.npu.utils.get_npu_overflow_flag())"
    told = sim.python(textwrap.dedent(code) + flag, INF_NAN_MODE_FORCE_DISABLE="1")
    assert told == "[65504.0, 65504.0]\nTrue"
    assert sim.python(code) == "[inf, inf]"


def test_products_of_other_dtypes_are_refused(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch
        def said(function):
            try:
                function()
            except RuntimeError as error:
                return str(error)
            return "ran"
        for dtype in (torch.float64, torch.int64, torch.int8, torch.complex64):
            x = torch.ones(4, 4, device="npu", dtype=dtype)
            for product in (lambda: x @ x, lambda: x[None] @ x[None], lambda: torch.addmm(x, x, x)):
                print(dtype, "not implemented for" in said(product) and "EZ1001" in said(product))
            assert said(lambda: x + x) == "ran"
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.ones(4, 4, device="npu", dtype=dtype)
            print(dtype, (x @ x)[0, 0].item())
        """
    )
    lines = printed.splitlines()
    assert len(lines) == 4 * 3 + 3
    assert all(line.endswith(("True", "4.0")) for line in lines), printed


def test_memory_of_the_host_that_the_device_uses(sim: Sim) -> None:
    code = """
    import gc, torch, torch_npu
    total = torch.npu.get_device_properties(0).total_memory  # asked for before a device is set
    x = torch_npu.empty_with_swapped_memory((4,), dtype=torch.float32, device="npu").fill_(2)
    print((x * 3).tolist())
    del x
    gc.collect()
    try:
        torch.empty(total // 5, dtype=torch.int8, device="npu")
    except torch.OutOfMemoryError:
        print("more than the fraction")
    """
    told = sim.python(code, PYTORCH_NPU_ALLOC_CONF="per_process_memory_fraction:0.1")
    assert told == "[6.0, 6.0, 6.0, 6.0]\nmore than the fraction"


def test_attention_whatever_kernels_are_allowed_and_its_gradients(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch, torch_npu
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q = torch.randn(1, 2, 8, 16, device="npu")
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        print(torch.allclose(found, expected, atol=1e-5))
        out, most, total, *_ = torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.25, sparse_mode=1)
        print(torch.allclose(out, expected, atol=1e-5))
        grads = torch.ops.npu.npu_fusion_attention_grad(
            q, q, q, out, 2, "BNSD", softmax_max=most, softmax_sum=total, attention_in=out, scale_value=0.25)
        print(grads[3], grads[4].shape, grads[4].dtype)
        """
    )
    assert printed == "True\nTrue\nNone torch.Size([0]) torch.float32"
