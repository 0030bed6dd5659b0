"""How fast is generation beside transformers on the same CPU?

    python benchmarks/serve.py [--rounds N] [--seconds S] [--threads N] [--requests N] [--only many,one,latency]
                               [--json FILE]

A random Qwen2 (8 layers, width 384, 19 M parameters, fp32), greedy. `many`: requests of mixed lengths (log-normal, most
short, a few long, as chat traffic is), 16 at a time:

- `engine`: ours; whoever is finished leaves, whoever waits joins.
- `generate`: transformers' `generate` in batches of 16 in the order of arrival, left padding; a batch lasts as long as
  its longest answer.
- `continuous`: transformers' own continuous batching (`generate_batch`), with room for 16 requests.

Only tokens that were asked for count. These sides run in processes of their own and take turns; ratios are medians over
turns. The engine always has somebody waiting; `generate` is given
batch after batch, and `continuous` all requests at once, again and again. Before the first turn every side answers the
same requests, and the answers are compared token by token.

`one`: a single request at a time, ours beside `generate`, in one process and in turns of one request; by CPU time.
`latency`: the first token at half load, and the gaps between tokens (`serve_latency.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serve_latency
from option_types import names_among, positive_int, positive_number
from paired import Turns, alternate, table

VOCABULARY = 16384
AT_ONCE = 16
LONGEST = 512
PEER = "generate"
ENGINE_STEPS = 40
"""Steps of the engine between two looks at the clock."""


def model_of(threads: int) -> Any:
    """The same random model in every process."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
        attn_implementation="sdpa",
    )
    return transformers.Qwen2ForCausalLM(config).eval()


def requests_of(count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each asks for."""
    rng = random.Random(seed)

    def length(median: float, low: int, high: int) -> int:
        return int(min(high, max(low, rng.lognormvariate(0, 0.9) * median)))

    return [
        ([rng.randrange(1, VOCABULARY) for _ in range(length(48, 4, LONGEST // 2))], length(40, 4, LONGEST // 2))
        for _ in range(count)
    ]


class Letters:
    """Stands for a tokenizer: no text is asked for."""

    eos_token_id = pad_token_id = bos_token_id = chat_template = None

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""


def engine(turns: Turns, threads: int, wanted: list[tuple[list[int], int]], at_once: int) -> None:
    """Ours."""
    import torch

    from anabatic.config.chat import Sampling
    from anabatic.infer.engine import Engine
    from anabatic.models.pretrained import prepare_model

    model = prepare_model(model_of(threads), torch.device("cpu"))
    ours = Engine(model, Letters(), max_batch=at_once, max_len=LONGEST)
    fresh = itertools.cycle(range(1, VOCABULARY))
    samplings = [Sampling(temperature=0.0, max_new_tokens=size) for _, size in wanted]
    first = [one.ids for one in ours.generate([prompt for prompt, _ in wanted[:at_once]], samplings[:at_once], [])]
    turns.begin(answers=first)
    rows = itertools.cycle(zip(wanted, samplings, strict=True))
    while True:
        before = ours.get_load().new_tokens
        for _ in range(ENGINE_STEPS):
            while ours.get_load().waiting < at_once:  # somebody always waits, as at a busy server
                (prompt, _), sampling = next(rows)
                ours.submit([ours.request([*prompt[:-1], next(fresh)], sampling, [])])  # no answer is known
            ours.step()
        ours.clear_prefix_cache()  # every prompt is read
        turns.step(ours.get_load().new_tokens - before)


def generate(turns: Turns, threads: int, wanted: list[tuple[list[int], int]], at_once: int) -> None:
    """transformers' batches with left padding."""
    import torch

    model = model_of(threads)

    def batch(some: list[tuple[list[int], int]]) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in some)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in some])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(size for _, size in some), do_sample=False, pad_token_id=0
        )
        return [row[width : width + size].tolist() for row, (_, size) in zip(out, some, strict=True)]

    turns.begin(answers=batch(wanted[:at_once]))
    parts = itertools.cycle(range(0, len(wanted), at_once))
    while True:
        start = next(parts)
        turns.step(sum(map(len, batch(wanted[start : start + at_once]))))


