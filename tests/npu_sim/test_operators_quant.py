"""The quantised operators of torch_npu (int8, int4) give the values of their formulas and refuse what is missing."""

from __future__ import annotations

import pytest

from npu_sim.conftest import Sim

PROGRAMS = {"quant_scales.py": 18, "quant_products.py": 15}


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_refusals(sim: Sim, program: str) -> None:
    found = dict(line.split(" ", 1) for line in sim.program(program).splitlines())
    assert len(found) == PROGRAMS[program]
    assert found == dict.fromkeys(found, "True")


def test_what_cannot_be_simulated_says_why(sim: Sim) -> None:
    printed = sim.python(
        """
        import torch, torch_npu
        x, y = torch.ones(4, 4).npu(), torch.ones(1).npu()
        for call in (
            lambda: torch_npu.npu_dynamic_mx_quant(x.half()),
            lambda: torch_npu.npu_add_quant_matmul_(x, x, x, y),
            lambda: torch_npu.npu_matmul_compress_dequant(x.char(), x.char(), y.char(), y.int(), y.long()),
        ):
            try:
                call()
            except NotImplementedError as error:
                print(str(error).splitlines()[0])
        """
    ).splitlines()
    formats = "it computes in FP8, HiFloat8 or MX formats, which are not simulated"
    assert "npu::npu_dynamic_mx_quant is not simulated" in printed[0] and formats in printed[0]
    assert "npu::npu_add_quant_matmul_ is not simulated" in printed[1] and formats in printed[1]
    assert "compressed in a format that is not public" in printed[2]
