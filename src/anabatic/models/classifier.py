"""A class for a whole sequence: states of the words are pooled, numbers of the sequence are added, and a linear layer
says what it is.

Shapes: `T` tokens, `n` sequences, `H` hidden size, `F` numbers, `C` classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import write_atomic
from anabatic.data.batching.batch import Batch
from anabatic.device.device import Device
from anabatic.device.transfer import send_to_device
from anabatic.models import pretrained, weights_reader
from anabatic.models.forward import PackedBatch, compute_hidden_states, pack_batch
from anabatic.parallel.dtensors import copy_from_full, gather_full_tensor

HEAD_PREFIX = "classifier."
"""Of the names of the head's parameters."""
DESCRIPTION_FILE, HEAD_WEIGHTS_FILE = "classifier.json", "classifier.safetensors"
NUM_QUANTILES = 33
SCALED_LIMIT = 1.7
"""Largest value of a scaled number: uniform in -1.7 to 1.7 has the deviation 1."""
Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class ClassifierDescription:
    """What a classifier is, beside its weights: `classifier.json`.

    Attributes:
        classes: names; the position is the label.
        words: name of the word spec; its words are all that the model reads.
        pooling: mean: of all words' states; last: the last word's.
        attention: both: every word sees the whole sequence; is_causal: what comes before it.
        dropout: of the pooled state, in training.
        features: names of the numbers beside the words.
        width: what is made of them.
        features_dropout: inside of the layers that read them, in training.
        features_hidden: share of the sequences whose numbers were hidden in training; 0: words alone cannot be asked.
        seq_len: longest sequence; a longer one is cut.
        trees_share: what the trees beside the network (`models.forest`) count in the mean; 0: there are none.
        vessel_share: what the trees on a vessel count beside all that is said of its segments; 0: there are none.
        points: lengths that the tracks were cut to; empty: the rows did not say.
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
    trees_share: float = 0.0
    vessel_share: float = 0.0
    points: tuple[int, ...] = ()

    @property
    def is_causal(self) -> bool:
        """Words see only what comes before them."""
        return self.attention == "causal"


class FeatureEncoder(nn.Module):
    """Reads numbers of a sequence: each is brought to a scale by the quantiles that it has in the training data, with a
    flag where it is not known, and two layers make `description.width` of them.

    Buffer: quantiles, fp32 `[Q, F]`.
    """

    quantiles: Tensor

    def __init__(self, description: ClassifierDescription) -> None:
        super().__init__()
        numbers, width = len(description.features), description.width
        self.dropout, self.hidden_fraction = description.features_dropout, description.features_hidden
        self.register_buffer("quantiles", torch.zeros(NUM_QUANTILES, numbers))
        self.wide = nn.Linear(2 * numbers, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]`, nan: not known -> `[n, width]`."""
        unknown = features.isnan()
        if self.training and self.hidden_fraction:
            unknown = unknown | (torch.rand(len(features), 1, device=features.device) < self.hidden_fraction)
        scaled = self.scale_features(features.nan_to_num(0.0)).masked_fill(unknown, 0.0)
        both = torch.cat((scaled, unknown.float()), dim=-1).to(self.wide.weight.dtype)
        inner = F.dropout(F.gelu(self.norm(self.wide(both))), self.dropout, self.training)
        return F.gelu(self.narrow(inner))

    def scale_features(self, features: Tensor) -> Tensor:
        """Return each number's place among its quantiles, from -REACH to REACH, straight between two of them.

        A sum over the spans between quantiles; where several are equal, a number like them lies in their middle.
        """
        low, high = self.quantiles[:-1], self.quantiles[1:]
        beyond = features[:, None, :] - low
        share = (beyond / (high - low).clamp(min=1e-30)).clamp(0.0, 1.0)
        share = torch.where(high > low, share, (beyond.sign() + 1.0) / 2.0)
        return (share.mean(1) * 2.0 - 1.0) * SCALED_LIMIT


