"""Rope types whose frequencies depend on a text's length: a text is computed as if it stood alone, whatever its
neighbours are and however long, in training, in pieces and in the engine."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch
from anabatic.device.device import select_device
from anabatic.device.ops import get_device_ops
from anabatic.evals.likelihood import compute_likelihoods
from anabatic.evals.prefix_trees import ScoredText
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models import forward, fused_ops, pretrained, rope_scaling
from anabatic.models.pretrained import prepare_model
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS

CPU = torch.device("cpu")
BORDER = 16
"""Tokens up to which frequencies are those of short texts."""
_EXTRA: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": BORDER},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": BORDER,
    },
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": BORDER,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **_EXTRA[kind]}


def positions(kind: str) -> int:
    return BORDER if kind == "dynamic" else 64


def reference(name: str, parameters: dict[str, Any], **more: Any) -> Any:
    """transformers' own model in float64."""
    torch.manual_seed(0)
    settings = {
        **COMMON_CONFIG,
        **FAMILY_CONFIGS[name],
        "rope_parameters": parameters,
        "initializer_range": 0.3,
        **more,
    }
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def case(name: str, kind: str) -> Any:
    """A model of the family; kinds of layers get two rope types where the family tells them apart."""
    more: dict[str, Any] = {"max_position_embeddings": positions(kind)}
    parameters: dict[str, Any] = rope(kind)
    if name == "Gemma3Text":
        parameters = {"full_attention": rope(kind), "sliding_attention": rope("default")}
        more["layer_types"] = ["sliding_attention", "full_attention"]
    if name == "Phi3":
        more |= {"sliding_window": 8, "original_max_position_embeddings": BORDER}
    return reference(name, parameters, **more)


def packed(model: Any, fused: bool = True) -> Any:
    ours = copy.deepcopy(model)
    ours.config._attn_implementation = pretrained.ATTENTION_NAME
    if fused:
        fused_ops.install_fused_ops(ours, get_device_ops("cpu"))
    return ours


def batch_of(texts: list[torch.Tensor]) -> Batch:
    borders = [sum(map(len, texts[:at])) for at in range(len(texts) + 1)]
    ids = torch.cat(texts)
    places = torch.cat([torch.arange(len(text)) for text in texts])
    return Batch(ids, ids.roll(-1), places, borders, borders[-1], borders[-1])


def draw(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def states(model: Any, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = forward.compute_hidden_states(model, forward.pack_batch(batch_of(texts), CPU))
    return list(found.split([len(text) for text in texts]))


CASES = [
    *(("Llama", kind) for kind in ("default", *sorted(ROPE_INIT_FUNCTIONS))),
    *((name, kind) for name in ("Gemma3Text", "Mistral") for kind in ("longrope", "dynamic")),
    ("Phi3", "longrope"),  # with a window
    ("DeepseekV2", "dynamic"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_text_beside_others_is_the_text_alone(name: str, kind: str) -> None:
    """Also for neighbours of another length: transformers goes by the largest position of all."""
    assert kind in _EXTRA, f"transformers has a new rope type, {kind}: give its settings here"
    model = case(name, kind)
    ours = packed(model)
    for length in (10, BORDER, BORDER + 1):
        text = draw(length)
        alone = states(ours, [text])[0]
        fresh = copy.deepcopy(model)  # `dynamic` remembers the lengths that it has seen
        expected = fresh.base_model(input_ids=text[None]).last_hidden_state[0].detach()
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
        for neighbours in ([5], [17, 60]):
            others = [draw(each, seed) for seed, each in enumerate(neighbours, start=1)]
            for place in (0, len(others)):
                found = states(ours, [*others[:place], text, *others[place:]])[place]
                torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("Phi3", "longrope"), ("Llama", "dynamic")])
def test_loss_and_gradients(name: str, kind: str) -> None:
    model, texts = case(name, kind), [draw(length) for length in (12, 40, 5, 17, 50)]
    ours = packed(model)
    batch = batch_of(texts)
    loss = forward.compute_summed_loss(ours, forward.pack_batch(batch, CPU), 1 << 12)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    fresh = copy.deepcopy(model.base_model.rotary_emb)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        model.base_model.rotary_emb = copy.deepcopy(fresh)
        logits = model(input_ids=batch.input_ids[None, start:end]).logits[0].double()
        expected = expected + F.cross_entropy(logits, batch.labels[start:end], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-4)
    for (what, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, rtol=0, atol=1e-5, msg=what)


def test_the_types_do_turn_long_texts_otherwise() -> None:
    """What the other tests compare differs where it should: the border is the configuration's."""
    for kind in ("longrope", "dynamic"):
        model = packed(case("Llama", kind))
        assert rope_scaling.get_length_limit(model.config) == BORDER
        text = draw(40)
        short, long = states(model, [text[:BORDER]])[0], states(model, [text])[0][:BORDER]
        assert (short - long).abs().max() > 1e-3
    assert rope_scaling.get_length_limit(case("Llama", "yarn").config) is None


def test_likelihoods_do_not_depend_on_who_shares_a_beginning() -> None:
    model = packed(case("Phi3", "longrope"))
    texts = [ScoredText(draw(30).tolist()[:end], 4) for end in (12, 16, 17, 30)]
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))

    def scored(chosen: list[ScoredText]) -> list[float]:
        found = {n: one for part in compute_likelihoods(model, device, chosen, 200, "x") for n, one in part.items()}
        return [found[number].logprob for number in range(len(chosen))]

    torch.testing.assert_close(scored(texts), [scored([text])[0] for text in texts], rtol=1e-6, atol=1e-6)


def test_answers_are_those_of_transformers_beyond_the_border(tmp_path: Any) -> None:
    """Requests of many lengths together, equal beginnings, pieces of prompts, answers that cross the border: the tokens
    of a loop that reads the whole text anew for each."""
    from anabatic_testing.random_models import build_byte_tokenizer

    plain = reference("Phi3", rope("longrope"), vocab_size=300, original_max_position_embeddings=BORDER).float()
    tokenizer = build_byte_tokenizer(tmp_path)
    rng = Random(0)
    beginning = [rng.randrange(3, 200) for _ in range(40)]
    prompts = [beginning[: rng.choice((4, 9, 16, 17, 33))] + [rng.randrange(3, 200)] for _ in range(7)]
    engine = Engine(prepare_model(copy.deepcopy(plain), CPU), tokenizer, max_batch=4, max_len=64, step_tokens=16)
    found = engine.generate(prompts, Sampling(temperature=0.0, max_new_tokens=14), [])
    for prompt, answer in zip(prompts, found, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(14):
                ids.append(int(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer.ids == ids[len(prompt) :]
    assert engine.get_load().shared_tokens > 0


def test_what_is_not_known_is_refused() -> None:
    class Own(torch.nn.Module):
        def forward(self, x: Any, position_ids: Any) -> Any:
            raise AssertionError

    model = packed(case("Llama", "longrope"))
    model.base_model.rotary_emb = Own()
    with pytest.raises(DataError, match=r"type longrope, whose frequencies depend on the length"):
        states(model, [draw(5)])
