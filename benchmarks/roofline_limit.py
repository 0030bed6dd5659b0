"""The least that a step must do: its matrix products, at the shapes of its linear layers, its attention and its head.

`limit` runs nothing but these products, with every tensor allocated before, as one more side of `paired.alternate`. So
a side's share of the limit is a ratio of like turns on the same core in the same minutes, as every other ratio is.

Counted: `6 x tokens x parameters` of the linear layers split into their three products (output, gradient of the input,
gradient of the weight), without those that a step can leave out: gradients of frozen weights, and of inputs that
nothing trained has made. The head counts for target tokens only. Attention counts 7 products of half a square for every
segment and head: two forward, and five backward, since a flash kernel computes the scores again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from anabatic.core import cpu_info
from paired import Turns

SECONDS = 0.004
"""CPU time of a product's turn."""


class Product(NamedTuple):
    """`[m, k] x [k, n]`, `copies` times with tensors of its own, each for `batch` heads."""

    what: str
    m: int
    k: int
    n: int
    copies: int = 1
    batch: int = 1
    left: bool = False
    """The left matrix lies transposed in memory."""
    right: bool = False
    """The right matrix lies transposed in memory."""

    @property
    def operations(self) -> int:
        return 2 * self.m * self.k * self.n * self.copies * self.batch


@dataclass(frozen=True)
class Layers:
    """What multiplies in a model: `linears` maps (outputs, inputs) to a number of layers; the head is apart."""

    linears: dict[tuple[int, int], int]
    head: tuple[int, int]
    blocks: int
    heads: int
    head_dim: int
    rank: int = 0
    """Rank of the adapters in every linear layer; 0: all weights are trained."""
    first: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of the layers of the first block whose input needs no gradient."""


class Shape(NamedTuple):
    """A step's tokens."""

    tokens: int
    targets: int
    lengths: tuple[int, ...]


def layers_of(model: Any, rank: int = 0) -> Layers:
    """Read the layers of a causal language model of transformers, which may be on `meta`."""
    from torch import nn

    linears: dict[tuple[int, int], int] = {}
    first: list[tuple[int, int]] = []
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            shape = (module.out_features, module.in_features)
            linears[shape] = linears.get(shape, 0) + 1
            if rank and ".layers.0." in f".{name}." and name.endswith(("q_proj", "k_proj", "v_proj")):
                first.append(shape)
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    where = (config.vocab_size, config.hidden_size)
    return Layers(linears, where, config.num_hidden_layers, config.num_attention_heads, dim, rank, tuple(first))


