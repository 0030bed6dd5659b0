"""What a model has answered before, kept by content: a run that was stopped goes on, and equal texts are never scored
twice by the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.config.chat import Sampling
from anabatic.core import jsonl
from anabatic.core.jsonl import JsonlWriter
from anabatic.core.paths import cannot_write
from anabatic.evals.trees import Text

WEIGHTS = ("*.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")


def fingerprint(folders: Sequence[Path], more: Sequence[str]) -> str:
    """Return a name for a model as it lies in its folders: of each file its name, size and time of writing.

    Args:
        more: what else its answers depend on, such as the format of numbers.
    """
    digest = hashlib.blake2b(json.dumps(list(more)).encode(), digest_size=12)
    for folder in folders:
        for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def key(tokens: Sequence[int] | np.ndarray, *more: Any) -> str:
    """Return the name of what is asked: tokens, and how."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=12)
    digest.update(json.dumps(more).encode())
    return digest.hexdigest()


def text_key(text: Text) -> str:
    """Return the name of a text to score."""
    return key(text.tokens, "score", text.scored)


def reply_key(prompt: Sequence[int], sampling: Sampling) -> str:
    """Return the name of a prompt that is answered by the likeliest tokens."""
    return key(prompt, "reply", sampling.max_new_tokens, sampling.stop)


def part_path(path: Path, rank: int) -> Path:
    """Return where another process keeps its answers until the one that writes `path` has them."""
    return path.with_suffix(f".{rank}{path.suffix}")


class Store:
    """Answers by key, in one file of JSON lines that is appended to as they come.

    Args:
        path: the file; None: nothing is kept beyond this run.
        read: take what it holds already.

    Raises:
        Failure: the file cannot be written.
    """

    def __init__(self, path: Path | None, read: bool = True) -> None:
        self._known: dict[str, Any] = {}
        self._writer: JsonlWriter | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            parts = sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))  # left by a run that was killed
            if not read:
                path.unlink(missing_ok=True)
            for row in jsonl.read(path):
                self._known |= row
            self._writer = JsonlWriter(path)
            for part in parts:
                for row in jsonl.read(part) if read else ():
                    self.put(row)
                part.unlink()
        except OSError as error:
            raise cannot_write(path, error, "choose another place with ANABATIC_CACHE") from error

    def get(self, name: str) -> Any:
        """Return what is known under a key, or None."""
        return self._known.get(name)

    def put(self, found: dict[str, Any]) -> None:
        """Keep answers; they are on disk when this returns."""
        self._known |= found
        if self._writer is not None and found:
            self._writer.write(found)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
