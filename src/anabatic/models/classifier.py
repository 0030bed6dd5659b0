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

from anabatic.core.errors import DataError
from anabatic.core.paths import write_atomic
from anabatic.data.batch import Batch
from anabatic.device.device import Device
from anabatic.device.transfer import send
from anabatic.models import hf, stored
from anabatic.models.forward import Packed, hidden_states, pack
from anabatic.parallel.sharded import put, whole

PREFIX = "classifier."
"""Of the names of the head's parameters."""
DESCRIPTION, WEIGHTS = "classifier.json", "classifier.safetensors"
Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class Description:
    """What a classifier is, beside its weights: `classifier.json`.

    Attributes:
        classes: names; the position is the label.
        words: name of the word spec; its words are all that the model reads.
        pooling: mean: of all words' states; last: the last word's.
        attention: both: every word sees the whole sequence; causal: what comes before it.
        dropout: of the pooled state, in training.
        features: names of the numbers beside the words.
        width: of the layer that reads them.
        seq_len: longest sequence; a longer one is cut.
        trees_share: what the trees beside the network (`models.forest`) count in the mean; 0: there are none.
    """

    classes: tuple[str, ...]
    words: str
    pooling: Pooling = "mean"
    attention: Literal["both", "causal"] = "both"
    dropout: float = 0.0
    features: tuple[str, ...] = ()
    width: int = 64
    seq_len: int = 1024
    trees_share: float = 0.0

    @property
    def causal(self) -> bool:
        """Words see only what comes before them."""
        return self.attention == "causal"


class ClassHead(nn.Module):
    """Logits of sequences. The numbers are standardised, read by a layer of their own, and put beside the pooled state.

    Buffers: mean and scale of the numbers in the training data, fp32 `[F]`.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden: int, description: Description) -> None:
        super().__init__()
        numbers = len(description.features)
        self.pooling, self.dropout = description.pooling, description.dropout
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("scale", torch.ones(numbers))
        self.numbers = nn.Linear(numbers, description.width) if numbers else None
        self.out = nn.Linear(hidden + (description.width if numbers else 0), len(description.classes))

    def forward(self, states: Tensor, rows: PackedRows) -> Tensor:
        """Return the logits, fp32 `[n, C]`. `states`: `[T, H]`."""
        with torch.autocast(states.device.type, enabled=False):
            pooled = self.norm(self.pool(states, rows).to(self.norm.weight.dtype))
            if self.numbers is not None:
                assert rows.features is not None
                known = ((rows.features - self.mean) / self.scale).clamp(-8.0, 8.0)  # outliers must not decide
                told = F.gelu(self.numbers(known.nan_to_num(0.0).to(pooled.dtype)))
                pooled = torch.cat((pooled, told), dim=-1)
            pooled = F.dropout(pooled, self.dropout, self.training)
            out: Tensor = self.out(pooled).float()
        return out

    def pool(self, states: Tensor, rows: PackedRows) -> Tensor:
        """`[T, H]` -> `[n, H]`, fp32; the tail of the batch belongs to no sequence."""
        if self.pooling == "last":
            return states.index_select(0, rows.last).float()
        sums = states.new_zeros(len(rows.lengths) + 1, states.shape[1], dtype=torch.float32)
        sums = sums.index_add(0, rows.owner, states.float())
        return sums[:-1] / rows.lengths[:, None]

    @torch.no_grad()
    def begin(self, seed: int, features: Tensor | None = None) -> None:
        """First weights, drawn on the CPU; mean and scale of the training data's numbers `[n, F]`, nan: not known."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.numbers, self.out):
            if layer is not None:
                put(layer.weight, torch.empty(layer.weight.shape).normal_(0.0, 0.02, generator=generator))
                put(layer.bias, torch.zeros(layer.bias.shape))
        put(self.norm.weight, torch.ones(self.norm.weight.shape))
        put(self.norm.bias, torch.zeros(self.norm.bias.shape))
        if features is not None:
            mean = features.nanmean(0).nan_to_num(0.0)
            scale = (features - mean).square().nanmean(0).sqrt().nan_to_num(1.0)
            self.mean.copy_(mean)
            self.scale.copy_(torch.where(scale > 1e-6, scale, 1.0))


@dataclass
class PackedRows:
    """A batch of sequences on the device.

    Attributes:
        packed: the words.
        last: int64 `[n]`, last token of each sequence.
        owner: int64 `[T]`, the sequence of each token; `n`: the tail.
        lengths: fp32 `[n]`.
        labels: int64 `[n]`, `IGNORE` without one.
        numbers: int64 `[n]`, which sequence of its set each is.
        features: fp32 `[n, F]`, or None.
    """

    packed: Packed
    last: Tensor
    owner: Tensor
    lengths: Tensor
    labels: Tensor
    numbers: Tensor
    features: Tensor | None