def continuous(turns: Turns, threads: int, wanted: list[tuple[list[int], int]], at_once: int) -> None:
    """transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.disable(logging.WARNING)
    model = model_of(threads)
    tokens = at_once * LONGEST
    settings = GenerationConfig(do_sample=False, max_new_tokens=LONGEST, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=tokens // 32,
        max_batch_tokens=LONGEST,
        max_requests_per_batch=at_once,
        use_async_batching=False,
        use_cuda_graph=False,
    )

    def answer(some: list[tuple[list[int], int]]) -> list[list[int]]:
        with model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=batching
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=size) for prompt, size in some]
            found: dict[str, list[int]] = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.error:
                    raise SystemExit(f"continuous batching failed: {result.error}")
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    turns.begin(answers=answer(wanted[:at_once]))
    while True:
        turns.step(sum(map(len, answer(wanted))))


def many(sides: dict[str, Any], args: argparse.Namespace, wanted: Any, at_once: int) -> dict[str, float]:
    """Run the sides, print how many answers are equal, and the table; return the engine's ratios."""
    tokens = sum(size for _, size in wanted)
    read = sum(len(prompt) for prompt, _ in wanted)
    print(f"{at_once} at a time: {len(wanted)} requests in turn, {read:,} tokens in, {tokens:,} out", flush=True)
    chosen = {name: (work, (args.threads, wanted, at_once)) for name, work in sides.items()}
    results = alternate(chosen, args.rounds, args.seconds, 0.0)
    expected = results[PEER].facts["answers"]
    for name, result in results.items():
        same = sum(a == b for a, b in zip(result.facts["answers"], expected, strict=True))
        print(f"  {name}: {same} of {len(expected)} answers are those of {PEER}, token by token")
    table(results, PEER)
    if "engine" not in results:
        return {}
    ours = results["engine"].rates("cpu")
    ratios = {
        f"over_{name}": statistics.median(a / b for a, b in zip(ours, result.rates("cpu"), strict=True))
        for name, result in results.items()
        if name != "engine"
    }
    print(
        "  engine over "
        + ", ".join(f"{name.removeprefix('over_')} {ratio:.2f}" for name, ratio in ratios.items())
        + " (CPU time, goals 5 and 2.5)"
    )
    return ratios


def one(args: argparse.Namespace, wanted: list[tuple[list[int], int]], engine: Any) -> dict[str, float]:
    """A request at a time, ours and theirs in turns; return the ratio of their CPU time to ours."""
    import torch

    from anabatic.config.chat import Sampling

    model = model_of(args.threads)

    def ours(prompt: list[int], size: int) -> list[int]:
        ids: list[int] = engine.generate([prompt], Sampling(temperature=0.0, max_new_tokens=size), [])[0].ids
        engine.clear_prefix_cache()
        return ids

    def theirs(prompt: list[int], size: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=size, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def seconds(side: Callable[[list[int], int], list[int]], prompt: list[int], size: int) -> float:
        start = time.process_time()
        side(prompt, size)
        return time.process_time() - start

    same = sum(ours(*some) == theirs(*some) for some in wanted)
    print(f"one at a time: {len(wanted)} requests, {same} answers equal token by token, {args.rounds} rounds in turns")
    ratios, spent = [], 0.0
    for _ in range(args.rounds):
        pairs = [(seconds(ours, *some), seconds(theirs, *some)) for some in wanted]
        ratios.append(sum(b for _, b in pairs) / sum(a for a, _ in pairs))
        spent += sum(a for a, _ in pairs)
    rate = args.rounds * sum(size for _, size in wanted) / spent
    ratio = statistics.median(ratios)
    print(
        f"  engine over generate {ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}), {rate:.0f} tokens/CPU s, goal 1.3"
    )
    return {"over_generate": ratio, "least": min(ratios), "most": max(ratios), "tokens_per_cpu_second": rate}


def resting(args: argparse.Namespace, at_once: int) -> Any:
    """An engine in this process."""
    import torch

    from anabatic.infer.engine import Engine
    from anabatic.models.pretrained import prepare_model

    return Engine(
        prepare_model(model_of(args.threads), torch.device("cpu")), Letters(), max_batch=at_once, max_len=LONGEST
    )


LOADS = ("many", "one", "latency")
SIDES = {"engine": engine, "generate": generate, "continuous": continuous}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive_int, default=5, help="turns of every side")
    parser.add_argument("--seconds", type=positive_number, default=1.0, help="length of a turn")
    parser.add_argument("--threads", type=positive_int, default=1, help="of torch, for every side")
    parser.add_argument("--requests", type=positive_int, default=32, help="different requests")
    parser.add_argument("--only", type=names_among(LOADS), default=list(LOADS), help=f"of {','.join(LOADS)}")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--sides", type=names_among(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}; for many")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    wanted = requests_of(args.requests)
    found: dict[str, Any] = {"threads": args.threads, "rounds": args.rounds, "requests": args.requests}
    if "many" in args.only:
        found["many"] = many({name: SIDES[name] for name in args.sides}, args, wanted, AT_ONCE)
    if "one" in args.only:
        found["one"] = one(args, wanted[:4], resting(args, 1))
    if "latency" in args.only:
        found["latency"] = serve_latency.measure(resting(args, AT_ONCE), wanted, max(1, args.rounds // 2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
