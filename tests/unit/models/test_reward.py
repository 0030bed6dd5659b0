"""Reward models: the loss against its formula, and transformers' own model against the rewards that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from anabatic.config.reward import RewardJob
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.packing import TokenSegment
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.chat.preference_pairs import collate_preference_pairs
from anabatic.data.readers.document import Document
from anabatic.data.shards.encoders import PreferencePairEncoder
from anabatic.data.shards.writer import DocumentCounts
from anabatic.device.device import select_device
from anabatic.infer import reward_scorer
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.models import reward_head
from anabatic.models.forward import ModelRoot
from anabatic.models.lora import adapter
from anabatic.models.pretrained import save_model
from anabatic.models.reward_head import RewardLoss, RewardOptions, bradley_terry
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model

CPU = torch.device("cpu")
ASKED = {"role": "user", "content": "2 and 2?"}


def talk(said: str) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": said}]


TALKS = [(talk("4"), talk("five, or so")), (talk("four."), talk("no")), (talk("the sum"), talk("x"))]


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def made(tok: Any) -> RewardLoss:
    model = build_random_model(len(tok))
    reward_head.attach_score_head(model)
    model.get_submodule("score").to_empty(device=CPU)
    reward_head.init_score_head(model, 1)
    return RewardLoss(ModelRoot(model), select_device(DeviceConfig(type="cpu", threads=1)), RewardOptions(center=0.1))


def entries(tok: Any, seq_len: int = 64) -> list[TokenSegment]:
    documents = [Document(None, good, f"a:{n}", rejected=bad) for n, (good, bad) in enumerate(TALKS)]
    learning = LossPolicy("assistant", "left", pairs=True, closed=True)
    encoder = PreferencePairEncoder(tok, DocumentCounts(), seq_len=seq_len, learning=learning, skip_bad=False)
    return [
        TokenSegment(np.asarray(one.ids), np.frombuffer(one.mask or b"", dtype=np.uint8)) for one in encoder(documents)
    ]


def test_the_loss_is_the_formula() -> None:
    found = torch.tensor([[1.0, -2.0], [0.5, 0.5], [-800.0, 900.0]], dtype=torch.float64)
    slow = [np.log1p(np.exp(-(a - b))) if a - b > -700 else b - a for a, b in found.tolist()]
    torch.testing.assert_close(bradley_terry(found), torch.tensor(slow, dtype=torch.float64))
    more = [loss + 0.3 * (a + b) ** 2 for loss, (a, b) in zip(slow, found.tolist(), strict=True)]
    torch.testing.assert_close(bradley_terry(found, 0.3), torch.tensor(more, dtype=torch.float64))


def test_transformers_gives_the_rewards_that_were_trained(tok: Any, tmp_path: Path) -> None:
    """As its users ask: the chat template, padded on either side; loss and gradients likewise."""
    loss = made(tok)
    model = loss.root.model
    batch = collate_preference_pairs(entries(tok), 200, 0, 128)
    rows = loss.pack_batch(batch, CPU)
    with torch.no_grad():
        ours = reward_head.compute_rewards(model, rows)
    folder = tmp_path / "reward"
    reward_head.save_reward_model(model, folder, tok)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    theirs, told = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    plain = AutoTokenizer.from_pretrained(folder)
    every = [side for pair in TALKS for side in pair]
    for side in ("left", "right"):
        plain.padding_side = side
        asked = plain.apply_chat_template(every, padding=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            found = theirs(**asked).logits[:, 0]
        torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)
    value = loss.root(loss, rows)
    value.backward()
    scores = theirs(**asked).logits[:, 0].view(-1, 2)
    slow = sum(-torch.sigmoid(a - b).log() + 0.1 * (a + b) ** 2 for a, b in scores)
    slow.backward()
    torch.testing.assert_close(value, slow, rtol=1e-4, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad,
            parameter.grad,
            rtol=2e-3,
            atol=2e-4,
            msg=lambda text, name=name: name + text,
        )
    assert model.lm_head.weight.grad is None
    better, worse = ours.view(-1, 2).unbind(1)
    expected = torch.stack((better.sum(), worse.sum(), (better - worse).sum(), (better > worse).sum()))
    torch.testing.assert_close(loss.metric_sums, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seq_len", [8, 12, 64])
def test_every_token_of_a_conversation_is_read(tok: Any, seq_len: int) -> None:
    """The last one too; of one that is too long, the end is what counts."""
    pieces = entries(tok, seq_len)
    room = 2 * seq_len
    assert all(piece.num_inputs <= room for piece in pieces)
    batch = collate_preference_pairs(pieces, room * len(pieces), 0, room)
    whole = [tok.apply_chat_template(side, tokenize=True, return_dict=False) for pair in TALKS for side in pair]
    for number, ids in enumerate(whole):
        start, stop = batch.cu_seqlens[number : number + 2]
        assert batch.input_ids[start:stop].tolist() == ids[-(seq_len - 1) :]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_brings_the_head_and_is_what_peft_reads(tok: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = build_random_model(len(tok))
    save_model(model, tmp_path / "base", tok)
    adapter.insert_adapter(model, Lora(r=4))
    reward_head.attach_score_head(model)
    model.get_submodule("score").to_empty(device=CPU)
    reward_head.init_score_head(model, 1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    trained = {name.rpartition("lora_")[1] or name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {"lora_", "score.weight"}
    loss = RewardLoss(ModelRoot(model), select_device(DeviceConfig(type="cpu", threads=1)), RewardOptions())
    with torch.no_grad():
        ours = reward_head.compute_rewards(
            model, loss.pack_batch(collate_preference_pairs(entries(tok), 200, 0, 128), CPU)
        )
    with_head = Lora(r=4, modules_to_save=[reward_head.SCORE_NAME])
    adapter.save_adapter(model, tmp_path / "adapter", tok, with_head, tmp_path / "base", True, {"task_type": "SEQ_CLS"})
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    talks = [side for pair in TALKS for side in pair]
    rows = [tok.apply_chat_template(side, tokenize=True, return_dict=False) for side in talks]
    with torch.no_grad():
        found = torch.stack([theirs(torch.tensor([row])).logits[0, 0] for row in rows])
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)
    scorer = RewardScorer(tmp_path / "adapter", select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1)))
    encoded = [scorer.encode_conversation(side) for side in talks]
    assert encoded == [(row, ()) for row in rows]
    assert scorer.score_conversations(encoded) == pytest.approx(ours.tolist(), rel=1e-4, abs=1e-5)


def test_what_is_no_reward_model(tok: Any, tmp_path: Path) -> None:
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    model = build_random_model(len(tok))
    save_model(model, tmp_path / "base", tok)
    with pytest.raises(DataError, match="is no reward model"):
        RewardScorer(tmp_path / "base", device)
    adapter.insert_adapter(model, Lora(r=4))
    adapter.save_adapter(model, tmp_path / "plain", tok, Lora(r=4), tmp_path / "base")
    with pytest.raises(DataError, match="is no reward model"):
        RewardScorer(tmp_path / "plain", device)
    adapter.save_adapter(
        model, tmp_path / "headless", tok, Lora(r=4), tmp_path / "base", True, {"task_type": "SEQ_CLS"}
    )
    with pytest.raises(DataError, match="brings no score head"):
        RewardScorer(tmp_path / "headless", device)


@pytest.mark.parametrize("pads", [True, False])
def test_conversations_of_like_length_are_read_together(pads: bool) -> None:
    lengths = [5000, 10, 9000, 4000, 12, 11]
    batches = reward_scorer._make_batches(lengths, pads)
    assert sorted(at for batch in batches for at in batch) == list(range(6))
    assert len(batches) == (4 if pads else 6)
    assert all(
        len(batch) * max(lengths[at] for at in batch) <= reward_scorer._MAX_BATCH_TOKENS
        for batch in batches
        if len(batch) > 1
    )


def test_settings_and_models_that_do_not_fit(tok: Any) -> None:
    with pytest.raises(ConfigError, match=r"lora\.modules_to_save is embed_tokens"):
        RewardJob(model="m", tuner="lora", lora=Lora(modules_to_save=["embed_tokens"]))
    with pytest.raises(ConfigError, match="quantize is nf4, tuner is full"):
        RewardJob(model="m", tuner="full", quantize="nf4")
    with pytest.raises(ConfigError, match="center_rewards_coefficient is -1"):
        RewardJob(model="m", center_rewards_coefficient=-1)
    model = build_random_model(len(tok))
    model.__class__ = type("NobodysForCausalLM", (type(model),), {})
    with pytest.raises(DataError, match="no NobodysForSequenceClassification"):
        reward_head.attach_score_head(model)