class ClassHead(nn.Module):
    """Logits of sequences: the pooled state, and beside it what is made of the numbers."""

    def __init__(self, hidden: int, description: ClassifierDescription) -> None:
        super().__init__()
        self.pooling, self.dropout = description.pooling, description.dropout
        self.norm = nn.LayerNorm(hidden)
        self.numbers = FeatureEncoder(description) if description.features else None
        self.out = nn.Linear(hidden + (description.width if description.features else 0), len(description.classes))

    def forward(self, states: Tensor, rows: PackedSequences) -> Tensor:
        """Return the logits, fp32 `[n, C]`. `states`: `[T, H]`."""
        with torch.autocast(states.device.type, enabled=False):
            pooled = self.norm(self.pool_states(states, rows).to(self.norm.weight.dtype))
            pooled = F.dropout(pooled, self.dropout, self.training)
            if self.numbers is not None:
                assert rows.features is not None
                pooled = torch.cat((pooled, self.numbers(rows.features)), dim=-1)
            out: Tensor = self.out(pooled).float()
        return out

    def pool_states(self, states: Tensor, rows: PackedSequences) -> Tensor:
        """`[T, H]` -> `[n, H]`, fp32; the tail of the batch belongs to no sequence."""
        if self.pooling == "last":
            return states.index_select(0, rows.last_positions).float()
        sums = states.new_zeros(len(rows.lengths) + 1, states.shape[1], dtype=torch.float32)
        sums = sums.index_add(0, rows.sequence_of_token, states.float())
        return sums[:-1] / rows.lengths[:, None]

    @torch.no_grad()
    def init_weights(self, seed: int, features: Tensor | None = None) -> None:
        """First weights, drawn on the CPU; quantiles of the training data's numbers `[n, F]`, nan: not known."""
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
            at = torch.linspace(0.0, 1.0, NUM_QUANTILES, dtype=torch.float64)
            columns = [column[~column.isnan()].double() for column in features.t()]
            found = [
                one.quantile(at) if len(one) else torch.zeros(NUM_QUANTILES, dtype=torch.float64) for one in columns
            ]
            self.numbers.quantiles.copy_(torch.stack(found, dim=1))


@dataclass
class PackedSequences:
    """A batch of sequences on the device.

    Attributes:
        packed: the words.
        last_positions: int64 `[n]`, last token of each sequence.
        sequence_of_token: int64 `[T]`, the sequence of each token; `n`: the tail.
        lengths: fp32 `[n]`.
        labels: int64 `[n]`, `IGNORE` without one.
        sequence_ids: int64 `[n]`, which sequence of its set each is.
        features: fp32 `[n, F]`, or None.
        weights: fp32 `[n]`, how much each counts; None: all count equally.
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
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    owner = torch.cat((owner, torch.full((batch.input_ids.numel() - len(owner),), count)))
    features, weights = (batch.extra.get(name) for name in ("features", "weight"))
    return PackedSequences(
        pack_batch(batch, device, causal),
        send_to_device(last, device),
        send_to_device(owner, device),
        send_to_device(lengths.float(), device),
        send_to_device(batch.labels[last], device),
        send_to_device(batch.extra["number"], device),
        None if features is None else send_to_device(features, device),
        None if weights is None else send_to_device(weights, device),
    )


def attach_class_head(model: PreTrainedModel, description: ClassifierDescription) -> None:
    """Give a model a head, on the meta device; the head over the vocabulary, which no class needs, is frozen."""
    with pretrained.init_empty_weights():
        model.add_module(HEAD_PREFIX.rstrip("."), ClassHead(model.config.hidden_size, description))
    output = model.get_output_embeddings()
    for parameter in get_class_head(model).parameters():  # one format for all: what divides a model asks for it
        parameter.data = parameter.data.to(output.weight.dtype)
    if output.weight is not model.get_input_embeddings().weight:
        output.weight.requires_grad_(False)


def add_residual_dropout(model: PreTrainedModel, share: float) -> None:
    """Drop this share of what the attention and the MLP of every block add, in training (residual dropout, arXiv
    1706.03762, section 5.4).

    Raises:
        ConfigError: a model whose blocks end in layers of other names.
    """
    if not share:
        return
    layers = [module for name, module in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
    if not layers:
        raise ConfigError(
            f"head.block_dropout is {share:g}, and {type(model).__name__} has no o_proj or down_proj",
            "leave head.block_dropout at 0",
        )
    for layer in layers:
        layer.register_forward_hook(lambda module, _, out: F.dropout(out, share, module.training))


class ClassLoss:
    """The summed loss of a batch of sequences, as a step calls it.

    Attributes:
        metric_sums: `[1]`, how many were right since whoever reads it set it to zero.
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

    def __call__(self, model: PreTrainedModel, rows: PackedSequences) -> Tensor:
        """Return the summed cross-entropy of the sequences that have a label, fp32, each times its weights."""
        found = compute_class_logits(model, rows)
        with torch.no_grad():
            self.metric_sums += (found.argmax(-1) == rows.labels).sum()
        losses = F.cross_entropy(found, rows.labels, self.weights, reduction="none", label_smoothing=self.smoothing)
        return (losses if rows.weights is None else losses * rows.weights).sum()


