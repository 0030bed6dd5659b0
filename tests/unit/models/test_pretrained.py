"""Models: built from the dial, packed forward pass equal to transformers' own, folders that load anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from anabatic.config.pretrain import PretrainModel
from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.attention import PackedSegments
from anabatic.models import forward, model_init, pretrained
from anabatic.models.lora import adapter
from anabatic.plan import depth_dial as dial
from anabatic_testing.random_models import iter_cached_logits
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model

CPU = torch.device("cpu")


def batch_of(lengths: list[int], vocab: int = 320, ignored: int = 0) -> Batch:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    total = borders[-1]
    labels = torch.randint(0, vocab, (total,))
    labels[:ignored] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(torch.randint(0, vocab, (total,)), labels, positions, borders, total - ignored, total)


def reference_model(model, folder: Path) -> Qwen3ForCausalLM:
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(folder)
    model.config._attn_implementation = "anabatic"
    return Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.parametrize("ignored", [0, 9])
def test_packed_loss_and_gradients_equal_row_by_row_training(tmp_path: Path, ignored: int) -> None:
    model = build_tiny_model()
    reference = reference_model(model, tmp_path).double()
    model = model.double()
    batch = batch_of([5, 12, 12, 1, 30], ignored=ignored)
    loss = forward.compute_summed_loss(model, forward.pack_batch(batch, CPU), 1 << 12)
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        logits = reference(input_ids=batch.input_ids[None, start:end]).logits[0]
        expected = expected + F.cross_entropy(
            logits, batch.labels[start:end], reduction="sum", ignore_index=IGNORE_INDEX
        )
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
        model = build_tiny_model().train()
        if lora:
            settings = Lora(r=4)
            adapter.insert_adapter(model, settings)
            adapter.init_adapter_weights(model, settings, 0)
            for layer in adapter.find_lora_layers(model).values():
                torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(1))
        pretrained.enable_activation_checkpointing(model, recompute)
        forward.compute_summed_loss(model, forward.pack_batch(batch, CPU), 1 << 12).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for a, b, c in zip(*gradients, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_token_losses_sum_to_the_loss() -> None:
    model, batch = build_tiny_model(), batch_of([7, 20], ignored=4)
    packed = forward.pack_batch(batch, CPU)
    losses, hits = forward.score_targets(model, packed, 1 << 12)
    assert losses.shape == (23,)
    torch.testing.assert_close(losses.sum(), forward.compute_summed_loss(model, packed, 1 << 12).detach())


def test_reading_in_pieces_equals_one_long_forward_pass(tmp_path: Path) -> None:
    model = build_tiny_model().eval()
    reference = reference_model(model, tmp_path).eval()
    texts = [torch.randint(0, 320, (length,)).tolist() for length in (6, 13, 9)]
    for ends, logits in iter_cached_logits(model, texts):
        for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
            expected = reference(input_ids=torch.tensor([text[:end]])).logits[0, -1].detach()
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_every_segment_plan_gives_the_same_hidden_state() -> None:
    model = build_tiny_model().eval()
    ids = torch.randint(0, 320, (40,))

    def states(lengths: list[int], start: int) -> torch.Tensor:
        total = sum(lengths)
        borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed = forward.PackedBatch(
            ids[start : start + total][None], positions[None], PackedSegments(borders, CPU), torch.empty(0), None
        )
        return forward.compute_hidden_states(model, packed).detach()

    together = states([17, 23], 0)
    torch.testing.assert_close(together[17:], states([23], 17), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 4, 12, 20, 32])
def test_shapes_follow_from_the_depth(depth: int) -> None:
    plan = dial.derive_model_sizes(PretrainModel(depth=depth), 32768)
    assert plan.get_int("width") % plan.get_int("head_dim") == 0
    assert plan.get_int("heads") * plan.get_int("head_dim") == plan.get_int("width")
    assert plan.get_int("intermediate") % 64 == 0
    assert all(plan.reasons[name] for name in plan.values)


def test_given_sizes_win_and_must_divide() -> None:
    plan = dial.derive_model_sizes(PretrainModel(depth=4, width=96, heads=3, kv_heads=1, intermediate=100), 500)
    assert [plan.get_int(name) for name in ("width", "heads", "head_dim", "kv_heads", "intermediate")] == [
        96,
        3,
        32,
        1,
        100,
    ]
    assert plan.reasons["width"] == "given"
    with pytest.raises(ConfigError, match="model.width 100 is not a multiple of model.heads 3"):
        dial.derive_model_sizes(PretrainModel(depth=4, width=100, heads=3), 500)
    with pytest.raises(ConfigError, match="model.heads 4 is not a multiple of model.kv_heads 3"):
        dial.derive_model_sizes(PretrainModel(depth=4, width=128, heads=4, kv_heads=3), 500)
    with pytest.raises(ConfigError, match="not a multiple of the head size"):
        dial.derive_model_sizes(PretrainModel(depth=4, width=100), 500)


def test_the_same_seed_builds_the_same_model() -> None:
    first, second, other = (build_tiny_model(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_with_plain_transformers(tmp_path: Path, tied: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_byte_tokenizer(tmp_path / "tok"))
    config = PretrainModel(depth=2, width=64, tie_embeddings=tied)
    model = model_init.build_model(dial.derive_model_sizes(config, len(tokenizer)), config, len(tokenizer), 64, CPU, 0)
    pretrained.save_model(model, tmp_path / "model", tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert plain.config.use_cache is True
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    again = pretrained.load_model(tmp_path / "model", CPU)
    batch = batch_of([20], vocab=len(tokenizer))
    loss = forward.compute_summed_loss(again, forward.pack_batch(batch, CPU), 1 << 20)
    logits = plain(input_ids=batch.input_ids[None]).logits[0]
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.labels, reduction="sum"), rtol=1e-4, atol=1e-3)


def test_count_parameters_leaves_the_input_embedding_out() -> None:
    model = build_tiny_model()
    total, multiplying = model_init.count_parameters(model)
    assert total - multiplying == 320 * 64
    assert model_init.flops_per_token(model, 32) == 6 * multiplying + 12 * 2 * 64 * 32


def test_resolve_finds_the_model_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        pretrained.resolve_model_folder(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no config.json"):
        pretrained.resolve_model_folder(tmp_path)
    final = tmp_path / "final_model"
    final.mkdir()
    (final / "config.json").write_text("{}")
    assert pretrained.resolve_model_folder(tmp_path) == final
    best = tmp_path / "best_model"
    best.mkdir()
    (best / "config.json").write_text("{}")
    assert pretrained.resolve_model_folder(tmp_path) == best


@pytest.mark.parametrize("damage", ["truncate", "missing", "json", "architecture", "norms"])
def test_a_damaged_model_folder_is_named(tmp_path: Path, damage: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_byte_tokenizer(tmp_path / "tok"))
    folder = tmp_path / "model"
    pretrained.save_model(build_tiny_model(vocab_size=len(tokenizer)), folder, tokenizer)
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
        pretrained.load_model(folder, CPU)
    assert caught.value.hint
    if damage == "architecture":
        assert 'knows no model_type "nothing-like-it"' in str(caught.value) and "-U transformers" in caught.value.hint


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_has_a_head_that_learns_and_ties_that_hold(tied: bool) -> None:
    config = PretrainModel(depth=1, width=32, tie_embeddings=tied)
    model = model_init.build_model(dial.derive_model_sizes(config, 320), config, 320, 64, CPU, 0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (head is embedding) == tied
    assert bool(head.any()) == tied and bool(embedding.any())
