"""How near to the processor's limit are ours and the others, and where does the rest of the time go?

    python benchmarks/roofline.py [--jobs pretrain,sft,lora,generation] [--nanochat CHECKOUT] [--rounds N]
                                  [--seconds S] [--parts rates,sides,operators] [--json FILE]

The limit of a job is the time of its matrix products alone (`roofline_limit.py`), fp32, one thread. It is one more side
that takes turns with ours and the peers, in processes of their own, by CPU time; so a share of the limit is the median
of ratios of like turns. Where the processor has instructions for bf16, the limit in bf16 and the sides that train in it
are there too; their shares are of the fp32 limit like all others, which they may exceed.

Printed for every job: the rate of each product; the sides, their tokens per CPU second, their share of the limit, and
ours over each; and the share of each operator group in the time of a step, from torch's profiler in a run by itself.

The set-ups are those of `pretrain.py`, `pretrain_nanochat.py`, `sft.py` and `serve.py`. nanochat has other layers, so
its share is of the limit of its own products.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pretrain
import pretrain_nanochat
import serve
import sft
from option_types import names_among, nanochat_checkout, positive_int, positive_number
from paired import Result, alternate, in_own_process
from roofline_limit import (
    Layers,
    Product,
    Shape,
    has_bf16,
    layers_of,
    limit,
    measure_rates,
    products_of_a_step,
    products_of_answers,
)
from roofline_profile import GROUPS, profile

Side = tuple[Callable[..., None], tuple[Any, ...]]
LIMIT, LIMIT_BF16 = "limit, fp32", "limit, bf16"
BATCHES = 6
"""Batches whose products make the limit."""


@dataclass
class Job:
    """The sides of a comparison.

    Attributes:
        steps: (tokens, products) of the limit's steps.
        others: name of a side -> steps of the limit of its own model.
    """

    ours: dict[str, Side]
    peers: dict[str, Side]
    steps: list[tuple[int, list[Product]]]
    others: dict[str, list[tuple[int, list[Product]]]] = field(default_factory=dict)


def shapes_of(shard: Any, seq_len: int, tokens: int) -> list[Shape]:
    """The first batches that training reads."""
    from anabatic.data.batching.loader import Loader

    found = []
    with Loader([(shard, None)], seq_len=seq_len, micro_batch_tokens=tokens) as loader:
        for _ in range(BATCHES):
            batch = next(loader)
            borders = batch.cu_seqlens
            lengths = [
                end - start for start, end in zip(borders, borders[1:], strict=False) if start < batch.num_tokens
            ]
            found.append(Shape(batch.num_tokens, batch.num_targets, tuple(lengths)))
    return found


def _write_steps(file: Path, make: Callable[..., list[tuple[int, list[Product]]]], arguments: tuple[Any, ...]) -> None:
    file.write_text(json.dumps(make(*arguments)), encoding="utf-8")


def read_steps(
    folder: Path, make: Callable[..., list[tuple[int, list[Product]]]], *arguments: Any
) -> list[tuple[int, list[Product]]]:
    """Call `make` in a process of its own, so that nothing of torch is loaded here."""
    file = folder / "steps.json"
    in_own_process(_write_steps, file, make, arguments)
    steps = json.loads(file.read_text(encoding="utf-8"))
    return [(tokens, [Product(*product) for product in products]) for tokens, products in steps]


def _training_steps(
    model: Path, text: Path, seq_len: int, tokens: int, rank: int, answers: bool
) -> list[tuple[int, list[Product]]]:
    import torch

    from anabatic.config.sections.common import Data
    from anabatic.data.chat.loss_mask import LossPolicy
    from anabatic.data.shards import dataset_cache
    from anabatic.models.pretrained import build_meta_causal_lm

    layers = layers_of(build_meta_causal_lm(model, torch.float32), rank)
    data = Data(cache=str(text.parent / "cache" if answers else text.parent), valid=["none"])
    options: dict[str, Any] = {"seq_len": seq_len, "learning": LossPolicy()} if answers else {}
    shard = dataset_cache.build_dataset(str(text), model, data, "train", **options)
    return [(shape.tokens, products_of_a_step(layers, shape)) for shape in shapes_of(shard, seq_len, tokens)]


def _nanochat_steps(checkout: str, vocabulary: int) -> list[tuple[int, list[Product]]]:
    import sys

    import torch

    sys.path.insert(0, checkout)
    shape = pretrain_nanochat.SHAPES[vocabulary]
    with torch.device("meta"):
        model = pretrain_nanochat.nanochat_model(shape)
    linears: dict[tuple[int, int], int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and min(module.weight.shape) >= shape.width:
            key = (module.out_features, module.in_features)
            linears[key] = linears.get(key, 0) + 1
    head = (vocabulary, shape.width)
    layers = Layers(linears, head, pretrain_nanochat.DEPTH, shape.heads, shape.width // shape.heads)
    tokens = pretrain.BATCH_TOKENS
    step = Shape(tokens, tokens, (shape.seq_len,) * (tokens // shape.seq_len))
    return [(tokens, products_of_a_step(layers, step))]


def pretraining(folder: Path, options: argparse.Namespace) -> Job:
    """The demo's model on the standard library's sources; or, with a checkout, beside nanochat."""
    if options.nanochat:
        return beside_nanochat(folder, options)
    case = "demo/sources"
    in_own_process(pretrain.prepare, folder, [case])
    what = pretrain.task(folder, case)
    steps = read_steps(folder, _training_steps, what.folder, what.text, what.seq_len, pretrain.BATCH_TOKENS, 0, False)
    ours: dict[str, Side] = {"anabatic, Muon": (pretrain.ours, (what, "muon"))}
    if has_bf16():
        ours["anabatic, Muon, bf16"] = (pretrain.ours, (what, "muon", False, "bf16"))
    return Job(ours, {"Trainer": (pretrain.trainer, (what,))}, steps)


def beside_nanochat(folder: Path, options: argparse.Namespace) -> Job:
    """The smaller of its two models, and ours with as many parameters altogether."""
    vocabulary = min(pretrain_nanochat.SHAPES)
    in_own_process(pretrain_nanochat.prepare, folder, options.nanochat, [vocabulary])
    text, seq_len = folder / "sources.jsonl", pretrain_nanochat.SHAPES[vocabulary].seq_len
    what = pretrain.Task(folder / f"{vocabulary}-total", text, seq_len)
    peer = (what, options.nanochat, vocabulary)
    ours: dict[str, Side] = {"anabatic, Muon": (pretrain.ours, (what, "muon"))}
    if has_bf16():
        ours["anabatic, Muon, bf16"] = (pretrain.ours, (what, "muon", False, "bf16"))
    peers: dict[str, Side] = {
        "nanochat, compiled": (pretrain_nanochat.nanochat, (*peer, True)),
        "nanochat, eager": (pretrain_nanochat.nanochat, (*peer, False)),
    }
    if has_bf16():
        peers["nanochat, compiled, bf16"] = (pretrain_nanochat.nanochat, (*peer, True, "bfloat16"))
    steps = read_steps(folder, _training_steps, what.folder, text, seq_len, pretrain.BATCH_TOKENS, 0, False)
    own = read_steps(folder, _nanochat_steps, options.nanochat, vocabulary)
    return Job(ours, peers, steps, dict.fromkeys(peers, own))


def fine_tuning(folder: Path, lora: bool) -> Job:
    """`sft.py`'s rows and model."""
    in_own_process(sft.prepare, folder, ["lora"])
    task = sft.Task(folder / f"model-{sft.CASES['lora'][0]}", folder / "rows.json", lora, 1)
    rank = sft.RANK if lora else 0
    steps = read_steps(folder, _training_steps, task.model, task.rows, sft.CUTOFF, sft.BATCH_TOKENS, rank, True)
    ours: dict[str, Side] = {"anabatic": (sft.ours, (task, True))}
    peers: dict[str, Side] = {
        "Trainer": (sft.trainer, (task, False)),
        "Trainer, like lengths": (sft.trainer, (task, True)),
    }
    if has_bf16():
        half = replace(task, dtype="bf16")
        ours["anabatic, bf16"] = (sft.ours, (half, True))
        peers["Trainer, like lengths, bf16"] = (sft.trainer, (half, True))
    return Job(ours, peers, steps)


