"""The gated delta rule (Qwen3-Next, Qwen3.5) over packed documents, in chunks, and the short convolution before it.

A head keeps a state `S` of `[D, E]`, from zero at the start of each document (Gated DeltaNet, arXiv 2412.06464,
equation 10, with the decay `a = exp(g)`):

    S_t = a_t S_(t-1) + k_t (beta_t (v_t - a_t k_t S_(t-1)))^T,    o_t = q_t S_t

Shapes: `T` tokens, `n` documents, `C` chunks of `L` tokens, `K` key heads of size `D`, `V` value heads of size `E` (`V`
is `R` times `K`; value head `i` reads key head `i // R`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.attention import GatherRows
from anabatic.device.device import send_to_device

CHUNK = 64
"""Tokens of a chunk, as in flash-linear-attention's and transformers' kernels of this rule."""
_NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys (transformers, models/qwen3_next, `l2norm`)."""


class DeltaInputs(NamedTuple):
    """What a layer reads its state with.

    Attributes:
        q, k: `[T, K, D]`, not yet normalised; v: `[T, V, E]`.
        log_decay: `g`, fp32 `[T, V]`, at most 0; beta: `[T, V]`, how much of a value is written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class _PlaceRows(torch.autograd.Function):
    """Rows at distinct places among zeros; the gradient is a selection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Layout(NamedTuple):
    """Where each token lies in a padded layout, int64 `[T]`, and how many rows that has."""

    places: Tensor
    rows: int

    def spread_rows(self, x: Tensor) -> Tensor:
        """`[T, ...]` -> `[rows, ...]`, zero between documents."""
        out: Tensor = _PlaceRows.apply(x, *self)  # type: ignore[no-untyped-call]
        return out

    def gather_rows(self, x: Tensor) -> Tensor:
        """`[rows, ...]` -> `[T, ...]`."""
        out: Tensor = GatherRows.apply(x, self.places)  # type: ignore[no-untyped-call]
        return out


class _Spaced(NamedTuple):
    """Documents with zero rows before each.

    Attributes:
        layout: where the tokens lie; before: the rows before the documents; tails: the last rows of the documents, as
            many of each as lie before it.
    """

    layout: _Layout
    before: Tensor
    tails: Tensor


