"""Batches of documents through a tokenizer, here or on a Ray cluster: the entries and their order are the same.

The machine that calls reads the source and writes the shards, so that neither depends on who tokenises. Ray repeats a
batch whose worker or machine is lost (docs.ray.io, "Task Fault Tolerance").
"""

from __future__ import annotations

import functools
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from anabatic.core import extras, log, ray_address
from anabatic.core.errors import AnabaticError, Failure
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.chat.preference_pairs import PreferencePairEncoder
from anabatic.data.shards.encoders import ChatEncoder, TextEncoder
from anabatic.data.shards.writer import TYPECODES, DocumentCounts, EncodedEntry
from anabatic.data.tokenizer import hf_folder

if TYPE_CHECKING:
    from anabatic.data.vision.model_pictures import ModelPictures

_AHEAD = 2
"""Batches under way for each core of the cluster."""
_RETRIES = 3
"""Retries of a batch whose worker was lost."""
Batches = Iterable[list[Any]]
EncodedBatches = Iterator[Iterable[EncodedEntry]]


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a batch is tokenised; a machine of a cluster makes the encoder from it.

    Attributes:
        key: of the shards; the tokenizer of a key is loaded once in a process.
        tokenizer_folder: has the same path on every machine.
        is_chat: rows are conversations, `learning` and `seq_len` say what is kept of them.
        dtype: `uint16` or `uint32`.
        pictures: how the model wants its pictures; None: it sees none.
    """

    key: str
    tokenizer_folder: str
    is_chat: bool
    dtype: str
    seq_len: int | None
    learning: LossPolicy
    skip_bad: bool
    pictures: ModelPictures | None = None

    def make_encoder(self, counts: DocumentCounts) -> Callable[[list[Any]], Iterable[EncodedEntry]]:
        """Return the encoder, which counts in `counts` what it drops."""
        if not self.is_chat:
            return TextEncoder(load_text_tokenizer(self.key, self.tokenizer_folder))
        kind: Callable[..., ChatEncoder] = PreferencePairEncoder if self.learning.pairs else ChatEncoder
        return kind(
            _load_chat_tokenizer(self.key, self.tokenizer_folder),
            counts,
            seq_len=self.seq_len,
            learning=self.learning,
            skip_bad=self.skip_bad,
            pictures=self.pictures,
        )


@functools.lru_cache(1)
def load_text_tokenizer(key: str, folder: str) -> Any:
    """Return what `hf_folder.load_fast_tokenizer` does; again at once for the same key."""
    return hf_folder.load_fast_tokenizer(folder)


@functools.lru_cache(1)
def _load_chat_tokenizer(key: str, folder: str) -> Any:
    return hf_folder.load_tokenizer(folder)


def encode_here(settings: EncoderSettings, batches: Batches, counts: DocumentCounts) -> EncodedBatches:
    """Tokenise in this process, on all its cores."""
    return map(settings.make_encoder(counts), batches)


Encode = Callable[[EncoderSettings, Batches, DocumentCounts], EncodedBatches]
"""`encode_here`, or `RayEncoding.encode`."""


class RayEncoding:
    """Tokenises on the cores of a Ray cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._task = ray.remote(num_cpus=1, max_retries=_RETRIES)(encode_batch)
        cores = int(ray.cluster_resources().get("CPU", 1))
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        self._room = max(1, _AHEAD * cores)
        log.info(f"tokenising on Ray: {machines} machines, {cores} cores")

    def encode(self, settings: EncoderSettings, batches: Batches, counts: DocumentCounts) -> EncodedBatches:
        """Yield the entries of each batch, in order; `counts` receives what the tasks counted.

        Raises:
            DataError: what an encoder raised.
            Failure: a batch lost its worker again and again, or the cluster is gone.
        """
        pending: deque[Any] = deque()
        for batch in batches:
            pending.append(self._task.remote(settings, batch))
            if len(pending) >= self._room:
                yield self._receive(pending.popleft(), counts)
        while pending:
            yield self._receive(pending.popleft(), counts)

    def _receive(self, task: Any, counts: DocumentCounts) -> list[EncodedEntry]:
        exceptions = self._ray.exceptions
        try:
            entries, counted = self._ray.get(task)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, AnabaticError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            raise Failure(
                f"tokenising on Ray failed: {' '.join(str(error).split())[:300]}",
                "`ray status` shows which machines are left; start the same command again when they are back",
            ) from error
        counts.add(counted)
        return [EncodedEntry(*entry) for entry in entries]


def encode_batch(settings: EncoderSettings, batch: list[Any]) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Tokenise one batch on a machine of a cluster; return the entries, ids as bytes, and what was counted."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a task has one core
    counts = DocumentCounts()
    entries = settings.make_encoder(counts)(batch)
    typecode = TYPECODES[settings.dtype]
    packed = [(array(typecode, entry.ids).tobytes(), *entry[1:]) for entry in entries]
    return packed, asdict(counts)


@contextmanager
def connect_ray(address: str) -> Iterator[RayEncoding]:
    """Connect to a Ray cluster for the time of the block.

    Raises:
        ConfigError: ray is not installed, or there is no cluster.
    """
    os.environ.setdefault("RAY_COLOR_PREFIX", str(int(log.should_use_colour())))  # before ray prints lines of workers
    ray = extras.import_optional("ray", "engine ray", "on every machine")
    ray_address.require_head(address)
    try:
        ray.init(address=address, logging_level="ERROR", namespace="anabatic")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ray_address.make_connect_error(address, " ".join(str(error).split())[:300]) from error
    try:
        with redirect_stdout(sys.stderr):  # ray prints there what it has to say of workers
            yield RayEncoding(ray)
    finally:
        ray.shutdown()
