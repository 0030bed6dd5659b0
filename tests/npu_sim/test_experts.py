"""torch_npu's operators for experts, losses, inference and AdamW give their formulas' values, gradients and traps."""

from __future__ import annotations

from npu_sim.conftest import Sim


def printed(sim: Sim) -> dict[str, str]:
    lines = [line.split(" ", 1) for line in sim.program("experts.py").splitlines()]
    return {name: rest.strip() for name, rest in lines}


def test_values_gradients_and_traps(sim: Sim) -> None:
    found = printed(sim)
    equal = ["grouped", "grouped_forms", "grouped_add", "permute", "permute_dropped", "unpermute_plain", "loss_mean"]
    equal += ["loss_sum", "loss_none", "loss_options", "prompt", "incremental", "infer"]
    equal += ["adamw", "adamw_maximize", "adamw_amsgrad"]
    assert {name: found[name] for name in equal} == dict.fromkeys(equal, "True")
    assert found["grouped_bf16"] == "torch.bfloat16 True"
    assert found["grouped_rest"] == "9 True True"  # rows behind the last group are not written
    assert found["grouped_grad"] == found["prompt_grad"] == "None"  # no derivative: the graph is cut
    assert found["grouped_kind"] == "RuntimeError Requires manual passing group_type, current is None."
    assert "x must be transposed" in found["grouped_inner"]
    assert "target must lie in [0, 11), found -100" in found["loss_hidden"]
    assert found["loss_dtype"] == "torch.bfloat16"
    assert "query must be float16 or bfloat16" in found["prompt_fp32"]
    # GradScaler: the fused kernel takes grad_scale and found_inf and uses neither.
    assert found["scaler_plain"] == found["scaler_fused_cpu"] == "True"
    assert found["scaler_plain_inf"] == "[1.0, 1.0, 1.0]"
    assert found["scaler_fused"] == "False"
    assert found["scaler_fused_inf"] == "True [1.0, 1.0, 1.0]"
    assert found["own_scaler"].startswith("TypeError")
    assert found["half_good"] == found["half_fused_good"] == "False True 1024.0 8.944"
    assert found["half_bad"] == "True True 256.0 inf"
    assert found["half_fused_bad"] == "True True 256.0 inf"
    assert found["adamw_new"] == "RuntimeError npu_apply_adam_w is not implemented for Tensor"