def compute_class_logits(model: PreTrainedModel, rows: PackedSequences) -> Tensor:
    """Return the logits of the sequences, fp32 `[n, C]`."""
    found: Tensor = get_class_head(model)(compute_hidden_states(model, rows.packed), rows)
    return found


def get_class_head(model: PreTrainedModel) -> ClassHead:
    """Return the head that `attach_class_head` gave a model."""
    head = model.get_submodule(HEAD_PREFIX.rstrip("."))
    assert isinstance(head, ClassHead)
    return head


def save_classifier(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    description: ClassifierDescription,
    files: Mapping[str, str | bytes],
    writes: bool = True,
) -> None:
    """Write a Hugging Face folder of the model with the head beside it: whole or not at all. All ranks call it.

    Args:
        files: name -> content of what else belongs into the folder.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    head = {
        name: gather_full_tensor(value.detach()).cpu().contiguous()
        for name, value in get_class_head(model).state_dict().items()
    }

    def write_head(temporary: Path) -> None:
        save_file(head, temporary / HEAD_WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(asdict(description), ensure_ascii=False, indent=1)
        for name, content in {DESCRIPTION_FILE: text + "\n", **files}.items():
            write_atomic(temporary / name, content)

    pretrained.save_model(model, folder, tokenizer, writes, write_head)


def is_classifier(folder: Path) -> bool:
    """True when a model folder holds a classifier."""
    return (folder / DESCRIPTION_FILE).is_file()


def require_text_model(folder: Path) -> None:
    """Refuse a classifier where a model has to write text.

    Raises:
        ConfigError: it is one.
    """
    if is_classifier(folder):
        raise ConfigError(
            f"{folder} is a classifier: it writes no text",
            "ask it with `anabatic classify predict`, or serve it with --classifier NAME=FOLDER",
        )


def read_description(folder: Path) -> ClassifierDescription:
    """Return what a classifier says of itself.

    Raises:
        DataError: the folder holds none, or its file is damaged.
    """
    if not is_classifier(folder):
        raise DataError(
            f"{folder} holds no {DESCRIPTION_FILE}: it is no classifier", "train one: `anabatic classify train`"
        )
    found = weights_reader.read_json_object(folder / DESCRIPTION_FILE)
    try:
        lists = {name: tuple(found.get(name, ())) for name in ("classes", "features", "points")}
        return ClassifierDescription(**{**found, **lists})
    except (TypeError, KeyError) as error:
        raise DataError(f"{folder / DESCRIPTION_FILE} is not whole: {error}", "copy the folder again") from error


def load_head_weights(model: PreTrainedModel, folder: Path) -> None:
    """Read the head's weights into a model that has one.

    Raises:
        DataError: the file is missing or torn, or of another head.
    """
    try:
        found = load_file(folder / HEAD_WEIGHTS_FILE)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / HEAD_WEIGHTS_FILE} cannot be read: {error}", "copy the folder again") from error
    own = get_class_head(model).state_dict()
    wrong = sorted(name for name in own if name not in found or found[name].shape != own[name].shape)
    if wrong or found.keys() - own.keys():
        raise DataError(
            f"{folder / HEAD_WEIGHTS_FILE} is of another head: {', '.join(wrong[:3])}", "copy the folder again"
        )
    for name, value in own.items():
        copy_from_full(value, found[name])


def load_classifier(path: str | Path, device: torch.device) -> tuple[PreTrainedModel, ClassifierDescription]:
    """Load a classifier onto `device`, ready to be asked.

    Raises:
        DataError: the folder or a file in it is missing, torn, or holds no classifier.
    """
    folder = pretrained.resolve_model_folder(path)
    description = read_description(folder)
    model = pretrained.load_model(folder, device)
    attach_class_head(model, description)
    get_class_head(model).to_empty(device=device)
    load_head_weights(model, folder)
    model.eval()
    return model, description
