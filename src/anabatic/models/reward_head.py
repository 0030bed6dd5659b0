"""Reward models: a scalar for a conversation, trained on pairs of a chosen and a rejected answer.

They are saved as transformers' sequence classification with one label: `score` is a linear layer without bias on the
hidden state of the last token. Shapes: `P` pairs, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch
from anabatic.device.device import Device, send_to_device
from anabatic.models import pretrained
from anabatic.models.context_parallel import count_once, sum_over_context
from anabatic.models.forward import ModelRoot, PackedBatch, choose_packing, compute_hidden_states
from anabatic.models.preference_loss import PREFERENCE_METRIC_NAMES
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup
from anabatic.parallel.sharded_tensors import copy_from_full
from anabatic.parallel.token_split import TokenSplit

SCORE_NAME = "score"
SCORE_PREFIX = f"{SCORE_NAME}."
"""Prefix of the name of the head's parameter."""
CLASS_SUFFIX = "ForSequenceClassification"
"""Suffix of the names of transformers' models with such a head."""


@dataclass(frozen=True)
class RewardOptions:
    """Options of the loss.

    Attributes:
        center: weight of `(r_w + r_l)^2`, which keeps rewards around 0.
    """

    center: float = 0.0


@dataclass
class PackedConversations:
    """A batch of pairs on the device.

    Attributes:
        last_positions: int64 `[n]`, last token of every conversation that ends on this rank.
        lengths: fp32 `[P, 2]`, number of tokens of each, the chosen one of a pair first.
        conversation_ids: int64 `[n]`, their numbers; None: all.
        context: ranks that share the batch.
    """

    packed: PackedBatch
    last_positions: Tensor
    lengths: Tensor
    conversation_ids: Tensor | None = None
    context: ContextGroup = SINGLE_CONTEXT


def get_class_name(model: PreTrainedModel) -> str:
    """Return transformers' name of the sequence classification model.

    Raises:
        DataError: transformers has none for this architecture.
    """
    name = type(model).__name__.removeprefix("FSDP")
    for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
        name = name.removesuffix(suffix)
    name += CLASS_SUFFIX
    if not hasattr(transformers, name) and getattr(model.config, "vision_config", None) is None:
        raise DataError(f"transformers has no {name}, as which the reward model would be saved", "use another model")
    return name


def find_model_class(config: PretrainedConfig) -> Any:
    """Return what loads a sequence classification model: transformers' own class, or for a model that sees, of most of
    which it has none, one made as it makes its own (transformers, modeling_layers.py)."""
    known = type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if known or getattr(config, "vision_config", None) is None:
        return transformers.AutoModelForSequenceClassification
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    whole: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    family = next(one for one in whole.__mro__ if PreTrainedModel in one.__bases__)
    name = whole.__name__.removesuffix("ForConditionalGeneration") + CLASS_SUFFIX
    if (renamings := get_checkpoint_conversion_mapping(whole.__name__)) is not None:  # kept by the name of the class
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
    return type(name, (GenericForSequenceClassification, family), {})


