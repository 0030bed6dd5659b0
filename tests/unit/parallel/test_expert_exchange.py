"""Experts on several ranks: outputs and gradients of a layer are those of one process, with any routing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from anabatic.device.ops import REFERENCE_OPS
from anabatic.models.experts.expert_layers import EXPERT_GROUP, choose_expert_forward, insert_expert_adapter
from anabatic.parallel.mesh import RankGroup
from anabatic_testing.multiprocess import spawn_ranks

pytestmark = pytest.mark.process


EXPERTS, HIDDEN, INNER, CHOSEN = 8, 16, 12, 2
TOKENS = (7, 0, 3, 11)
"""Of each rank; one has none."""
ROUTINGS = ("random", "one", "first")
"""Any experts; all tokens to two experts of one rank; to those of the first rank."""


def build_layer(family: str) -> Any:
    sizes = dict(hidden_size=HIDDEN, num_experts_per_tok=CHOSEN)
    torch.manual_seed(0)
    if family == "gpt-oss":
        config = GptOssConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **sizes)
        layer: Any = GptOssExperts(config)
    else:
        config = Qwen3MoeConfig(moe_intermediate_size=INNER, num_experts=EXPERTS, **sizes)  # type: ignore[assignment]
        layer = Qwen3MoeExperts(config)
    if family == "adapters":
        for name in ("gate_up_proj", "down_proj"):
            insert_expert_adapter(layer, name, 4, 2.0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def inputs_of(rank: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    x = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.rand(tokens, CHOSEN, generator=generator)
    if routing == "random":
        index = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices
    else:
        index = torch.tensor([5, 4] if routing == "one" else [0, 1]).expand(tokens, CHOSEN)
    return x, index, weights


def run_layer(layer: Any, rank: int, routing: str) -> dict[str, Tensor]:
    """Outputs and gradients of one rank's tokens."""
    forward, _, _ = choose_expert_forward(layer, REFERENCE_OPS)
    assert forward is not None
    layer.zero_grad(set_to_none=True)
    x, index, weights = inputs_of(rank, routing)
    x.requires_grad_()
    weights.requires_grad_()
    out = forward(layer, x, index, weights)
    out.square().sum().backward()
    assert x.grad is not None and weights.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


def run_rank(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    group = RankGroup(rank, size)
    found = {}
    for family in ("qwen3-moe", "gpt-oss", "adapters"):
        for routing in ROUTINGS:
            layer = build_layer(family)
            own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
            for _, module in layer.named_modules():
                for name, parameter in module._parameters.items():
                    module._parameters[name] = torch.nn.Parameter(parameter.detach()[own].clone())
            layer.__dict__[EXPERT_GROUP] = group
            made = run_layer(layer, rank, routing)
            made |= {name: parameter.grad for name, parameter in layer.named_parameters()}
            found.update({f"{family} {routing} {name}": value.contiguous() for name, value in made.items()})
    save_file(found, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("exchange")
    spawn_ranks(run_rank, len(TOKENS), folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(len(TOKENS))]


def require_close(found: Tensor, expected: Tensor, name: str) -> None:
    """Assert that tensors differ by rounding, of which sums of large terms have more."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * scale + 1e-6, msg=name)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "adapters"])
def test_ranks_compute_what_one_process_does(ranks: list[dict[str, Tensor]], family: str, routing: str) -> None:
    layer = build_layer(family)
    total: dict[str, Tensor] = {name: torch.zeros_like(parameter) for name, parameter in layer.named_parameters()}
    for rank, found in enumerate(ranks):
        for name, value in run_layer(layer, rank, routing).items():
            require_close(found[f"{family} {routing} {name}"], value, name)
        for name, parameter in layer.named_parameters():
            total[name] += parameter.grad
    for name, grad in total.items():  # a rank has the gradient of all ranks' tokens for its experts
        whole = torch.cat([found[f"{family} {routing} {name}"] for found in ranks])
        require_close(whole, grad, name)
