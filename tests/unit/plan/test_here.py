"""Which chip this machine has: by npu-smi's tables, and by /proc/cpuinfo."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DeviceError
from anabatic.device.table import CHIPS, PROCESSOR, Chip, row_of
from anabatic.monitor import source_smi
from anabatic.plan import fit, here, known
from anabatic.plan.memory import memory
from anabatic.plan.setup import Setup
from anabatic.sim import smi_layout
from unit.monitor import fake

SHAPE, _ = known.named("Qwen/Qwen2.5-0.5B")


@pytest.fixture
def torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch_npu that can be found."""
    (tmp_path / "path" / "torch_npu").mkdir(parents=True)
    (tmp_path / "path" / "torch_npu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "path")


def found(folder: Path, name: str, used: tuple[int, ...], npus: int = 1, wanted: str = "auto") -> tuple[Chip, str]:
    """Ask a machine whose npu-smi shows devices of that name, with so many MiB in use."""
    rows = [replace(one, name=name, used_mib=mib) for one, mib in zip(fake.dies(len(used), 1), used, strict=True)]
    text, mapping = smi_layout.info(rows, "26.0.rc1", "A2"), smi_layout.mapping(rows, "Ascend", "A2")
    source = source_smi.NpuSmi(str(fake.printing(folder, text, mapping) / "npu-smi"))
    return here.chip_of(wanted, npus, lambda: (source, []))


@pytest.mark.usefixtures("torch_npu")
def test_devices_with_what_is_free_of_them(tmp_path: Path) -> None:
    chip, said = found(tmp_path, "910B3", (30_000, 3_400), npus=2)
    assert (chip.name, said) == ("Ascend910B3", "of this machine")
    assert fit.room(chip) == (chip.memory_gib - 3_400 / 1024) * 2**30  # of the one that a job would get
    with pytest.raises(DeviceError, match="4 processes need as many devices, and there are 2"):
        found(tmp_path / "few", "910B3", (0, 0), npus=4)
    with pytest.raises(ConfigError, match="the devices here are '910Z7'"):
        found(tmp_path / "other", "910Z7", (0,))
    assert found(tmp_path / "cpu", "910B3", (0,), wanted="cpu")[0].name == PROCESSOR


def test_without_devices(tmp_path: Path) -> None:
    assert here.chip_of("auto", 1, lambda: (None, []))[0].name == PROCESSOR
    with pytest.raises(DeviceError, match="device.type is npu, and no such device"):
        here.chip_of("npu", 1, lambda: (None, []))


@pytest.mark.parametrize(
    ("flags", "lanes"),
    [("flags: sse2 avx2", 32), ("flags: avx2 avx512f", 64), ("Features: fp asimd", 16), ("", 8)],
)
def test_a_processor_by_its_clock_and_vectors(flags: str, lanes: int, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\ncpu MHz\t\t: 2000.5\n{flags}\n")
    one = here.processor(1, info)
    assert one.half_tflops == pytest.approx(len(os.sched_getaffinity(0)) * 2000.5e6 * lanes / 1e12)
    assert here.processor(1, tmp_path / "nothing").half_tflops > 0
    assert row_of(one).type == "cpu" and fit.judge(Setup(SHAPE, half=False, mask=False), one).tokens_per_s > 0


@given(
    st.sampled_from([*CHIPS, here.processor(1)]), st.sampled_from([256, 1000, 2048]), st.sampled_from(["full", "lora"]),
    st.integers(1, 1 << 20),
)  # fmt: skip
def test_a_micro_batch_that_nobody_asked_for_fits_and_twice_as_much_would_not(
    chip: Chip, seq_len: int, tuner: str, share: int
) -> None:
    setup = Setup(SHAPE, seq_len=seq_len, tuner=tuner)  # type: ignore[arg-type]
    size = fit.power_that_fits(setup, chip, share)
    most = fit.room(chip) * fit.HEADROOM[row_of(chip).kernels]

    def needs(tokens: int) -> float:
        one = replace(setup, micro_tokens=tokens, micro_steps=max(1, share // tokens))
        return memory(one).total * (1 + fit.FRAGMENTS)

    assert seq_len <= size <= max(seq_len, fit.most_tokens(chip))
    if size > seq_len:
        assert size & (size - 1) == 0 and needs(size) <= most
    if 2 * size <= fit.most_tokens(chip) and size & (size - 1) == 0:
        assert needs(2 * size) > most