def pack_rows(batch: Batch, device: torch.device, causal: bool) -> PackedRows:
    """Move a batch of `data.sequences.flatten_classes` to `device`."""
    count = len(batch.extra["number"])
    borders = torch.tensor(batch.cu_seqlens)
    last = borders[1 : count + 1] - 1
    lengths = borders[1 : count + 1] - borders[:count]
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    owner = torch.cat((owner, torch.full((batch.input_ids.numel() - len(owner),), count)))
    features = batch.extra.get("features")
    return PackedRows(
        pack(batch, device, causal),
        send(last, device),
        send(owner, device),
        send(lengths.float(), device),
        send(batch.labels[last], device),
        send(batch.extra["number"], device),
        None if features is None else send(features, device),
    )


def attach(model: PreTrainedModel, description: Description) -> None:
    """Give a model a head, on the meta device; the head over the vocabulary, which no class needs, is frozen."""
    with hf.on_meta():
        model.add_module(PREFIX.rstrip("."), ClassHead(model.config.hidden_size, description))
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:
        output.weight.requires_grad_(False)


class ClassLoss:
    """The summed loss of a batch of sequences, as a step calls it.

    Attributes:
        sums: `[1]`, how many were right since whoever reads it set it to zero.
    """

    names = ("accuracy",)

    def __init__(
        self, description: Description, device: Device, weights: Sequence[float] | None = None, smoothing: float = 0.0
    ) -> None:
        self.description, self.smoothing = description, smoothing
        self.weights = None if weights is None else torch.tensor(weights, device=device.torch)
        self.sums = torch.zeros(1, device=device.torch)

    def pack(self, batch: Batch, device: torch.device) -> PackedRows:
        """Move a batch to `device`."""
        return pack_rows(batch, device, self.description.causal)

    def __call__(self, model: PreTrainedModel, rows: PackedRows) -> Tensor:
        """Return the summed cross-entropy of the sequences that have a label, fp32; each times its class's weight."""
        found = logits(model, rows)
        with torch.no_grad():
            self.sums += (found.argmax(-1) == rows.labels).sum()
        return F.cross_entropy(found, rows.labels, self.weights, reduction="sum", label_smoothing=self.smoothing)


def logits(model: PreTrainedModel, rows: PackedRows) -> Tensor:
    """Return the logits of the sequences, fp32 `[n, C]`."""
    found: Tensor = head_of(model)(hidden_states(model, rows.packed), rows)
    return found


def head_of(model: PreTrainedModel) -> ClassHead:
    """Return the head that `attach` gave a model."""
    head = model.get_submodule(PREFIX.rstrip("."))
    assert isinstance(head, ClassHead)
    return head


def save(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    description: Description,
    files: Mapping[str, str | bytes],
    writes: bool = True,
) -> None:
    """Write a Hugging Face folder of the model with the head beside it: whole or not at all. All ranks call it.

    Args:
        files: name -> content of what else belongs into the folder.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    head = {name: whole(value.detach()).cpu().contiguous() for name, value in head_of(model).state_dict().items()}

    def also(temporary: Path) -> None:
        save_file(head, temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(asdict(description), ensure_ascii=False, indent=1)
        for name, content in {DESCRIPTION: text + "\n", **files}.items():
            write_atomic(temporary / name, content)

    hf.save_model(model, folder, tokenizer, writes, also)


def is_classifier(folder: Path) -> bool:
    """True when a model folder holds a classifier."""
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> Description:
    """Return what a classifier says of itself.

    Raises:
        DataError: the folder holds none, or its file is damaged.
    """
    if not is_classifier(folder):
        raise DataError(f"{folder} holds no {DESCRIPTION}: it is no classifier", "train one: `anabatic classify train`")
    found = stored.read_json(folder / DESCRIPTION)
    try:
        return Description(**{**found, "classes": tuple(found["classes"]), "features": tuple(found["features"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{folder / DESCRIPTION} is not whole: {error}", "copy the folder again") from error


def fill_head(model: PreTrainedModel, folder: Path) -> None:
    """Read the head's weights into a model that has one.

    Raises:
        DataError: the file is missing or torn, or of another head.
    """
    try:
        found = load_file(folder / WEIGHTS)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / WEIGHTS} cannot be read: {error}", "copy the folder again") from error
    own = head_of(model).state_dict()
    wrong = sorted(name for name in own if name not in found or found[name].shape != own[name].shape)
    if wrong or found.keys() - own.keys():
        raise DataError(f"{folder / WEIGHTS} is of another head: {', '.join(wrong[:3])}", "copy the folder again")
    for name, value in own.items():
        put(value, found[name])


def load(path: str | Path, device: torch.device) -> tuple[PreTrainedModel, Description]:
    """Load a classifier onto `device`, ready to be asked.

    Raises:
        DataError: the folder or a file in it is missing, torn, or holds no classifier.
    """
    folder = hf.resolve(path)
    description = read_description(folder)
    model = hf.load_model(folder, device)
    attach(model, description)
    head_of(model).to_empty(device=device)
    fill_head(model, folder)
    model.eval()
    return model, description
