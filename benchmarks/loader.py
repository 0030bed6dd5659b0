"""How fast are batches made, and does memory stay flat when the corpus grows tenfold?

    python benchmarks/loader.py [MILLION_TOKENS]

Random corpora of MILLION_TOKENS and ten times as many are written, then read at several ranks' positions, in a process
each, with the reading done in the measured thread (as if nothing else overlapped with it).
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anabatic.data.batching.loader import Loader
from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.writer import EncodedEntry
from anabatic_testing.tiny_corpora import write_shard_set

SEQ_LEN, CAPACITY = 1024, 8192


def entries(kind: str, tokens: int, mean: int) -> Iterator[EncodedEntry]:
    rng = np.random.default_rng(0)
    pool = rng.integers(1, 60_000, 4 * mean).tolist()
    while tokens > 0:
        for length in rng.integers(mean // 2, mean * 3 // 2, 1000).tolist():
            tokens -= length
            yield EncodedEntry(pool[:length], b"\1" * length if kind == "chat" else None, length, True)


def measure(path: str, world_size: int, seconds: float) -> None:
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shards = ShardSet.open(path)
    tokens = batches = 0
    with Loader(
        [(shards, None)], seq_len=SEQ_LEN, micro_batch_tokens=CAPACITY, world_size=world_size, prefetch=1
    ) as loader:
        start = time.process_time()
        while time.process_time() - start < seconds:
            tokens += next(loader).num_tokens
            batches += 1
        speed = tokens / (time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{Path(path).name:24} ranks {world_size:3} {speed / 1e6:6.2f} M tokens/s and core, "
        f"{tokens / batches / CAPACITY:.1%} full, memory {base / 1024:.0f} -> {peak / 1024:.0f} MiB"
    )


def main() -> None:
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    with tempfile.TemporaryDirectory() as temporary:
        for kind, mean in (("text", 1000), ("text", 60), ("chat", 200)):
            for size in (1, 10):
                name = f"{kind}-{mean}-{millions * size:g}M"
                write_shard_set(Path(temporary) / name, kind, entries(kind, int(millions * size * 1e6), mean))
                for world_size in (1, 8) if size == 1 else (1,):
                    arguments = (str(Path(temporary) / name), world_size, 5.0)
                    process = multiprocessing.get_context("spawn").Process(target=measure, args=arguments)
                    process.start()
                    process.join()


if __name__ == "__main__":
    main()
