"""How long does the first token take at half load, and the next ones? A part of `serve.py`.

Requests come at random (Poisson) at half the rate that the engine can serve. The clock is the CPU time of this process,
which nobody else on the machine can stretch: when there is nothing to do, it is put forward to the next arrival. The
same prompts are also read alone, by an engine that does nothing else, in turns with the load.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from typing import Any

from anabatic.config.chat import Sampling
from anabatic.infer.engine import Engine

Wanted = list[tuple[list[int], int]]


def _requests(engine: Engine, wanted: Wanted) -> list[Any]:
    return [engine.request(prompt, Sampling(temperature=0.0, max_new_tokens=size), []) for prompt, size in wanted]


def capacity(engine: Engine, wanted: Wanted) -> float:
    """Requests a CPU second while somebody always waits."""
    engine.submit(_requests(engine, wanted))
    begun, start = engine.get_load().new_tokens, time.process_time()
    while engine.get_load().waiting:
        engine.step()
    rate = (engine.get_load().new_tokens - begun) / (time.process_time() - start)
    while engine.is_busy:
        engine.step()
    engine.clear_prefix_cache()
    return rate / statistics.mean(size for _, size in wanted)


def alone(engine: Engine, wanted: Wanted) -> list[float]:
    """CPU seconds from each prompt to its first token, one request at a time."""
    found = []
    for request in _requests(engine, wanted):
        start = time.process_time()
        engine.submit([request])
        while not request.ids:
            engine.step()
        found.append(time.process_time() - start)
        engine.cancel_requests([request])
        engine.clear_prefix_cache()
    return found


def at(rate: float, engine: Engine, wanted: Wanted, seed: int) -> tuple[list[float], list[float]]:
    """Serve requests that come at a rate; return the time to each first token, and all gaps between tokens."""
    rng = random.Random(seed)
    requests = deque(_requests(engine, wanted))
    order = list(requests)
    skipped, clock = 0.0, 0.0
    arrivals: dict[Any, float] = {}
    for request in order:
        clock += rng.expovariate(rate)
        arrivals[request] = clock
    last: dict[Any, float] = {}
    first: dict[Any, float] = {}
    gaps: list[float] = []
    start = time.process_time()
    while requests or engine.is_busy:
        now = time.process_time() - start + skipped
        if not engine.is_busy and arrivals[requests[0]] > now:
            skipped += arrivals[requests[0]] - now
            now = arrivals[requests[0]]
        while requests and arrivals[requests[0]] <= now:
            engine.submit([requests.popleft()])
        before = {request: len(request.ids) for request in arrivals if not request.finish_reason}
        engine.step()
        now = time.process_time() - start + skipped
        for request, count in before.items():
            if len(request.ids) == count:
                continue
            if request in first:
                gaps.append(now - last[request])
            else:
                first[request] = now - arrivals[request]
            last[request] = now
    engine.clear_prefix_cache()
    return [first[request] for request in order], gaps


def share(values: list[float], part: float) -> float:
    """The value below which a part of the values lies."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def measure(engine: Engine, wanted: Wanted, rounds: int) -> dict[str, float]:
    """Print and return the figures."""
    rate = statistics.median(capacity(engine, wanted) for _ in range(3))
    ratios, firsts, lone, gaps = [], [], [], []
    for turn in range(rounds):
        single = alone(engine, wanted)
        first, between = at(rate / 2, engine, wanted, turn)
        ratios.append(statistics.median(a / b for a, b in zip(first, single, strict=True)))
        firsts, lone, gaps = firsts + first, lone + single, gaps + between
    found = {
        "requests_per_cpu_second": rate,
        "first_token_ratio": statistics.median(ratios),
        "first_token_ratio_least": min(ratios),
        "first_token_ratio_most": max(ratios),
        "first_token_ms": 1e3 * statistics.median(firsts),
        "first_token_p99_ms": 1e3 * share(firsts, 0.99),
        "prefill_alone_ms": 1e3 * statistics.median(lone),
        "gap_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * share(gaps, 0.99),
    }
    print(f"half load: {rate / 2:.2f} of {rate:.2f} requests a CPU second, {len(wanted)} requests in each turn")
    print(
        f"  first token: {found['first_token_ms']:.1f} ms in the middle, {found['first_token_p99_ms']:.1f} p99;"
        f" prompt alone: {found['prefill_alone_ms']:.1f};"
        f" ratio {found['first_token_ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f}), goal below 1.5"
    )
    print(f"  between tokens: {found['gap_ms']:.1f} ms in the middle, {found['gap_p99_ms']:.1f} p99")
    return found
