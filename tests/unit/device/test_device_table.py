"""The device table and what is chosen from it."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core import cpu_info
from anabatic.core.errors import ConfigError, DeviceError
from anabatic.device import device as devices
from anabatic.device.ops import OPS_BY_KERNEL
from anabatic.device.table import CHIPS, DEVICES, find_chip


def test_auto_says_why() -> None:
    chosen = devices.select_device(DeviceConfig())
    assert chosen.type in DEVICES
    assert chosen.reasons["device"].startswith("auto: ") and chosen.reasons["dtype"]
    assert chosen.threads >= 1


def test_an_absent_device_is_an_error_not_a_fallback() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    absent = "npu" if found is None or found.type != "npu" else "cuda"
    with pytest.raises(DeviceError, match=f"device {absent} was asked for"):
        devices.select_device(DeviceConfig(type=absent))


def test_fp16_training_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp16"):
        devices.select_device(DeviceConfig(type="cpu", dtype="fp16"))


def test_bf16_on_a_cpu_is_autocast() -> None:
    chosen = devices.select_device(DeviceConfig(type="cpu", dtype="bf16"))
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Ascend910B3", "Ascend910B3"),
        ("Ascend910B4-1", "Ascend910B4-1"),
        ("Ascend910B", "Ascend910B"),
        ("Ascend910_9391", "Ascend910_9391"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
    ],
)
def test_chips_are_found_by_the_name_the_device_gives(name: str, row: str) -> None:
    chip = find_chip(name)
    assert chip is not None and chip.name == row


def test_unknown_chips_are_not_guessed() -> None:
    assert find_chip("Ascend910B9") is None
    assert find_chip("GeForce 256") is None


def test_first_generation_has_no_bf16() -> None:
    assert not find_chip("Ascend910B").has_bf16 and find_chip("Ascend910B1").has_bf16  # type: ignore[union-attr]
    assert devices._choose_dtype("auto", DEVICES["npu"], find_chip("Ascend910A"))[0] == "fp16"
    with pytest.raises(ConfigError, match="Ascend910A does not have"):
        devices._choose_dtype("bf16", DEVICES["npu"], find_chip("Ascend910A"))


def test_a_cpu_stays_at_fp32_and_says_where_bf16_is_faster() -> None:
    dtype, reason = devices._choose_dtype("auto", DEVICES["cpu"], None)
    assert dtype == "fp32"
    assert ("--device.dtype bf16" in reason) == cpu_info.has_bf16_products(cpu_info.read_cpuinfo())
    assert "--device.dtype" not in devices._choose_dtype("auto", DEVICES["npu"], find_chip("Ascend910A"))[1]


def test_tables_are_whole() -> None:
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    assert all(row.kernels in OPS_BY_KERNEL for row in DEVICES.values())


def test_random_numbers_can_be_put_back() -> None:
    chosen = devices.select_device(DeviceConfig(type="cpu"))
    state = chosen.get_rng_state()
    first = torch.rand(3)
    chosen.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_peak_of_a_cpu_is_measured() -> None:
    chosen = devices.select_device(DeviceConfig(type="cpu"))
    flops, source = devices.get_peak_flops(chosen)
    assert flops > 1e8 and "measured" in source


@pytest.mark.parametrize(
    ("times", "alone"),
    [
        ([(1.0, 2.0), (1.1, 2.0)], 1.0),  # two threads, idle machine
        ([(1.0, 1.0), (2.0, 1.0)], 1.0),  # one thread, and another program beside it once
        ([(3.0, 2.0), (1.5, 2.0)], 1.0),  # two threads that always had to wait
        ([(1.0, 0.99)], 0.99),
    ],
)
def test_the_peak_of_a_busy_machine_is_that_of_an_idle_one(times: list[tuple[float, float]], alone: float) -> None:
    assert devices._estimate_idle_seconds(times, 2) == pytest.approx(alone)
    assert devices._estimate_idle_seconds([(1.0, 1.5)], 1) == 1.0


def test_compile_is_explained() -> None:
    assert devices.should_compile(DeviceConfig(compile="on"), DEVICES["cpu"], 10) == (True, "asked for")
    assert devices.should_compile(DeviceConfig(), DEVICES["npu"], 10_000)[0] is False
    assert devices.should_compile(DeviceConfig(), DEVICES["cuda"], 10)[0] is False
    assert devices.should_compile(DeviceConfig(), DEVICES["cuda"], 10_000)[0] is True
