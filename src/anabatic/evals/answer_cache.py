"""Keep a model's answers by content: a stopped run continues, and equal texts are never scored
twice by the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anabatic.config.chat import Sampling
from anabatic.core import json_reader
from anabatic.core.json_reader import JsonlWriter
from anabatic.core.paths import make_write_error
from anabatic.data.vision.video_files import split_source
from anabatic.evals.prefix_trees import ScoredText

if TYPE_CHECKING:
    from anabatic.data.vision.picture_tensors import PictureGrid

FINGERPRINT_FILES = ("*.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json")


def fingerprint_model(folders: Sequence[Path], more: Sequence[str]) -> str:
    """Return a name for a model as it lies in its folders: of each file its name, size and time of writing.

    Args:
        more: what else its answers depend on, such as the format of numbers.
    """
    digest = hashlib.blake2b(json.dumps(list(more)).encode(), digest_size=12)
    for folder in folders:
        for path in sorted(path for pattern in FINGERPRINT_FILES for path in folder.glob(pattern)):
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def make_key(tokens: Sequence[int] | np.ndarray, *more: Any) -> str:
    """Return the name of what is asked: tokens, and how."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=12)
    digest.update(json.dumps(more).encode())
    return digest.hexdigest()


def make_text_key(text: ScoredText) -> str:
    """Return the name of a text to score."""
    return make_key(text.tokens, "score", text.num_scored)


class EvalPrompt(NamedTuple):
    """A prompt that is answered.

    Attributes:
        pictures: those in it, with the rows and columns of their patches.
    """

    ids: list[int]
    pictures: Sequence[PictureGrid] = ()


def make_reply_key(prompt: EvalPrompt, sampling: Sampling) -> str:
    """Return the name of a prompt that is answered by the likeliest tokens."""
    shown = [[*(grid if grid.frames else grid[:3]), _describe_files(grid.source)] for grid in prompt.pictures]
    return make_key(prompt.ids, "reply", sampling.max_new_tokens, sampling.stop, *([shown] if shown else []))


def _describe_files(source: str) -> list[int]:
    """Return sizes and times of writing of a picture's files, which may change; of a data URI nothing."""
    value = split_source(source)
    stats = [Path(file).stat() for file in ([value] if isinstance(value, str) else value) if file[:5] != "data:"]
    return [each for stat in stats for each in (stat.st_size, stat.st_mtime_ns)]


def rank_cache_path(path: Path, rank: int) -> Path:
    """Return where another process keeps its answers until the one that writes `path` has them."""
    return path.with_suffix(f".{rank}{path.suffix}")


class AnswerCache:
    """Answers by key, in one file of JSON lines that is appended to as they come.

    Args:
        path: the file; None: nothing is kept beyond this run.
        read: take what it holds already.

    Raises:
        Failure: the file cannot be written.
    """

    def __init__(self, path: Path | None, read: bool = True) -> None:
        self._answers: dict[str, Any] = {}
        self._writer: JsonlWriter | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            parts = sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))  # left by a run that was killed
            if not read:
                path.unlink(missing_ok=True)
            for row in json_reader.read_json_lines(path):
                self._answers |= row
            self._writer = JsonlWriter(path)
            for part in parts:
                for row in json_reader.read_json_lines(part) if read else ():
                    self.add_answers(row)
                part.unlink()
        except OSError as error:
            raise make_write_error(path, error, "choose another place with ANABATIC_CACHE") from error

    def get_answer(self, name: str) -> Any:
        """Return what is known under a key, or None."""
        return self._answers.get(name)

    def add_answers(self, found: dict[str, Any]) -> None:
        """Keep answers; they are on disk when this returns."""
        self._answers |= found
        if self._writer is not None and found:
            self._writer.write(found)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
