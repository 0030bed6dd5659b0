"""Reward models that see: losses and gradients of transformers, and what is saved scores as what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from anabatic.config.sections.common import DeviceSettings
from anabatic.data.batching.packing import Batch, TokenSegment
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.chat.preference_pairs import collate_preference_pairs
from anabatic.data.readers.document import Document
from anabatic.data.shards.encoders import PreferencePairEncoder
from anabatic.data.shards.writer import DocumentCounts
from anabatic.data.vision.patches import make_patches
from anabatic.data.vision.picture_batch import CollatePictures
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.data.vision.video_files import name_video
from anabatic.device.device import select_device
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.models import reward_head
from anabatic.models.forward import ModelRoot
from anabatic.models.pretrained import prepare_model
from anabatic.models.reward_head import RewardLoss, RewardOptions
from anabatic.models.vision.processor_files import copy_processor_files
from suite import tiny_vision

pytestmark = pytest.mark.process  # seconds
CPU = torch.device("cpu")
DEVICE = DeviceSettings(type="cpu", dtype="fp32", threads=1)
CENTER = 0.1
ROWS = [(("red", (96, 64)), ("green", (64, 64))), (), (("blue", (64, 100)),)]
"""Pictures of each pair."""
ANSWERS = [("red and green", "two"), ("nothing at all", "no"), ("blue", "it is green")]


def make_documents(folder: Path) -> list[Document]:
    documents = []
    for number, (pictures, answers) in enumerate(zip(ROWS, ANSWERS, strict=True)):
        paths = tuple(
            str(tiny_vision.draw_shape(folder / f"{number}-{color}.png", color, "circle", size))
            for color, size in pictures
        )
        asked = {"role": "user", "content": "<image>" * len(pictures) + "What is it?"}
        good, bad = ([asked, {"role": "assistant", "content": said}] for said in answers)
        documents.append(Document(None, good, f"a:{number}", rejected=bad, pictures=paths))
    return documents


def make_batch(documents: list[Document], rules: PictureRules) -> Batch:
    tokenizer = tiny_vision.build_tokenizer()
    learning = LossPolicy("assistant", "left", pairs=True, closed=True)
    encoder = PreferencePairEncoder(
        tokenizer, DocumentCounts(), seq_len=128, learning=learning, skip_bad=False, pictures=rules
    )
    pieces = [
        TokenSegment(np.asarray(one.ids), np.frombuffer(one.mask or b"", dtype=np.uint8), pictures=one.pictures)
        for one in encoder(documents)
    ]
    return CollatePictures(rules, collate_preference_pairs)(pieces, 1024, 0, 256)


def compute_reference(body: Any, weight: Tensor, documents: list[Document], rules: PictureRules) -> Tensor:
    """Return the rewards `[pairs, 2]` of transformers' own body and this head, one conversation at a time."""
    tokenizer = tiny_vision.build_tokenizer()
    rewards = []
    for document in documents:
        images = [load_picture(path) for path in document.pictures]
        grids = [rules.fit_grid(image.size[1], image.size[0]) for image in images]
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * rules.count_tokens(grid)}<|vision_end|>" for grid in grids)
        for side in (document.messages, document.rejected):
            turns = [
                {**turn, "content": turn["content"].replace("<image>" * len(images), shown)} for turn in side or []
            ]
            ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
            inputs = {"mm_token_type_ids": (ids == rules.image_token).int()}
            if images:
                inputs["pixel_values"] = torch.from_numpy(np.concatenate([make_patches(one, rules) for one in images]))
                inputs["image_grid_thw"] = torch.tensor([(1, *grid) for grid in grids])
            rewards.append(body(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0, -1] @ weight[0])
    return torch.stack(rewards).view(-1, 2)


def build_judge(family: str, dtype: torch.dtype) -> PreTrainedModel:
    model = prepare_model(tiny_vision.build_model(family, dtype), CPU).train()
    reward_head.attach_score_head(model)
    model.get_submodule("score").to_empty(device=CPU)
    reward_head.init_score_head(model, 1)
    return model


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v", "qwen3_5", "qwen3_vl_moe"])
def test_rewards_of_pictures_equal_transformers_one_by_one(tmp_path: Path, family: str) -> None:
    tiny_vision.save_seeing_model(tmp_path / "model", family)
    rules = read_picture_rules(tmp_path / "model", tiny_vision.make_config(family).to_dict())
    documents = make_documents(tmp_path)
    model = build_judge(family, torch.float64)
    loss = RewardLoss(ModelRoot(model), select_device(DEVICE), RewardOptions(CENTER))
    value = loss(model, loss.pack_batch(make_batch(documents, rules), CPU))
    value.backward()

    plain = tiny_vision.build_model(family, torch.float64).model.train()
    weight = model.get_parameter("score.weight").detach().clone().requires_grad_()
    pairs = compute_reference(plain, weight, documents, rules)
    expected = torch.stack([-torch.sigmoid(a - b).log() + CENTER * (a + b) ** 2 for a, b in pairs]).sum()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)  # rewards are in fp32
    found = {**{f"model.{name}": one for name, one in plain.named_parameters()}, "score.weight": weight}
    tolerance = 1e-3 if family.startswith("qwen3_5") else 1e-4  # the delta rule is computed in fp32
    compared = 0
    for name, parameter in found.items():
        if parameter.grad is not None:
            ours = model.get_parameter(name).grad
            assert ours is not None, name
            assert (ours - parameter.grad).norm() < tolerance * parameter.grad.norm() + 1e-9, name
            compared += "visual" in name
    assert compared and model.lm_head.weight.grad is None


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "glm4v_moe"])
def test_what_is_saved_scores_conversations_with_pictures(tmp_path: Path, family: str) -> None:
    source = tiny_vision.save_seeing_model(tmp_path / "model", family)
    rules = read_picture_rules(source, tiny_vision.make_config(family).to_dict())
    documents = make_documents(tmp_path)
    video = name_video([str(tmp_path / f"0-{color}.png") for color in ("red", "red", "red")])
    turns = [[{**turn, "content": turn["content"].replace("<image>", "<video>")} for turn in side or []]
             for side in (documents[2].messages, documents[2].rejected)]  # fmt: skip
    documents.append(Document(None, turns[0], "a:3", rejected=turns[1], pictures=(video,)))
    model = build_judge(family, torch.float32).eval()
    loss = RewardLoss(ModelRoot(model), select_device(DEVICE), RewardOptions())
    with torch.no_grad():
        ours = reward_head.compute_rewards(model, loss.pack_batch(make_batch(documents, rules), CPU))
    folder, tokenizer = tmp_path / "reward", tiny_vision.build_tokenizer()
    reward_head.save_reward_model(
        model, folder, tokenizer, write_extra=lambda folder: copy_processor_files(source, folder)
    )
    scorer = RewardScorer(folder, select_device(DEVICE))
    assert scorer.pictures is not None
    rows = []
    for document in documents:
        for side in (document.messages, document.rejected):
            rows.append(scorer.encode_conversation(side or [], document.pictures, "row"))
    assert scorer.score_conversations(rows) == pytest.approx(ours.tolist(), rel=1e-3, abs=1e-4)
    if family == "qwen3_5":  # the one that transformers has a class for
        AutoModelForSequenceClassification.from_pretrained(folder)
