"""How long does it take to turn text into shards, compared with the tokenizer alone?

    python benchmarks/tokenization.py [MEGABYTES] [DOCUMENT_BYTES]
    python benchmarks/tokenization.py --machines N [MEGABYTES] [DOCUMENT_BYTES] [ROUNDS]

Text: the standard library's sources in documents of about DOCUMENT_BYTES, repeated up to MEGABYTES. Three measurements
on the same documents: `encode_batch` and `encode_batch_fast` of the Rust tokenizer on documents held in memory, results
thrown away; and all that `build` does, from the file to the synced folder. Each runs in its own process, so that
the peak of its memory is its own.

With `--machines N`, one process that builds alone and N processes that build together as machines of a job do, in
turns: each on a core of its own, with a cache that is empty. The shards are compared.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerTrainJob
from anabatic.data.readers import sources
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.builder_team import join_builder_team
from anabatic.data.tokenizer import bpe_training, hf_folder
from anabatic.parallel.world import World
from anabatic_testing.multiprocess import spawn_ranks

BATCH = 1000


def write_corpus(path: Path, num_bytes: int, document_bytes: int) -> None:
    text = "".join(each.text or "" for each in sources.read_documents(sources.parse_source("stdlib:"), Data()))
    written = number = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            start = number * document_bytes % (len(text) - document_bytes)
            document = f"{number}\n{text[start : start + document_bytes]}"
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
            number += 1


def tokenizer_alone(folder: Path, method: str) -> int:
    backend = hf_folder.load_fast_tokenizer(folder)
    encode = getattr(backend, method)
    documents = [json.loads(line)["text"] for line in open(folder / "corpus.jsonl", encoding="utf-8")]  # noqa: SIM115
    start = time.perf_counter()
    tokens = 0
    for at in range(0, len(documents), BATCH):
        tokens += sum(len(encoding) for encoding in encode(documents[at : at + BATCH], add_special_tokens=False))
    report(method, start, tokens)
    return tokens


def whole_build(folder: Path, _: str) -> int:
    start = time.perf_counter()
    data = Data(cache=str(folder), valid=["none"])
    made = dataset_cache.build_dataset(str(folder / "corpus.jsonl"), folder, data, "train")
    report("build", start, made.num_tokens)
    return made.num_tokens


def report(name: str, start: float, tokens: int) -> None:
    seconds = time.perf_counter() - start
    cpu = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:18} {seconds:7.2f} s ({cpu:.1f} s of CPU) {tokens / seconds / 1e6:7.2f} M tokens/s, "
        f"peak memory {peak:6.0f} MiB"
    )


def in_own_process(work: Callable[[Path, str], int], folder: Path, name: str) -> float:
    start = time.perf_counter()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(folder, name))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
    return time.perf_counter() - start


def build_as_machine(folder: Path, cache: Path) -> None:
    """Build on one core; write down seconds of wall and of CPU since the ranks have met."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = "0"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")
    data = Data(cache=str(cache), valid=["none"])
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    with join_builder_team(World(rank, size), data.cache) as team:
        made = dataset_cache.build_dataset(str(folder / "corpus.jsonl"), folder, data, "train", team=team)
    told = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, "tokens": made.num_tokens}
    (cache / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def compare_machines(folder: Path, machines: int, rounds: int) -> None:
    for _ in range(rounds):
        hashes = set()
        for number in (1, machines):
            cache = folder / f"cache-{number}"
            cache.mkdir()
            spawn_ranks(build_as_machine, number, folder, cache)
            told = [json.loads((cache / f"{rank}.json").read_text()) for rank in range(number)]
            shards = sorted(path for path in (cache / "shards").rglob("*") if path.is_file())
            hashes.add(hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest())
            seconds, cpu = max(one["seconds"] for one in told), [one["cpu"] for one in told]
            print(
                f"{number} machines {seconds:7.2f} s ({sum(cpu):.1f} s of CPU, {max(cpu):.1f} on the busiest)"
                f" {told[0]['tokens'] / seconds / 1e6:7.2f} M tokens/s"
            )
            shutil.rmtree(cache)
        if len(hashes) > 1:
            raise SystemExit("the shards differ")


def main() -> None:
    words = sys.argv[1:]
    machines = int(words[1]) if words[:1] == ["--machines"] else 0
    numbers = words[2:] if machines else words
    megabytes = float(numbers[0]) if numbers else 100.0
    document_bytes = int(numbers[1]) if len(numbers) > 1 else 4000
    rounds = int(numbers[2]) if len(numbers) > 2 else 3
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bpe_training.train_tokenizer(TokenizerTrainJob(out=temporary, vocab_size=16384, data=Data(train=["stdlib:"])))
        write_corpus(folder / "corpus.jsonl", int(megabytes * 1e6), document_bytes)
        print(f"{megabytes:g} MB of text in documents of {document_bytes} bytes")
        if machines:
            compare_machines(folder, machines, rounds)
            return
        for name in ("encode_batch", "encode_batch_fast"):
            in_own_process(tokenizer_alone, folder, name)
        in_own_process(whole_build, folder, "build")


if __name__ == "__main__":
    main()
