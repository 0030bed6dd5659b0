"""Sequence classification: hidden states are pooled, features of the sequence are concatenated, and a linear layer
computes the logits.

Shapes: `T` tokens, `n` sequences, `H` hidden size, `F` features, `C` classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import Batch
from anabatic.device.device import Device, send_to_device
from anabatic.models import pretrained
from anabatic.models.forward import PackedBatch, compute_hidden_states, pack_batch
from anabatic.parallel.sharded_tensors import copy_from_full

HEAD_PREFIX = "classifier."
"""Prefix of the names of the head's parameters."""
DESCRIPTION_FILE = "classifier.json"
NUM_QUANTILES = 33
SCALED_LIMIT = 1.7
"""Largest value of a scaled feature: uniform in -1.7 to 1.7 has standard deviation 1."""
Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class ClassifierDescription:
    """Description of a classifier without its weights: `classifier.json`.

    Attributes:
        classes: class names; the index is the label.
        words: name of the word spec; the model reads only its words.
        pooling: mean: mean of all hidden states; last: state of the last word.
        attention: both: every word attends to the whole sequence; causal: to earlier words.
        dropout: dropout of the pooled state, in training.
        features: names of the numeric features.
        width: size of the encoded features.
        features_dropout: dropout inside the feature encoder, in training.
        features_hidden: fraction of sequences whose features were hidden in training; 0: features are required.
        seq_len: longest sequence; longer ones are cut.
    """

    classes: tuple[str, ...]
    words: str
    pooling: Pooling = "mean"
    attention: Literal["both", "causal"] = "both"
    dropout: float = 0.0
    features: tuple[str, ...] = ()
    width: int = 64
    features_dropout: float = 0.0
    features_hidden: float = 0.0
    seq_len: int = 1024

    @property
    def is_causal(self) -> bool:
        """True when words attend only to earlier words."""
        return self.attention == "causal"


