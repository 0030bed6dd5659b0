"""torch's own samples give the CPU's values and gradients, torch_npu's fused operators those of their formulas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from npu_sim.conftest import Sim

ROOT = Path(__file__).resolve().parents[2]


def test_values_and_gradients_of_aten_operators(sim: Sim) -> None:
    printed = sim.program("operators.py").splitlines()
    print(f"{printed[0]} samples compared")
    assert printed[1:] == []
    assert int(printed[0]) > 400


def test_fused_operators_of_this_project(sim: Sim) -> None:
    done = sim.command(
        sys.executable, "-m", "pytest", "-q", "-m", "npu", "-p", "no:cacheprovider", str(ROOT / "tests/device")
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


def test_fused_operators_of_torch_npu(sim: Sim) -> None:
    printed = dict(line.split(" ", 1) for line in sim.program("fused.py").splitlines())
    names = ["rms_norm", "rotary", "interleaved", "swiglu", "scale_one", "mode_0", "mode_2", "mode_3", "mode_4"]
    names += ["BSH", "SBH", "TND", "fused_adamw", "sink", "v2_sink_band", "v2_pse_type_0", "v2_pse_type_1"]
    names += ["v2_rotated_part", "statistics_NTD", "statistics_TND"]
    assert {name: printed[name].strip() for name in names} == dict.fromkeys(names, "True")
    assert printed["add_rms_norm"] == "RuntimeError derivative for npu::npu_add_rms_norm is not implemented"
    assert printed["on_cpu"].startswith(
        "NotImplementedError Could not run 'npu::npu_rms_norm' with arguments from the 'CPU'"
    )
    assert "npu::npu_hans_decode.out is not simulated" in printed["missing"]
    assert "npu_fusion_attention_v2 with pse_type 2 (slopes made by the kernel) is not sim" in printed["slopes"]
    assert "sink must be float32 of shape [2], got c10::Half [2]" in printed["half_sink"]
    assert "sink must be float32 of shape [2], got float [1]" in printed["short_sink"]
    assert "query_rope and key_rope go together" in printed["one_rope"]
    assert "needs the compressed mask of shape [2048, 2048]" in printed["triangle"]
    assert "softmax_layout=TND only supported when input_layout_str=TND" in printed["statistics_BNSD"]
    assert printed["dropout"] == "True True True"
    assert printed["bf16"].startswith("TypeError Fused optimizer's parameters must be either float32 or float16")


def test_arithmetic_without_infinities(sim: Sim) -> None:
    told = json.loads(sim.program("saturated.py", flags=["--chip", "910A"]))
    assert told["dtype"] == "torch.float16"
    assert told["product"] == [[65504.0] * 2] * 2 and told["nothing"] == 0.0
    assert told["cast"] == told["in place"] == 65504.0
    assert [told[name] for name in ("calm", "cleared", "written")] == [0.0] * 3
    assert [told[name] for name in ("after", "still", "root", "casted", "placed")] == [1.0] * 5