class DeltaPlan:
    """Plan of the documents of one packed batch, made on the host.

    Chunks lie in the order of their number in their document, and within it from the longest document to the shortest:
    the documents that still have a chunk are always the first ones, and one product serves them all.

    Args:
        cu_seqlens: host list of `n + 1` borders.
    """

    def __init__(self, cu_seqlens: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._borders = np.asarray(cu_seqlens, dtype=np.int64)
        lengths = np.diff(self._borders)
        order = np.argsort(-lengths, kind="stable")
        chunks = -(-lengths[order] // CHUNK)
        self.steps = [int((chunks > number).sum()) for number in range(int(chunks[0]))]
        """Documents that have a chunk of each number."""
        starts = np.concatenate(([0], np.cumsum(self.steps)))[:-1]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        self._order, self._rank = order, rank
        document = np.repeat(np.arange(len(lengths)), lengths)
        offset = np.arange(self._borders[-1]) - self._borders[:-1][document]
        self._document = document
        places = (starts[offset // CHUNK] + rank[document]) * CHUNK + offset % CHUNK
        self.chunked = _Layout(self._send(places), sum(self.steps) * CHUNK)
        self._spaced: dict[int, _Spaced] = {}

    @functools.cached_property
    def longest_first(self) -> Tensor:
        """Documents from the longest to the shortest, int64 `[n]`."""
        return self._send(self._order)

    @functools.cached_property
    def places_by_length(self) -> Tensor:
        """Place of each document in `longest_first`, int64 `[n]`."""
        return self._send(self._rank)

    def _send(self, index: np.ndarray) -> Tensor:
        return send_to_device(torch.from_numpy(np.ascontiguousarray(index)), self._device)

    def space_documents(self, gap: int) -> _Spaced:
        """Return the layout with `gap` zero rows before each document."""
        if gap not in self._spaced:
            count = len(self._borders) - 1
            places = np.arange(self._borders[-1]) + gap * (self._document + 1)
            before = (self._borders[:-1] + gap * np.arange(count))[:, None] + np.arange(gap)
            tails = (self._borders[1:] + gap * np.arange(1, count + 1))[:, None] - np.arange(gap, 0, -1)
            layout = _Layout(self._send(places), int(self._borders[-1]) + gap * count)
            self._spaced[gap] = _Spaced(layout, self._send(before.reshape(-1)), self._send(tails.reshape(-1)))
        return self._spaced[gap]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: DeltaPlan, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute each channel's causal convolution within each document.

    Args:
        x: `[T, channels]`; weight: `[channels, width]`, the last column for the token itself; bias: `[channels]`.
        past: `[n, width - 1, channels]`, the inputs before each document's tokens; None: zeros.

    Returns:
        `[T, channels]`, and the last `width - 1` inputs of each document, as `past`.
    """
    channels, width = weight.shape
    spaced = plan.space_documents(width - 1)
    rows = spaced.layout.spread_rows(x)
    if past is not None:
        rows = rows.index_copy(0, spaced.before, past.to(x.dtype).flatten(0, 1))
    mixed = F.conv1d(rows.t().unsqueeze(0), weight.to(x.dtype).unsqueeze(1), None, groups=channels)
    # Output row i ends at input row i + width - 1.
    out = _Layout(spaced.layout.places - (width - 1), mixed.shape[-1]).gather_rows(mixed.squeeze(0).t())
    tails = rows.detach().index_select(0, spaced.tails).unflatten(0, (-1, width - 1))
    return out if bias is None else out + bias, tails


def convolve_step(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """As `convolve`, of one token of each document: `x` is `[n, channels]`."""
    rows = torch.cat((past.to(x.dtype), x.unsqueeze(1)), dim=1)
    out = (rows * weight.to(x.dtype).t()).sum(1)
    return out if bias is None else out + bias, rows[:, 1:]


def chunk_gated_delta_rule(
    inputs: DeltaInputs, plan: DeltaPlan, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the rule over whole documents, in fp32.

    Args:
        initial: `[n, V, D, E]`, the states before the documents; None: zeros.

    Returns:
        `[T, V, E]`, and the states after the documents, `[n, V, D, E]`.
    """
    with torch.autocast(inputs.v.device.type, enabled=False):
        terms = _prepare_chunks(inputs, plan)
        states = None
        if initial is not None:
            states = initial.float().index_select(0, plan.longest_first).unflatten(1, (inputs.k.shape[1], -1))
        outputs, finals = _scan_chunks(terms, plan.steps, states)
        out = outputs.movedim(3, 1).flatten(0, 1).flatten(1, 2)  # [C, K, R, L, E] -> [C L, V, E]
        return plan.chunked.gather_rows(out), finals.flatten(1, 2).index_select(0, plan.places_by_length)


class _ChunkTerms(NamedTuple):
    """Terms of all chunks, `[C, K, R, L, ...]`, that do not depend on states (arXiv 2412.06464, equations 11 to 14)."""

    values: Tensor
    """`[..., E]`, what the tokens of a chunk write, if the state before it were zero."""
    reads: Tensor
    """`[..., D]`, what they overwrite of that state."""
    queries: Tensor
    """`[..., D]`, with the decay since the chunk's start."""
    keys: Tensor
    """`[..., D]`, with the decay until its end."""
    scores: Tensor
    """`[..., L]`, of the tokens of the chunk among each other."""
    decay: Tensor
    """`[C, K, R, 1, 1]`, of the whole chunk."""


def _prepare_chunks(inputs: DeltaInputs, plan: DeltaPlan) -> _ChunkTerms:
    ratio = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (normalise_keys(x.float()) for x in (inputs.q, inputs.k))
    q = q * q.shape[-1] ** -0.5

    def chunk(x: Tensor) -> Tensor:
        """`[T, heads, ...]` -> `[C, heads, L, ...]`."""
        return plan.chunked.spread_rows(x).unflatten(0, (-1, CHUNK)).movedim(1, 2)

    q, k = (chunk(x).unsqueeze(2) for x in (q, k))  # [C, K, 1, L, D]
    v, log_decay, beta = (chunk(x.float()).unflatten(1, (-1, ratio)) for x in (inputs.v, inputs.log_decay, inputs.beta))
    total = log_decay.cumsum(-1)  # decay since the chunk's start, [C, K, R, L]
    hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(hidden, float("-inf")).exp()
    system = (k @ k.mT) * between * beta.unsqueeze(-1)  # its diagonal is taken as 1
    grown = total.exp().unsqueeze(-1)
    right = torch.cat((v * beta.unsqueeze(-1), k * (beta.unsqueeze(-1) * grown)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = total[..., -1:]
    return _ChunkTerms(
        values, reads, q * grown, k * (last - total).exp().unsqueeze(-1), (q @ k.mT) * between, last.exp().unsqueeze(-1)
    )


def normalise_keys(x: Tensor) -> Tensor:
    """Return queries or keys of length one, over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _scan_chunks(terms: _ChunkTerms, steps: Sequence[int], states: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of all chunks, and the last states of the documents, from the longest to the shortest."""
    outputs, finals = [], []
    parts = zip(*(x.split(list(steps)) for x in terms), strict=True)
    for number, (values, reads, queries, keys, scores, decay) in enumerate(parts):
        if states is None:  # the first chunks of documents, before which there is nothing
            outputs.append(scores @ values)
            states = keys.mT @ values
        else:
            if len(states) > steps[number]:
                states, ended = states.split([steps[number], len(states) - steps[number]])
                finals.append(ended)
            written = values - reads @ states
            outputs.append(queries @ states + scores @ written)
            states = states * decay + keys.mT @ written
    assert states is not None
    return torch.cat(outputs), torch.cat([states, *reversed(finals)])


def step_gated_delta_rule(inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule over one token of each of `T` documents.

    Args:
        states: fp32 `[T, V, D, E]`.

    Returns:
        `[T, V, E]`, and the states after the tokens.
    """
    ratio = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (normalise_keys(x.float()).repeat_interleave(ratio, dim=1) for x in (inputs.q, inputs.k))
    states = states * inputs.log_decay.float().exp()[..., None, None]
    written = (inputs.v.float() - (k.unsqueeze(-2) @ states).squeeze(-2)) * inputs.beta.float().unsqueeze(-1)
    states = states + k.unsqueeze(-1) * written.unsqueeze(-2)
    return ((q * q.shape[-1] ** -0.5).unsqueeze(-2) @ states).squeeze(-2), states
