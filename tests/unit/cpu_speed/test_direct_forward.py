"""Generation without transformers' modules gives their states, for every family; what is unknown keeps its modules."""

from __future__ import annotations

import pytest
import torch
import transformers

from anabatic.cpu_speed.direct_forward import DirectForward, build_direct_forward
from anabatic.cpu_speed.inference_products import InferenceProduct
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models import forward
from anabatic.models.kv_cache import CacheRow, KVCache
from anabatic.models.lora import adapter
from anabatic.models.pretrained import prepare_model
from anabatic.models.weights_reader import iter_quantized_weights
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

DIRECT = ("Qwen2", "Qwen3", "Llama", "Mistral")


def build(family: str, dtype: torch.dtype = torch.float32, **settings):
    """A random model of a family, all biases and norms random too."""
    config = getattr(transformers, f"{family}Config")(
        **{
            **COMMON_CONFIG,
            **FAMILY_CONFIGS[family],
            "initializer_range": 0.2,
            "attn_implementation": "eager",
            **settings,
        }
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.3)
    return prepare_model(model, torch.device("cpu"))


def rows_of(step: int) -> list[CacheRow]:
    """Two prompts at once, a chunk of one beside a token of the other, then single tokens: beyond a window of 8."""
    first, second = [0, 1], [2, 3]
    return [
        [CacheRow(list(range(3, 14)), 0, first, [(0, 2)]), CacheRow([40, 41, 42], 0, second, [(2, 2)])],
        [CacheRow([20, 21, 22], 11, first, [(0, 2)]), CacheRow([50], 3, second, [(2, 2)])],
        [CacheRow([23], 14, first, [(0, 2)]), CacheRow([51], 4, second, [(2, 2)])],
        [CacheRow([24], 15, first, [(0, 2)])],
    ][step]


@pytest.mark.parametrize("family", DIRECT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pack", [True, False])
def test_states_are_those_of_the_modules(family, dtype, pack, monkeypatch):
    if not pack:
        monkeypatch.setattr("anabatic.cpu_speed.direct_forward._MAX_COPIED_SHARE", 0.0)
    model = build(family, dtype)
    direct = build_direct_forward(model, forward.run_modules, 64)
    assert isinstance(direct, DirectForward), direct
    ours, theirs = (KVCache(model.config, 4, 16, model.device, dtype) for _ in range(2))
    limit = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 0.05}[dtype]
    for step in range(4):
        expected = forward.extend_cache(model, rows_of(step), theirs)
        out = forward.extend_cache(model, rows_of(step), ours, direct)
        assert (out - expected).norm() <= limit * expected.norm()
    assert (ours.keys - theirs.keys).float().norm() <= limit * theirs.keys.float().norm()


@pytest.mark.parametrize("family", [family for family in FAMILY_CONFIGS if family not in DIRECT])
def test_other_families_keep_their_modules(family):
    assert isinstance(build_direct_forward(build(family), forward.run_modules, 64), str)


def test_a_layer_that_computes_something_else_keeps_its_modules():
    model = build("Llama")
    norm = model.model.layers[1].input_layernorm
    norm.__dict__["forward"] = lambda x: 1.5 * type(norm).forward(norm, x)
    found = build_direct_forward(model, forward.run_modules, 64)
    assert isinstance(found, str) and "differ" in found
    hooked = build("Llama")
    hooked.model.layers[0].register_forward_pre_hook(lambda *_: None)
    assert build_direct_forward(hooked, forward.run_modules, 64) == "its modules have hooks"


def test_weights_that_are_changed_in_place_count(tokenizer):
    model = build("Qwen2", vocab_size=300)
    engine = Engine(model, tokenizer, max_batch=4, max_len=64)
    prompts = [[5, 6, 7, 8 + n] for n in range(4)]
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    before = [one.ids for one in engine.generate(prompts, greedy, [])]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    engine.clear_prefix_cache()
    after = [one.ids for one in engine.generate(prompts, greedy, [])]
    modules = Engine(model, tokenizer, max_batch=4, max_len=64, direct=False)
    assert after == [one.ids for one in modules.generate(prompts, greedy, [])] != before


def test_quantized_layers_run_beside_direct_ones(tokenizer):
    model = build("Llama", vocab_size=300)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    model.requires_grad_(False)
    adapter.quantize_frozen_layers(model, "int8")
    for name, quantized in iter_quantized_weights(model):
        quantized.quantize_weight(weights[name])
    assert isinstance(build_direct_forward(model, forward.run_modules, 64), DirectForward)
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    ours, theirs = (
        Engine(model, tokenizer, max_batch=2, max_len=64, direct=direct).generate([[5, 6, 7]], greedy, [])[0].ids
        for direct in (True, False)
    )
    assert ours == theirs


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pack", [True, False])
def test_products(rows, dtype, pack):
    generator = torch.Generator().manual_seed(0)
    sizes = (24, 8, 40)
    weights = [torch.randn(size, 48, generator=generator).to(dtype) for size in sizes]
    biases = [torch.randn(24, generator=generator).to(dtype), None, torch.randn(40, generator=generator).to(dtype)]
    x = torch.randn(rows, 48, generator=generator).to(dtype)
    product = InferenceProduct(weights, biases, pack)
    for _ in range(2):
        expected = torch.cat(
            [
                x.double() @ weight.double().t() + (0 if bias is None else bias.double())
                for weight, bias in zip(weights, biases, strict=True)
            ],
            dim=-1,
        )
        torch.testing.assert_close(
            product.multiply(x).double(), expected, rtol=0, atol={torch.bfloat16: 0.2}.get(dtype, 1e-4)
        )
        with torch.no_grad():
            weights[1].mul_(2)
            biases[0].add_(1)
