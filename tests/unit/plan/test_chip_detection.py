"""Which chip this machine has: by npu-smi's tables, and by /proc/cpuinfo."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DeviceError
from anabatic.device.table import CHIPS, PROCESSOR_NAME, Chip, get_device_row
from anabatic.monitor.sources import npu_smi_command
from anabatic.plan import detect_chip, model_shape, strategy_search
from anabatic.plan.memory_estimate import estimate_peak_memory
from anabatic.plan.training_setup import TrainingSetup
from anabatic_sim import npu_smi_layout
from unit.monitor import fake

SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen2.5-0.5B")


@pytest.fixture
def torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch_npu that can be found."""
    (tmp_path / "path" / "torch_npu").mkdir(parents=True)
    (tmp_path / "path" / "torch_npu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "path")


def found(folder: Path, name: str, used: tuple[int, ...], npus: int = 1, wanted: str = "auto") -> tuple[Chip, str]:
    """Ask a machine whose npu-smi shows devices of that name, with so many MiB in use."""
    rows = [replace(one, name=name, used_mib=mib) for one, mib in zip(fake.dies(len(used), 1), used, strict=True)]
    text, mapping = (
        npu_smi_layout.format_info(rows, "26.0.rc1", "A2"),
        npu_smi_layout.format_mapping(rows, "Ascend", "A2"),
    )
    source = npu_smi_command.NpuSmiSource(str(fake.printing(folder, text, mapping) / "npu-smi"))
    return detect_chip.detect_job_chip(wanted, npus, lambda: (source, []))


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_devices_with_what_is_free_of_them(tmp_path: Path) -> None:
    chip, said = found(tmp_path, "910B3", (30_000, 3_400), npus=2)
    assert (chip.name, said) == ("Ascend910B3", "of this machine")
    assert (
        strategy_search.get_available_bytes(chip) == (chip.memory_gib - 3_400 / 1024) * 2**30
    )  # of the one that a job would get
    with pytest.raises(DeviceError, match="4 processes need as many devices, and there are 2"):
        found(tmp_path / "few", "910B3", (0, 0), npus=4)
    with pytest.raises(ConfigError, match="the devices of this machine are '910Z7'"):
        found(tmp_path / "other", "910Z7", (0,))
    assert found(tmp_path / "cpu", "910B3", (0,), wanted="cpu")[0].name == PROCESSOR_NAME


def test_without_devices(tmp_path: Path) -> None:
    assert detect_chip.detect_job_chip("auto", 1, lambda: (None, []))[0].name == PROCESSOR_NAME
    with pytest.raises(DeviceError, match="device.type is npu, and no such device"):
        detect_chip.detect_job_chip("npu", 1, lambda: (None, []))


@pytest.mark.parametrize(
    ("flags", "lanes"),
    [("flags: sse2 avx2", 32), ("flags: avx2 avx512f", 64), ("Features: fp asimd", 16), ("", 8)],
)
def test_a_processor_by_its_clock_and_vectors(flags: str, lanes: int, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\ncpu MHz\t\t: 2000.5\n{flags}\n")
    one = detect_chip.describe_processor(1, info)
    assert one.half_tflops == pytest.approx(len(os.sched_getaffinity(0)) * 2000.5e6 * lanes / 1e12)
    assert detect_chip.describe_processor(1, tmp_path / "nothing").half_tflops > 0
    setup = TrainingSetup(SHAPE, half=False, uses_attention_mask=False)
    assert get_device_row(one).type == "cpu"
    assert strategy_search.estimate_strategy(setup, one).tokens_per_s > 0


@given(
    st.sampled_from([*CHIPS, detect_chip.describe_processor(1)]),
    st.sampled_from([256, 1000, 2048]), st.sampled_from(["full", "lora"]),
    st.integers(1, 1 << 20),
)  # fmt: skip
def test_a_micro_batch_that_nobody_asked_for_fits_and_twice_as_much_would_not(
    chip: Chip, seq_len: int, tuner: str, share: int
) -> None:
    setup = TrainingSetup(SHAPE, seq_len=seq_len, tuner=tuner)  # type: ignore[arg-type]
    size = strategy_search.find_largest_power_of_two(setup, chip, share)
    most = strategy_search.get_available_bytes(chip) * strategy_search.HEADROOM[get_device_row(chip).kernels]

    def needs(tokens: int) -> float:
        one = replace(setup, micro_tokens=tokens, micro_steps=max(1, share // tokens))
        return estimate_peak_memory(one).total * (1 + strategy_search.FRAGMENTATION)

    assert seq_len <= size <= max(seq_len, strategy_search.get_max_tokens(chip))
    if size > seq_len:
        assert size & (size - 1) == 0 and needs(size) <= most
    if 2 * size <= strategy_search.get_max_tokens(chip) and size & (size - 1) == 0:
        assert needs(2 * size) > most
