"""`anabatic bench tokenize`: text in memory through the tokenizer, and the whole way from a file to shards."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from anabatic.bench import environment_info, result_files, synthetic_data
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.config.bench import BenchTokenizeJob
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_count, format_size
from anabatic.core.progress import ProgressBar
from anabatic.data.readers import sources
from anabatic.data.shards import dataset_cache
from anabatic.data.tokenizer import hf_folder

_WORDS_PER_DOCUMENT = 500
"""Of a made-up document."""
_DOCUMENTS_PER_BATCH = 1000
"""Documents that are encoded together."""


def run(job: BenchTokenizeJob) -> int:
    """Measure as the job says; return the exit code.

    Raises:
        ConfigError, DataError: the tokenizer or the text cannot be used.
        Failure: the figures cannot be written.
    """
    load = result_files.prepare_output(job)
    out = Path(job.out).expanduser()
    folder = (
        Path(job.tokenizer).expanduser()
        if job.tokenizer
        else synthetic_data.write_synthetic_tokenizer(out / "tokenizer")
    )
    backend = hf_folder.load_fast_tokenizer(folder)
    with tempfile.TemporaryDirectory(dir=out, prefix=".text-") as temporary:
        named = job.data.train or [_write_synthetic_documents(Path(temporary) / "text.jsonl", int(job.mib * 2**20))]
        texts = _load_texts(job, named)
        text_bytes = sum(len(text.encode()) for text in texts)
        alone, built, tokens = [], [], 0
        with ProgressBar("repeats", job.warm_up + job.repeats) as bar:
            for number in range(job.warm_up + job.repeats):
                start = time.perf_counter()
                tokens = sum(
                    len(one.ids)
                    for at in range(0, len(texts), _DOCUMENTS_PER_BATCH)
                    for one in backend.encode_batch_fast(
                        texts[at : at + _DOCUMENTS_PER_BATCH], add_special_tokens=False
                    )
                )
                encoded = time.perf_counter()
                data = replace(job.data, train=named, valid=["none"], cache=str(Path(temporary) / f"cache-{number}"))
                sets = [dataset_cache.build_dataset(name, folder, data, "train") for name in named]
                if number >= job.warm_up:
                    alone.append(encoded - start)
                    built.append(time.perf_counter() - encoded)
                bar.update(number + 1)
        stored = sum(one.num_tokens for one in sets)
    where = environment_info.collect_environment(load)
    figures = [
        BenchMetric("tokenizer alone", "tokens/s", tuple(tokens / each for each in alone)),
        BenchMetric("tokenizer alone, text", "B/s", tuple(text_bytes / each for each in alone)),
        BenchMetric("from file to shards", "tokens/s", tuple(stored / each for each in built)),
        BenchMetric("from file to shards, text", "B/s", tuple(text_bytes / each for each in built)),
    ]
    what = f"{folder if job.tokenizer else 'made-up words'}, {backend.get_vocab_size():,} entries"
    ratio = text_bytes / max(tokens, 1)
    read = f"{format_size(text_bytes)} of text, {format_count(tokens)} tokens, {ratio:.2f} bytes a token"
    result = BenchResult(
        "tokenize", f"{what}; {read}", figures, asdict(job), where, notes=environment_info.caveat_notes(where)
    )
    result_files.write_results(job, result)
    return 0


def _write_synthetic_documents(file: Path, num_bytes: int) -> str:
    """Write made-up documents, and return the file's name."""
    words = synthetic_data.iter_words()
    with open(file, "w", encoding="utf-8") as opened:
        while opened.tell() < num_bytes:
            opened.write(json.dumps({"text": " ".join(islice(words, _WORDS_PER_DOCUMENT))}) + "\n")
    return str(file)


def _load_texts(job: BenchTokenizeJob, named: list[str]) -> list[str]:
    """Read the documents into memory; of conversations what is said."""
    found = list(_iter_texts(job, named))
    if not any(found):
        raise DataError(f"{', '.join(named)}: there is no text", "name files with text")
    return found


def _iter_texts(job: BenchTokenizeJob, named: list[str]) -> Iterator[str]:
    data = replace(job.data, train=named)
    for name in named:
        source = sources.parse_source(name)
        for document in sources.read_documents(source, data):
            if document.text is None and document.messages is None:
                raise ConfigError(f"{document.location} holds no text", "name files with text or conversations")
            yield document.text or "\n".join(str(one.get("content") or "") for one in document.messages or [])
