"""How long does it take to turn text into shards, compared with the tokenizer alone?

    python benchmarks/tokenization.py [MEGABYTES] [DOCUMENT_BYTES]

Text: the standard library's sources in documents of about DOCUMENT_BYTES, repeated up to MEGABYTES. Three measurements
on the same documents: `encode_batch` and `encode_batch_fast` of the Rust tokenizer on documents held in memory, results
thrown away; and all that `build` does, from the file to the synced folder. Each runs in its own process, so that
the peak of its memory is its own.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from anabatic.config.sections.common import Data
from anabatic.config.tokenizer import TokenizerTrainJob
from anabatic.data.readers import sources
from anabatic.data.shards import dataset_cache
from anabatic.data.tokenizer import bpe_training, hf_folder

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


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0
    document_bytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bpe_training.train_tokenizer(TokenizerTrainJob(out=temporary, vocab_size=16384, data=Data(train=["stdlib:"])))
        write_corpus(folder / "corpus.jsonl", int(megabytes * 1e6), document_bytes)
        print(f"{megabytes:g} MB of text in documents of {document_bytes} bytes")
        for name in ("encode_batch", "encode_batch_fast"):
            in_own_process(tokenizer_alone, folder, name)
        in_own_process(whole_build, folder, "build")


if __name__ == "__main__":
    main()