def _answer_steps(wanted: list[tuple[list[int], int]], at_once: int) -> list[tuple[int, list[Product]]]:
    layers = layers_of(serve.model_of(1))
    return [(sum(size for _, size in wanted), products_of_answers(layers, wanted, at_once))]


def generation(folder: Path) -> Job:
    """`serve.py`'s 16 requests at a time."""
    wanted = serve.requests_of(32)
    arguments = (1, wanted, serve.AT_ONCE)
    peers: dict[str, Side] = {"generate": (serve.generate, arguments), "continuous": (serve.continuous, arguments)}
    steps = read_steps(folder, _answer_steps, wanted, serve.AT_ONCE)
    return Job({"anabatic": (serve.engine, arguments)}, peers, steps)


def print_rates(steps: list[tuple[int, list[Product]]], rounds: int) -> list[dict[str, Any]]:
    """Measure and print the rates of the largest products of the first step."""
    by_work = sorted(steps[0][1], key=lambda product: -product.operations)
    rows = measure_rates(1, list(dict.fromkeys(by_work))[:12], rounds)
    print(f"  {'product':22} {'shape':>22} {'fp32 GFLOP/s':>13} {'bf16':>7}")
    for one, rates in rows:
        shape = f"{one.m} x {one.k} x {one.n}" + (f", {one.batch}" if one.batch > 1 else "")
        half = f"{rates['bfloat16'] / 1e9:7.0f}" if "bfloat16" in rates else f"{'-':>7}"
        print(f"  {one.what:22} {shape:>22} {rates['float32'] / 1e9:13.0f} {half}", flush=True)
    return [{"what": one.what, "shape": one[1:4], "batch": one.batch, **rates} for one, rates in rows]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def show(ratio: dict[str, float]) -> str:
    """Write a spread as `median (least-most)`."""
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['most']:.2f})"