def attach_score_head(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Attach the head on the meta device; the unused LM head is frozen.

    Args:
        dtype: dtype of the head; None: that of the LM head.

    Raises:
        DataError: transformers cannot load such a model.
    """
    get_class_name(model)
    output = model.get_output_embeddings()
    with pretrained.init_empty_weights():
        head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=dtype or output.weight.dtype)
    model.add_module(SCORE_NAME, head)
    if output.weight is not model.get_input_embeddings().weight:
        output.weight.requires_grad_(False)


@torch.no_grad()
def init_score_head(model: PreTrainedModel, seed: int) -> None:
    """Initialize the head with deviation `1 / sqrt(H + 1)` (arXiv 2009.01325, appendix B.1), drawn on the CPU."""
    weight = model.get_submodule(SCORE_NAME).weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(seed)
    copy_from_full(weight, torch.empty(weight.shape).normal_(0.0, (weight.shape[1] + 1) ** -0.5, generator=generator))


class RewardLoss:
    """The summed loss of a batch of pairs, called by a step: `loss(model, loss.pack_batch(batch, device))`.

    Attributes:
        metric_names: names of `metric_sums`, which every call adds to and the reader resets to zero.
        unit: unit over which the loss is averaged.
    """

    metric_names = PREFERENCE_METRIC_NAMES
    unit = "pairs"

    def __init__(
        self, root: ModelRoot, device: Device, objective: RewardOptions, context: ContextGroup = SINGLE_CONTEXT
    ) -> None:
        self.root, self.device, self.objective, self.context = root, device, objective, context
        self._pack = choose_packing(root.model)
        self.metric_sums = torch.zeros(len(self.metric_names), device=device.torch_device)

    def pack_batch(self, batch: Batch, device: torch.device) -> PackedConversations:
        """Move a batch of `data.preference_pairs.collate_preference_pairs` to `device`."""
        borders = torch.tensor(batch.cu_seqlens[: 2 * batch.num_targets + 1])
        lengths = borders.diff().view(-1, 2).float()
        last, own_ids = borders[1:] - 1, None
        if self.context.size > 1:
            own, last = TokenSplit(batch.cu_seqlens[-1], self.context).find_rows(last)
            own_ids = send_to_device(own, device)
        return PackedConversations(
            self._pack(batch, device, context=self.context),
            send_to_device(last, device),
            send_to_device(lengths, device),
            own_ids,
            self.context,
        )

    def __call__(self, model: PreTrainedModel, conversations: PackedConversations) -> Tensor:
        """Return the summed loss of the pairs, fp32."""
        rewards = compute_rewards(model, conversations).view(-1, 2)
        with torch.no_grad():
            margin = rewards[:, 0] - rewards[:, 1]
            sums = torch.stack((rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(rewards.dtype)), dim=1).sum(0)
            self.metric_sums += count_once(sums, self.context)
        return count_once(bradley_terry(rewards, self.objective.center).sum(), self.context)


def compute_rewards(model: PreTrainedModel, conversations: PackedConversations) -> Tensor:
    """Return the reward of every conversation, fp32 `[2 P]`."""
    states = compute_hidden_states(model, conversations.packed).index_select(0, conversations.last_positions)
    with torch.autocast(states.device.type, enabled=False):
        weight = model.get_submodule(SCORE_NAME).weight
        assert isinstance(weight, Tensor)
        rewards = F.linear(states.float(), weight.float()).squeeze(1)
        if conversations.conversation_ids is None:
            return rewards
        every = rewards.new_zeros(conversations.lengths.numel())
        return sum_over_context(every.index_add(0, conversations.conversation_ids, rewards), conversations.context)


def bradley_terry(rewards: Tensor, center: float = 0.0) -> Tensor:
    """Return the loss of every pair `[P]`: `-log sigmoid(r_w - r_l)` (Bradley and Terry 1952, as in arXiv 2203.02155,
    equation 1), plus `center (r_w + r_l)^2` (arXiv 2312.09244, section 4).

    Args:
        rewards: rewards `[P, 2]`, the chosen answer's first.
    """
    losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
    return losses + center * rewards.sum(1).square() if center else losses


def save_reward_model(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    is_writer: bool = True,
    write_extra: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder that the class of `find_model_class` loads, atomically. All ranks call it.

    Args:
        write_extra: writes further files of the folder.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    output = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    unused = {name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in output}
    body = {name for name, value in model.named_parameters() if name.startswith(f"{model.base_model_prefix}.")}

    def should_skip(name: str) -> bool:
        return name in unused and name not in body

    def describe_head(config: PretrainedConfig) -> None:
        config.architectures = [get_class_name(model)]
        config.num_labels = 1
        config.id2label, config.label2id = {0: "reward"}, {"reward": 0}
        # transformers reads the last token that is not this one.
        config.get_text_config().pad_token_id = pretrained.get_chat_token_ids(tokenizer)["pad_token_id"]

    pretrained.save_model(
        model, folder, tokenizer, is_writer, write_extra, should_skip=should_skip, change_config=describe_head
    )
