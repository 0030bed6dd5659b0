"""Fused operators reach models by structure and probe, whatever their weights are, and can be taken away again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anabatic.config.sections.train_jobs import Lora
from anabatic.device.ops import REFERENCE_OPS, get_device_ops
from anabatic.models import forward, fused_ops
from anabatic.models.lora import adapter
from anabatic_testing.tiny_models import build_tiny_model
from unit.models.test_families import FAMILIES, batch_of, build, packed

CPU = torch.device("cpu")
ALL = {"RMSNorms": 9, "gated MLPs": 2, "rotary embeddings": 2}


def loss_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return forward.compute_summed_loss(model, forward.pack_batch(batch_of([5, 12, 30]), CPU), 1 << 12)  # type: ignore[arg-type]


def test_what_is_found_is_counted() -> None:
    model = build_tiny_model()
    for _ in range(2):  # again changes nothing
        found = fused_ops.install_fused_ops(model, REFERENCE_OPS)
        assert dict(found.fused) == ALL and not found.plain
    assert str(found) == "fused: 2 rotary embeddings, 9 RMSNorms, 2 gated MLPs; plain: nothing"


def test_what_stays_plain_is_named_with_the_reason() -> None:
    found = fused_ops.install_fused_ops(build(*FAMILIES["deepseek-v3"][:2]), REFERENCE_OPS)
    assert found.plain == {"rotary embeddings (of another kind)": 2}
    assert fused_ops.install_fused_ops(build(*FAMILIES["cohere"][:2]), REFERENCE_OPS).plain == {
        "norms (CohereLayerNorm)": 3
    }
    gelu = fused_ops.install_fused_ops(build(*FAMILIES["gemma2"][:2]), REFERENCE_OPS).plain
    assert gelu == {"MLPs (GELUTanh)": 2}


class Wrong(nn.Module):
    """Looks like an RMSNorm and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return REFERENCE_OPS.rms_norm(x, 2 + self.weight, self.variance_epsilon)


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    model = nn.Sequential(Wrong())
    assert dict(fused_ops.install_fused_ops(model, REFERENCE_OPS).plain) == {"norms (Wrong)": 1}
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3", "qwen3-moe", "deepseek-v3"])
def test_a_model_on_meta_is_fused_before_it_gets_memory(family: str) -> None:
    name, settings, expected = FAMILIES[family]
    plain = packed(build(name, settings))
    weights = {key: value.clone() for key, value in plain.state_dict().items()}
    buffers = {key: value.clone() for key, value in plain.named_buffers()}
    late = copy.deepcopy(plain).to("meta")
    assert dict(fused_ops.install_fused_ops(late, get_device_ops("cpu")).fused) == expected
    late.to_empty(device="cpu")
    late.load_state_dict(weights)
    for key, buffer in late.named_buffers():
        buffer.copy_(buffers[key])
    late.tie_weights()
    torch.testing.assert_close(loss_of(late), loss_of(plain), rtol=1e-6, atol=1e-6)


def test_adapters_may_come_before_or_after() -> None:
    losses = []
    for first in (True, False):
        model = build_tiny_model()
        fused_ops.remove_fused_ops(model)
        if first:
            fused_ops.install_fused_ops(model, get_device_ops("cpu"))
        adapter.insert_adapter(model, Lora(r=4))
        adapter.init_adapter_weights(model, Lora(r=4), 0)
        if not first:
            assert dict(fused_ops.install_fused_ops(model, get_device_ops("cpu")).fused) == ALL
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                nn.init.constant_(parameter, 0.01)
        losses.append(loss_of(model))
    assert torch.equal(*losses)


def test_off_gives_every_module_its_own_forward_back() -> None:
    model = build_tiny_model()
    before = loss_of(model)
    assert fused_ops.apply_fused_setting(model, "off", "cpu") == "fused: off (asked for); attention is packed anyway"
    assert not any("forward" in module.__dict__ for module in model.modules())
    torch.testing.assert_close(loss_of(model), before, rtol=1e-5, atol=1e-5)
    assert fused_ops.apply_fused_setting(model, "auto", "cpu").startswith(
        "fused: 2 rotary embeddings, 9 RMSNorms, 2 gated MLPs, 2 decoder layers; plain"
    )


def test_two_models_of_a_family_keep_their_own_operators() -> None:
    fused, plain = (packed(build("Qwen2", {})) for _ in range(2))
    calls = []

    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return REFERENCE_OPS.rotary(x, cos, sin)

    fused_ops.install_fused_ops(fused, REFERENCE_OPS._replace(rotary=rotary))
    loss_of(plain)
    assert not calls
    loss_of(fused)
    assert len(calls) == 4


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_norms_and_gated_blocks_are_compiled() -> None:
    assert fused_ops.compile_blocks(build_tiny_model()) == 11


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_blocks_are_compiled_where_gradients_are_needed_and_nowhere_else() -> None:
    plain, compiled = build_tiny_model(), build_tiny_model()
    fused_ops.compile_blocks(compiled, backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    with torch.no_grad():
        torch.testing.assert_close(loss_of(compiled), loss_of(plain), rtol=0, atol=0)
    assert frames["total"] == before
    torch.testing.assert_close(loss_of(compiled), loss_of(plain))
    assert frames["total"] > before


def test_under_autocast_a_normed_stream_is_cast_once_for_all_that_read_it() -> None:
    """Queries, keys, values, gate and up would each keep their own copy: five a block instead of two."""
    model = build_tiny_model()
    tokens, width = 47, model.config.hidden_size
    kept: dict[bool, int] = {}
    losses = []
    for choice in ("off", "auto"):
        fused_ops.remove_fused_ops(model)
        if choice == "auto":  # the modules; a whole layer keeps other things
            fused_ops.install_fused_ops(model, get_device_ops("cpu"))
        found: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, found: dict[int, torch.Tensor] = found) -> torch.Tensor:
            if tensor.dtype == torch.bfloat16 and tensor.numel() == tokens * width:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu"):
            losses.append(loss_of(model))
        kept[choice == "auto"] = len(found)
    assert kept[False] - kept[True] == 2 * 3  # two blocks
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)
