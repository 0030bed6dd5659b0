"""Models: built from the dial, packed forward pass equal to transformers' own, folders that load anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from anabatic.config.pretrain import Model
from anabatic.config.tuner import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batch import IGNORE, Batch
from anabatic.device.segments import Segments
from anabatic.models import adapter, build, forward, hf
from anabatic.plan import depth as dial
from anabatic.testing.corpora import byte_tokenizer
from anabatic.testing.tiny import tiny_model
from anabatic.testing.untrained import logits_in_pieces

CPU = torch.device("cpu")


def batch_of(lengths: list[int], vocab: int = 320, ignored: int = 0) -> Batch:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    total = borders[-1]
    labels = torch.randint(0, vocab, (total,))
    labels[:ignored] = IGNORE
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(torch.randint(0, vocab, (total,)), labels, positions, borders, total - ignored, total)


def reference_model(model, folder: Path) -> Qwen3ForCausalLM:
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(folder)
    model.config._attn_implementation = "anabatic"
    return Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize("ignored", [0, 9])
def test_packed_loss_and_gradients_equal_row_by_row_training(tmp_path: Path, ignored: int) -> None:
    model = tiny_model()
    reference = reference_model(model, tmp_path).double()
    model = model.double()
    batch = batch_of([5, 12, 12, 1, 30], ignored=ignored)
    loss = forward.summed_loss(model, forward.pack(batch, CPU), 1 << 12)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        logits = reference(input_ids=batch.input_ids[None, start:end]).logits[0]
        expected = expected + F.cross_entropy(logits, batch.labels[start:end], reduction="sum", ignore_index=IGNORE)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-4)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("lora", [False, True])
def test_recompute_changes_no_gradient(lora: bool) -> None:
    gradients = []
    batch = batch_of([20, 30])
    for recompute in ("none", "selective", "full"):
        model = tiny_model().train()
        if lora:
            settings = Lora(r=4)
            adapter.insert(model, settings)
            adapter.begin(model, settings, 0)
            for layer in adapter.layers(model).values():
                torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(1))
        hf.recompute(model, recompute)
        forward.summed_loss(model, forward.pack(batch, CPU), 1 << 12).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for a, b, c in zip(*gradients, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_token_losses_sum_to_the_loss() -> None:
    model, batch = tiny_model(), batch_of([7, 20], ignored=4)
    packed = forward.pack(batch, CPU)
    losses, hits = forward.token_scores(model, packed, 1 << 12)
    assert losses.shape == (23,)
    torch.testing.assert_close(losses.sum(), forward.summed_loss(model, packed, 1 << 12).detach())


def test_reading_in_pieces_equals_one_long_forward_pass(tmp_path: Path) -> None:
    model = tiny_model().eval()
    reference = reference_model(model, tmp_path).eval()
    texts = [torch.randint(0, 320, (length,)).tolist() for length in (6, 13, 9)]
    for ends, logits in logits_in_pieces(model, texts):
        for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
            expected = reference(input_ids=torch.tensor([text[:end]])).logits[0, -1].detach()
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_every_segment_plan_gives_the_same_hidden_state() -> None:
    model = tiny_model().eval()
    ids = torch.randint(0, 320, (40,))

    def states(lengths: list[int], start: int) -> torch.Tensor:
        total = sum(lengths)
        borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed = forward.Packed(
            ids[start : start + total][None], positions[None], Segments(borders, CPU), torch.empty(0), None
        )
        return forward.hidden_states(model, packed).detach()

    together = states([17, 23], 0)
    torch.testing.assert_close(together[17:], states([23], 17), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 4, 12, 20, 32])
def test_shapes_follow_from_the_depth(depth: int) -> None:
    plan = dial.shape(Model(depth=depth), 32768)
    assert plan.integer("width") % plan.integer("head_dim") == 0
    assert plan.integer("heads") * plan.integer("head_dim") == plan.integer("width")
    assert plan.integer("intermediate") % 64 == 0
    assert all(plan.reasons[name] for name in plan.values)


def test_given_sizes_win_and_must_divide() -> None:
    plan = dial.shape(Model(depth=4, width=96, heads=3, kv_heads=1, intermediate=100), 500)
    assert [plan.integer(name) for name in ("width", "heads", "head_dim", "kv_heads", "intermediate")] == [
        96,
        3,
        32,
        1,
        100,
    ]
    assert plan.reasons["width"] == "given"
    with pytest.raises(ConfigError, match="model.width 100 is not a multiple of model.heads 3"):
        dial.shape(Model(depth=4, width=100, heads=3), 500)
    with pytest.raises(ConfigError, match="model.heads 4 is not a multiple of model.kv_heads 3"):
        dial.shape(Model(depth=4, width=128, heads=4, kv_heads=3), 500)
    with pytest.raises(ConfigError, match="not a multiple of the head size"):
        dial.shape(Model(depth=4, width=100), 500)


def test_the_same_seed_builds_the_same_model() -> None:
    first, second, other = (tiny_model(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_with_plain_transformers(tmp_path: Path, tied: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "tok"))
    config = Model(depth=2, width=64, tie_embeddings=tied)
    model = build.build(dial.shape(config, len(tokenizer)), config, len(tokenizer), 64, CPU, 0)
    hf.save_model(model, tmp_path / "model", tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert plain.config.use_cache is True
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    again = hf.load_model(tmp_path / "model", CPU)
    batch = batch_of([20], vocab=len(tokenizer))
    loss = forward.summed_loss(again, forward.pack(batch, CPU), 1 << 20)
    logits = plain(input_ids=batch.input_ids[None]).logits[0]
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels, reduction="sum"), rtol=1e-4, atol=1e-3)


def test_count_parameters_leaves_the_input_embedding_out() -> None:
    model = tiny_model()
    total, multiplying = build.count_parameters(model)
    assert total - multiplying == 320 * 64
    assert build.flops_per_token(model, 32) == 6 * multiplying + 12 * 2 * 64 * 32


def test_resolve_finds_the_model_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        hf.resolve(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no config.json"):
        hf.resolve(tmp_path)
    final = tmp_path / "final_model"
    final.mkdir()
    (final / "config.json").write_text("{}")
    assert hf.resolve(tmp_path) == final
    best = tmp_path / "best_model"
    best.mkdir()
    (best / "config.json").write_text("{}")
    assert hf.resolve(tmp_path) == best


@pytest.mark.parametrize("damage", ["truncate", "missing", "json", "architecture", "norms"])
def test_a_damaged_model_folder_is_named(tmp_path: Path, damage: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "tok"))
    folder = tmp_path / "model"
    hf.save_model(tiny_model(vocab_size=len(tokenizer)), folder, tokenizer)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "missing":
        weights.unlink()
    elif damage == "json":
        config.write_text("{")
    elif damage == "norms":  # weights of Qwen3, whose attention has norms that Llama's has not
        changed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "nothing-like-it"}))
    with pytest.raises(DataError, match=str(folder)) as caught:
        hf.load_model(folder, CPU)
    assert caught.value.hint
    if damage == "architecture":
        assert 'knows no model_type "nothing-like-it"' in str(caught.value) and "-U transformers" in caught.value.hint


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_has_a_head_that_learns_and_ties_that_hold(tied: bool) -> None:
    config = Model(depth=1, width=32, tie_embeddings=tied)
    model = build.build(dial.shape(config, 320), config, 320, 64, CPU, 0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (head is embedding) == tied
    assert bool(head.any()) == tied and bool(embedding.any())