class FeatureEncoder(nn.Module):
    """Encodes numeric features: each is scaled by its quantiles in the training data, with a flag for missing values,
    and two layers map them to `description.width`.

    Buffer: quantiles, fp32 `[Q, F]`.
    """

    quantiles: Tensor

    def __init__(self, description: ClassifierDescription) -> None:
        super().__init__()
        num_features, width = len(description.features), description.width
        self.dropout, self.hidden_fraction = description.features_dropout, description.features_hidden
        self.register_buffer("quantiles", torch.zeros(NUM_QUANTILES, num_features))
        self.wide = nn.Linear(2 * num_features, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]`, nan: missing -> `[n, width]`."""
        unknown = features.isnan()
        if self.training and self.hidden_fraction:
            unknown = unknown | (torch.rand(len(features), 1, device=features.device) < self.hidden_fraction)
        scaled = self.scale_features(features.nan_to_num(0.0)).masked_fill(unknown, 0.0)
        inputs = torch.cat((scaled, unknown.float()), dim=-1).to(self.wide.weight.dtype)
        hidden = F.dropout(F.gelu(self.norm(self.wide(inputs))), self.dropout, self.training)
        return F.gelu(self.narrow(hidden))

    def scale_features(self, features: Tensor) -> Tensor:
        """Map each feature to -SCALED_LIMIT to SCALED_LIMIT by its rank among the quantiles, linear between them.

        It is a mean over the intervals between quantiles; a value equal to several quantiles is mapped to their middle.
        """
        low, high = self.quantiles[:-1], self.quantiles[1:]
        offset = features[:, None, :] - low
        fraction = (offset / (high - low).clamp(min=1e-30)).clamp(0.0, 1.0)
        fraction = torch.where(high > low, fraction, (offset.sign() + 1.0) / 2.0)
        return (fraction.mean(1) * 2.0 - 1.0) * SCALED_LIMIT


class ClassHead(nn.Module):
    """Computes the logits of sequences from the pooled state and the encoded features."""

    def __init__(self, hidden: int, description: ClassifierDescription) -> None:
        super().__init__()
        self.pooling, self.dropout = description.pooling, description.dropout
        self.norm = nn.LayerNorm(hidden)
        self.numbers = FeatureEncoder(description) if description.features else None
        self.out = nn.Linear(hidden + (description.width if description.features else 0), len(description.classes))

    def forward(self, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Return the logits, fp32 `[n, C]`. `states`: `[T, H]`."""
        with torch.autocast(states.device.type, enabled=False):
            pooled = self.norm(self.pool_states(states, sequences).to(self.norm.weight.dtype))
            pooled = F.dropout(pooled, self.dropout, self.training)
            if self.numbers is not None:
                assert sequences.features is not None
                pooled = torch.cat((pooled, self.numbers(sequences.features)), dim=-1)
            out: Tensor = self.out(pooled).float()
        return out

    def pool_states(self, states: Tensor, sequences: PackedSequences) -> Tensor:
        """Pool `[T, H]` -> `[n, H]`, fp32; the tail of the batch belongs to no sequence."""
        if self.pooling == "last":
            return states.index_select(0, sequences.last_positions).float()
        sums = states.new_zeros(len(sequences.lengths) + 1, states.shape[1], dtype=torch.float32)
        sums = sums.index_add(0, sequences.sequence_of_token, states.float())
        return sums[:-1] / sequences.lengths[:, None]

    @torch.no_grad()
    def init_weights(self, seed: int, features: Tensor | None = None) -> None:
        """Initialize weights, drawn on the CPU, and quantiles of the training features `[n, F]`, nan: missing."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                deviation = 0.02 if module is self.out else module.in_features**-0.5
                copy_from_full(
                    module.weight, torch.empty(module.weight.shape).normal_(0.0, deviation, generator=generator)
                )
                copy_from_full(module.bias, torch.zeros(module.bias.shape))
            elif isinstance(module, nn.LayerNorm):
                copy_from_full(module.weight, torch.ones(module.weight.shape))
                copy_from_full(module.bias, torch.zeros(module.bias.shape))
        if self.numbers is not None:
            assert features is not None
            levels = torch.linspace(0.0, 1.0, NUM_QUANTILES, dtype=torch.float64)
            columns = [column[~column.isnan()].double() for column in features.t()]
            quantiles = [
                values.quantile(levels) if len(values) else torch.zeros(NUM_QUANTILES, dtype=torch.float64)
                for values in columns
            ]
            self.numbers.quantiles.copy_(torch.stack(quantiles, dim=1))


@dataclass
class PackedSequences:
    """A batch of sequences on the device.

    Attributes:
        packed: the tokens.
        last_positions: int64 `[n]`, last token of each sequence.
        sequence_of_token: int64 `[T]`, the sequence of each token; `n`: the tail.
        lengths: fp32 `[n]`.
        labels: int64 `[n]`, `IGNORE_INDEX` without a label.
        sequence_ids: int64 `[n]`, index of each sequence in its set.
        features: fp32 `[n, F]`, or None.
        weights: fp32 `[n]`, weight of each sequence; None: all are equal.
    """

    packed: PackedBatch
    last_positions: Tensor
    sequence_of_token: Tensor
    lengths: Tensor
    labels: Tensor
    sequence_ids: Tensor
    features: Tensor | None
    weights: Tensor | None


def pack_sequences(batch: Batch, device: torch.device, causal: bool) -> PackedSequences:
    """Move a batch of `data.dataset.collate_classification` to `device`."""
    count = len(batch.extra["number"])
    borders = torch.tensor(batch.cu_seqlens)
    last = borders[1 : count + 1] - 1
    lengths = borders[1 : count + 1] - borders[:count]
    sequence_of_token = torch.repeat_interleave(torch.arange(count), lengths)
    sequence_of_token = torch.cat(
        (sequence_of_token, torch.full((batch.input_ids.numel() - len(sequence_of_token),), count))
    )
    features, weights = (batch.extra.get(name) for name in ("features", "weight"))
    return PackedSequences(
        pack_batch(batch, device, causal),
        send_to_device(last, device),
        send_to_device(sequence_of_token, device),
        send_to_device(lengths.float(), device),
        send_to_device(batch.labels[last], device),
        send_to_device(batch.extra["number"], device),
        None if features is None else send_to_device(features, device),
        None if weights is None else send_to_device(weights, device),
    )


def attach_class_head(model: PreTrainedModel, description: ClassifierDescription) -> None:
    """Attach a classification head on the meta device; the unused LM head is frozen."""
    with pretrained.init_empty_weights():
        model.add_module(HEAD_PREFIX.rstrip("."), ClassHead(model.config.hidden_size, description))
    output = model.get_output_embeddings()
    for parameter in get_class_head(model).parameters():  # sharding needs one dtype for all parameters
        parameter.data = parameter.data.to(output.weight.dtype)
    if output.weight is not model.get_input_embeddings().weight:
        output.weight.requires_grad_(False)


class ClassLoss:
    """The summed loss of a batch of sequences, called by a step.

    Attributes:
        metric_sums: `[1]`, number of correct predictions since the reader last reset it.
    """

    metric_names = ("accuracy",)

    def __init__(
        self,
        description: ClassifierDescription,
        device: Device,
        weights: Sequence[float] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        self.description, self.smoothing = description, smoothing
        self.weights = None if weights is None else torch.tensor(weights, device=device.torch_device)
        self.metric_sums = torch.zeros(1, device=device.torch_device)

    def pack_batch(self, batch: Batch, device: torch.device) -> PackedSequences:
        """Move a batch to `device`."""
        return pack_sequences(batch, device, self.description.is_causal)

    def __call__(self, model: PreTrainedModel, sequences: PackedSequences) -> Tensor:
        """Return the summed cross-entropy of the labelled sequences, fp32, each times its weight."""
        logits = compute_class_logits(model, sequences)
        with torch.no_grad():
            self.metric_sums += (logits.argmax(-1) == sequences.labels).sum()
        losses = F.cross_entropy(
            logits, sequences.labels, self.weights, reduction="none", label_smoothing=self.smoothing
        )
        return (losses if sequences.weights is None else losses * sequences.weights).sum()


def compute_class_logits(model: PreTrainedModel, sequences: PackedSequences) -> Tensor:
    """Return the logits of the sequences, fp32 `[n, C]`."""
    logits: Tensor = get_class_head(model)(compute_hidden_states(model, sequences.packed), sequences)
    return logits


def get_class_head(model: PreTrainedModel) -> ClassHead:
    """Return the head attached by `attach_class_head`."""
    head = model.get_submodule(HEAD_PREFIX.rstrip("."))
    assert isinstance(head, ClassHead)
    return head


def is_classifier(folder: Path) -> bool:
    """True when a model folder contains a classifier."""
    return (folder / DESCRIPTION_FILE).is_file()


def require_text_model(folder: Path) -> None:
    """Refuse a classifier where a generative model is needed.

    Raises:
        ConfigError: the folder contains a classifier.
    """
    if is_classifier(folder):
        raise ConfigError(
            f"{folder} is a classifier: it writes no text",
            "ask it with `anabatic classify predict`, or serve it with --classifier NAME=FOLDER",
        )