def _ratios(mine: Result, other: Result) -> list[float]:
    return [a / b for a, b in zip(mine.rates("cpu"), other.rates("cpu"), strict=True)]


def measure(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Run the sides in turns and print their shares."""
    limits: dict[str, Side] = {LIMIT: (limit, (1, job.steps, "float32"))}
    if has_bf16():
        limits[LIMIT_BF16] = (limit, (1, job.steps, "bfloat16"))
    own: dict[str, str] = {}
    if job.others:  # all of one model
        theirs, steps = next(iter(job.others.items()))
        limits[f"{LIMIT}, {theirs.split(',')[0]}"] = (limit, (1, steps, "float32"))
        own = dict.fromkeys(job.others, f"{LIMIT}, {theirs.split(',')[0]}")
    sides = {**limits, **job.ours, **job.peers}
    results = alternate(sides, options.rounds, options.seconds, warm_up=2 * options.seconds)
    heads = " ".join(f"{name + ' over it':>28}" for name in job.ours)
    print(f"  {'':34} {'tokens/CPU s':>12} {'share of the limit':>18} {heads}")
    found: dict[str, Any] = {}
    for name, result in results.items():
        share = spread(_ratios(result, results[own.get(name, LIMIT)]))
        over = {mine: spread(_ratios(results[mine], result)) for mine in job.ours}
        found[name] = {"tokens_per_cpu_second": statistics.median(result.rates("cpu")), "share": share, "ours": over}
        print(
            f"  {name:34} {found[name]['tokens_per_cpu_second']:12,.0f} {show(share):>18} "
            + " ".join(f"{show(ratio):>28}" for ratio in over.values()),
            flush=True,
        )
    return found


def print_groups(job: Job) -> dict[str, dict[str, float]]:
    """Profile every side by itself and print the shares of the operator groups."""
    print(f"  {'':34} " + " ".join(f"{group:>14}" for group in GROUPS))
    found = {}
    for name, (work, arguments) in {**job.ours, **job.peers}.items():
        found[name] = profile(work, arguments)
        print(f"  {name:34} " + " ".join(f"{share:14.1%}" for share in found[name].values()), flush=True)
    return found


JOBS = ("pretrain", "sft", "lora", "generation")
PARTS = ("rates", "sides", "operators")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=names_among(JOBS), default=list(JOBS), help=f"of {','.join(JOBS)}")
    parser.add_argument("--nanochat", type=nanochat_checkout, help="checkout of nanochat")
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seconds", type=positive_number, default=2.0, help="length of a turn")
    parser.add_argument(
        "--parts",
        type=names_among(PARTS),
        default=list(PARTS),
        help=f"what is printed of every job, of {','.join(PARTS)}",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    makers: dict[str, Callable[[Path], Job]] = {
        "pretrain": lambda folder: pretraining(folder, options),
        "sft": lambda folder: fine_tuning(folder, lora=False),
        "lora": lambda folder: fine_tuning(folder, lora=True),
        "generation": generation,
    }
    found: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds}
    for name in options.jobs:
        with tempfile.TemporaryDirectory() as temporary:
            job = makers[name](Path(temporary))
            print(f"{name}: one thread, load {os.getloadavg()[0]:.1f}", flush=True)
            parts: dict[str, Callable[[], Any]] = {
                "rates": functools.partial(print_rates, job.steps, options.rounds),
                "sides": functools.partial(measure, job, options),
                "operators": functools.partial(print_groups, job),
            }
            found[name] = {part: make() for part, make in parts.items() if part in options.parts}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