def products_of_a_step(layers: Layers, shape: Shape) -> list[Product]:
    """Forward and backward of one batch without padding."""
    tokens, rank = shape.tokens, layers.rank
    found: list[Product] = []
    for (outs, ins), count in layers.linears.items():
        backward = count - layers.first.count((outs, ins))
        found.append(Product("linear", tokens, ins, outs, count, right=True))
        found.append(Product("linear, grad input", tokens, outs, ins, backward))
        if not rank:
            found.append(Product("linear, grad weight", outs, tokens, ins, count, left=True))
            continue
        found.append(Product("adapter", tokens, ins, rank, count, right=True))
        found.append(Product("adapter", tokens, rank, outs, count, right=True))
        found.append(Product("adapter, grad input", tokens, outs, rank, count))
        found.append(Product("adapter, grad input", tokens, rank, ins, backward))
        found.append(Product("adapter, grad weight", rank, tokens, ins, count, left=True))
        found.append(Product("adapter, grad weight", outs, tokens, rank, count, left=True))
    words, width = layers.head
    rows = min(shape.targets, 512)  # logits are never needed all at once
    count = shape.targets // rows
    found.append(Product("head", rows, width, words, count, right=True))
    found.append(Product("head, grad input", rows, words, width, count))
    if not rank:
        found.append(Product("head, grad weight", words, rows, width, count, left=True))
    for length in sorted(set(shape.lengths)):
        copies = shape.lengths.count(length) * layers.blocks
        half = max(1, length // 2)
        found += [
            Product("attention", half, layers.head_dim, length, 4 * copies, layers.heads, right=True),
            Product("attention", half, length, layers.head_dim, 3 * copies, layers.heads),
        ]
    return [product for product in found if product.copies]


def products_of_answers(layers: Layers, wanted: Iterable[tuple[list[int], int]], at_once: int) -> list[Product]:
    """Every prompt by itself; then one token of `at_once` requests after another, the mean of all lengths."""
    wanted = list(wanted)
    found: list[Product] = []
    for prompt, _ in wanted:
        found += [Product("prompt", len(prompt), ins, outs, count, right=True) for (outs, ins), count in
                  layers.linears.items()]  # fmt: skip
    steps = -(-sum(size for _, size in wanted) // at_once)
    found += [Product("token", at_once, ins, outs, count * steps, right=True) for (outs, ins), count in
              layers.linears.items()]  # fmt: skip
    words, width = layers.head
    return [*found, Product("head", at_once, width, words, steps, right=True)]


def has_bf16() -> bool:
    """True if the processor has instructions for products of bf16."""
    return cpu_info.has_bf16_products(cpu_info.read_cpuinfo())


class _Prepared:
    """A product's tensors, at most `most` sets: what a step touches once lies as far away as it does there."""

    def __init__(self, product: Product, dtype: str, most: int = 8) -> None:
        import torch

        def make(rows: int, columns: int, transposed: bool) -> Any:
            shape = (product.batch, columns, rows) if transposed else (product.batch, rows, columns)
            tensor = torch.randn(shape).to(getattr(torch, dtype))
            tensor = tensor.transpose(1, 2) if transposed else tensor
            return tensor if product.batch > 1 else tensor[0]

        sets = min(product.copies, most)
        self.product, self.call = product, torch.bmm if product.batch > 1 else torch.mm
        self.lefts = make(product.m, product.k, product.left)
        self.rights = [make(product.k, product.n, product.right) for _ in range(sets)]
        self.out = make(product.m, product.n, False)

    def run(self, times: int) -> None:
        for index in range(times):
            self.call(self.lefts, self.rights[index % len(self.rights)], out=self.out)


def limit(turns: Turns, threads: int, steps: list[tuple[int, list[Product]]], dtype: str) -> None:
    """A side that does nothing but the products: `steps` are (tokens, products), again and again."""
    import torch

    torch.set_num_threads(threads)
    kept: dict[Product, _Prepared] = {}
    for _, products in steps:
        for product in products:
            kept.setdefault(product, _Prepared(product, dtype))
    turns.begin(operations=sum(p.operations for _, products in steps for p in products) / len(steps))
    for tokens, products in _cycle(steps):
        for product in products:
            kept[product].run(product.copies)
        turns.step(tokens)


def _cycle(steps: list[Any]) -> Iterator[Any]:
    while True:
        yield from steps


def measure_rates(threads: int, products: list[Product], rounds: int) -> list[tuple[Product, dict[str, float]]]:
    """Return the median rate of each product, operations per CPU second, by format; formats and products in turns."""
    import torch

    torch.set_num_threads(threads)
    formats = ["float32", *(["bfloat16"] if has_bf16() else [])]
    singles = sorted({product._replace(copies=1) for product in products}, key=lambda one: -one.operations)
    ready = {(one, name): _Prepared(one, name) for one in singles for name in formats}
    seconds: dict[Any, list[float]] = {key: [] for key in ready}
    for _ in range(rounds):
        for key, prepared in ready.items():
            seconds[key].append(_time_of(prepared.run))
    return [
        (one, {name: one.operations / statistics.median(seconds[one, name]) for name in formats}) for one in singles
    ]


def _time_of(run: Callable[[int], None]) -> float:
    run(1)
    start, calls = time.process_time(), 0
    while (spent := time.process_time() - start) < SECONDS:
        run(4)
        calls += 4
    return spent / calls
