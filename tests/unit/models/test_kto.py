"""KTO against its formula answer by answer, and its reference point against the mismatched rows made by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.data.batching.packing import TokenSegment
from anabatic.data.chat.preference_pairs import REJECTED_BIT, collate_unpaired_answers
from anabatic.device.device import select_device
from anabatic.models.forward import ModelRoot
from anabatic.models.preference_loss import KtoLoss, PreferenceOptions, compute_kto_losses, make_mismatched_batch
from anabatic_testing.tiny_models import build_tiny_model

CPU = torch.device("cpu")
OBJECTIVE = PreferenceOptions(beta=0.3, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.5)


def answer(seed: int, question: int, said: int, good: bool) -> TokenSegment:
    ids = np.random.default_rng(seed).integers(1, 320, question + said)
    mask = np.full(question + said, 0 if good else REJECTED_BIT, dtype=np.uint8)
    mask[question:] |= 1
    return TokenSegment(ids, mask)


def together(good: TokenSegment, bad: TokenSegment) -> TokenSegment:
    assert good.loss_mask is not None and bad.loss_mask is not None
    return TokenSegment(np.concatenate((good.ids, bad.ids)), np.concatenate((good.loss_mask, bad.loss_mask)))


SINGLES = [answer(0, 4, 5, True), answer(1, 6, 3, False), answer(2, 3, 7, True)]
PAIR = together(answer(3, 5, 4, True), answer(4, 5, 6, False))


def split(piece: TokenSegment) -> tuple[list[int], list[int]]:
    assert piece.loss_mask is not None
    learned = (piece.loss_mask & 1).astype(bool)
    return piece.ids[~learned].tolist(), piece.ids[learned].tolist()


def log_prob(model: PreTrainedModel, question: list[int], said: list[int]) -> Tensor:
    """Summed over the answer, float64, alone."""
    ids = torch.tensor([question + said])
    logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    found: Tensor = logits.gather(1, ids[0, 1:, None])[len(question) - 1 :, 0].sum()
    return found


def plain(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    made.load_state_dict(model.state_dict())
    return made.double()


def test_a_batch_is_the_formula_with_mismatched_answers() -> None:
    model = build_tiny_model()
    before = plain(model)
    loss = KtoLoss(ModelRoot(model), select_device(DeviceConfig(type="cpu", threads=1)), OBJECTIVE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.03)
    now = plain(model)
    packed = loss.pack_batch(collate_unpaired_answers(SINGLES, 60, 0, 64), CPU)
    ours = loss.root(loss, packed)
    ours.backward()

    rows = [split(piece) for piece in SINGLES]
    ring = [(0, 2), (2, 1), (1, 0)]  # good ones first, then the bad one, then round
    longest = max(len(question) + len(said) for question, said in rows)
    with torch.no_grad():
        gaps = []
        for number, other in ring:
            question = rows[number][0]
            said = rows[other][1][: longest - len(question)]
            gaps.append(log_prob(now, question, said) - log_prob(before, question, said))
        point = torch.stack(gaps).mean().clamp(min=0)
    assert packed.reference_point is not None
    torch.testing.assert_close(packed.reference_point.double(), point, rtol=1e-4, atol=1e-5)
    slow = torch.zeros((), dtype=torch.float64)
    for (question, said), good in zip(rows, (True, False, True), strict=True):
        ratio = log_prob(now, question, said) - log_prob(before, question, said).detach()
        sign, weight = (1, 1.5) if good else (-1, 0.5)
        slow = slow + weight * (1 - torch.sigmoid(sign * 0.3 * (ratio - point)))
    slow.backward()
    torch.testing.assert_close(ours.double(), slow, rtol=1e-4, atol=1e-5)
    for (name, one), two in zip(model.named_parameters(), now.named_parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), two[1].grad, rtol=2e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("point", [0.0, 3.0])
def test_the_loss_falls_where_it_should(point: float) -> None:
    ratios = torch.tensor([-5.0, 0.0, 5.0, -5.0, 0.0, 5.0], dtype=torch.float64)
    good = torch.tensor([True] * 3 + [False] * 3)
    losses = compute_kto_losses(
        ratios, torch.tensor(point, dtype=torch.float64), good, PreferenceOptions(beta=1.0, loss_type="kto")
    )
    assert losses[:3].tolist() == sorted(losses[:3].tolist(), reverse=True)
    assert losses[3:].tolist() == sorted(losses[3:].tolist())
    slow = [1 / (1 + np.exp((1 if g else -1) * (r - point))) for r, g in zip(ratios.tolist(), good, strict=True)]
    torch.testing.assert_close(losses, torch.tensor(slow, dtype=torch.float64))


def test_mismatched_rows() -> None:
    """Answers to the same question do not meet, everything fits, and nothing is left of a single question."""
    batch = collate_unpaired_answers([PAIR, *SINGLES], 80, 0, 64)
    assert batch.extra["desirable"].tolist() == [True, False, True, False, True]
    assert batch.extra["entry"].tolist() == [0, 0, 1, 2, 3]
    laid = make_mismatched_batch(batch)
    assert laid is not None and laid.num_targets == 5
    assert laid.cu_seqlens[5] <= batch.cu_seqlens[5]
    assert make_mismatched_batch(collate_unpaired_answers([PAIR], 80, 0, 64)) is None
    assert make_mismatched_batch(collate_unpaired_answers(SINGLES[:1], 80, 0, 64)) is None


def test_training_begins_at_half_the_weights() -> None:
    """Nothing is gained or lost before the first step: sigmoid(0)."""
    loss = KtoLoss(ModelRoot(build_tiny_model()), select_device(DeviceConfig(type="cpu", threads=1)), OBJECTIVE)
    batch = collate_unpaired_answers([PAIR, *SINGLES], 80, 0, 64)
    assert loss.root(loss, loss.pack_batch(batch, CPU)).item() == pytest.approx(0.5 * (3 * 1.5 + 2 * 0.5), rel=1e-6)
    assert (
        loss.metric_sums[0].abs() < 1e-5 and loss.metric_sums[2].abs() < 1e-5
    )  # how many are right is a matter of rounding
    alone = loss.pack_batch(collate_unpaired_answers(SINGLES[:1], 80, 0, 64), CPU)
    assert alone.reference_point is not None and alone.reference_point.item() == 0
