"""What /proc/cpuinfo says of the processor."""

from __future__ import annotations

from pathlib import Path

from anabatic.core import cpu_info


def test_the_first_processor_counts(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A: 1\n\nprocessor\t: 1\nmodel name\t: B\nno colon\n")
    facts = cpu_info.read_cpuinfo(file)
    assert facts["processor"] == "0" and cpu_info.get_cpu_name(facts, "CPU") == "A: 1"


def test_a_processor_without_a_name(tmp_path: Path) -> None:
    assert cpu_info.get_cpu_name(cpu_info.parse_cpuinfo("CPU part\t: 0xd01\n"), "aarch64") == "aarch64"
    assert cpu_info.read_cpuinfo(tmp_path / "missing") == {}


def test_a_processor_that_multiplies_bf16() -> None:
    for text, expected in (
        ("flags\t: fpu avx512_bf16 fsrm\n", True),
        ("flags\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("flags\t: fpu avx512f avx512_vnni\n", False),
        ("model name\t: avx512_bf16\n", False),
    ):
        assert cpu_info.has_bf16_products(cpu_info.parse_cpuinfo(text)) is expected
