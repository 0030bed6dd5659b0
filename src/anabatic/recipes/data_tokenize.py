"""`anabatic data tokenize`: fill the cache of tokenised shards before a training reads it, here or on a Ray cluster."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from anabatic.config.data_commands import DataTokenizeJob
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.encoders import encode_here
from anabatic.data.shards.ray_encoding import connect_ray


def run(job: DataTokenizeJob) -> int:
    """Tokenise each source and print the folder of its shards; return the exit code.

    Raises:
        ConfigError, DataError: a source, a row, the tokenizer or the cluster cannot be used.
        Failure: the cache cannot be written, or machines of the cluster were lost too often.
    """
    assert job.tokenizer is not None
    folder = Path(job.tokenizer).expanduser()
    has_heldout = bool(job.data.valid) or job.data.valid_fraction > 0
    with nullcontext() if job.engine == "local" else connect_ray(job.address) as cluster:
        encode = encode_here if cluster is None else cluster.encode
        build = partial(dataset_cache.build_datasets, seq_len=job.seq_len, encode=encode)
        sets = build(job.inputs, folder, job.data, "train")
        if has_heldout:
            sets += build(job.data.valid or job.inputs, folder, job.data, "valid")
    for shards, _ in sets:
        sys.stdout.write(f"{shards.path}\n")
    return 0
