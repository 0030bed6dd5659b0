"""Rows of models that are not packed, as the model's own processor in transformers makes them, picture by picture.

The processor says what text it writes for each picture, so that what is learned is known without knowing its family.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch, CollateFn, TokenSegment, collate_packed
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossTurns
from anabatic.data.readers.document import SKIP_HINT, Message
from anabatic.data.tokenizer import hf_folder
from anabatic.data.vision.picture_batch import ENCODING
from anabatic.data.vision.picture_files import load_picture, make_name
from anabatic.data.vision.row_objects import OBJECTS
from anabatic.data.vision.row_pictures import TAG, place_pictures
from anabatic.data.vision.rule_files import PREPROCESSOR_FILE, PROCESSOR_FILE
from anabatic.data.vision.video_files import is_video

_PROBE = "\ue0f6\ue0f7"
"""Private-use characters, which no template writes."""
_AS_PARTS = (
    "{%- set split = namespace(turns=[], parts=[]) -%}{%- for turn in messages -%}{%- if turn.content is string -%}"
    "{%- set split.parts = [] -%}{%- for piece in turn.content.split('<image>') -%}"
    "{%- if not loop.first -%}{%- set split.parts = split.parts + [{'type': 'image'}] -%}{%- endif -%}"
    "{%- if piece or turn.content == '' -%}"
    "{%- set split.parts = split.parts + [{'type': 'text', 'text': piece}] -%}{%- endif -%}{%- endfor -%}"
    "{%- set split.turns = split.turns + [dict(turn, content=split.parts)] -%}{%- else -%}"
    "{%- set split.turns = split.turns + [turn] -%}{%- endif -%}{%- endfor -%}{%- set messages = split.turns -%}"
)
"""Beginning of a template that is given text with tags where it wants parts."""
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OSError, NotImplementedError)
"""Errors that processors raise for input they do not accept; each becomes a `DataError` that names the row."""


@dataclass(frozen=True)
class ProcessorRules:
    """A model's own processor: its pictures are what that makes of them.

    Attributes:
        folder: with the processor's files; tokenizer_folder: with those of the tokenizer.
        digest: of the processor's files.
    """

    folder: str
    tokenizer_folder: str
    digest: str


def read_processor_rules(folder: Path, tokenizer_folder: Path) -> ProcessorRules:
    """Return the processor of a model folder, which is loaded once to find out whether that is possible.

    Raises:
        DataError: it cannot be loaded.
    """
    texts = [(folder / name).read_bytes() for name in (PREPROCESSOR_FILE, PROCESSOR_FILE) if (folder / name).is_file()]
    if not texts:
        raise DataError(
            f"{folder} has no {PREPROCESSOR_FILE}, which says what the model's pictures are like",
            "copy all files of the model, not its weights alone",
        )
    rules = ProcessorRules(str(folder), str(tokenizer_folder), hashlib.blake2b(b"\n".join(texts)).hexdigest()[:32])
    load_processor(rules)
    return rules


@functools.lru_cache(1)
def load_processor(rules: ProcessorRules) -> Any:
    """Return the processor of transformers, built of the parts that need no torchvision.

    Raises:
        DataError: it cannot be built.
    """
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any
    folder = Path(rules.folder)
    tokenizer = hf_folder.load_tokenizer(rules.tokenizer_folder)
    try:
        kind = _find_class(folder)
        if kind is None:
            kind = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
        values, _ = kind.get_processor_dict(folder, local_files_only=True)
        # Parts for video and sound may need torchvision; rows with either are refused before.
        bare: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, *_: None})
        made: dict[str, Any] = {"tokenizer": tokenizer}
        if "image_processor" in kind.get_attributes():
            made["image_processor"] = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        parts = [made.get(name) for name in kind.get_attributes()]
        return bare.from_args_and_dict(parts, values)
    except (ImportError, *_FAILURES) as error:
        what = " ".join(str(error).split())[:300]
        hint = "pip install torchvision" if "torchvision" in what else "copy all files of the model again"
        raise DataError(f"{folder}: the processor cannot be built: {what or type(error).__name__}", hint) from error


def _find_class(folder: Path) -> Any:
    """Return the class that the files name; None: they name none that transformers has."""
    import transformers

    for name in (PROCESSOR_FILE, PREPROCESSOR_FILE, "tokenizer_config.json"):
        if (folder / name).is_file():
            values = json_reader.read_json_file(folder / name)
            named = values.get("processor_class") if isinstance(values, dict) else None
            if isinstance(named, str) and named.endswith("Processor") and hasattr(transformers, named):
                return getattr(transformers, named)
    return None


class ProcessorRenderer:
    """Renders conversations of text and pictures by a model's own processor; as `PictureRenderer`.

    Args:
        limit: tokens of a conversation with pictures at most; None: any number.
    """

    def __init__(self, tokenizer: Any, rules: ProcessorRules, limit: int | None) -> None:
        self._processor, self._limit = load_processor(rules), limit
        self._tokenizer, self._picture_text = _make_template_tokenizer(tokenizer, self._processor)

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        pictures: Sequence[tuple[str, ...]],
        names: Sequence[str],
        tools: Sequence[list[dict[str, Any]] | None],
        turns: LossTurns,
    ) -> list[rendering.RenderedConversation]:
        """Return the conversations, with what the processor writes for each picture.

        Raises:
            DataError: a conversation or a picture cannot be used.
        """
        try:
            rows = zip(conversations, pictures, names, strict=True)
            placed = [self._write_tags(given, shown, name) for given, shown, name in rows]
            rendered = rendering.render_conversations(placed, self._tokenizer, names=names, tools=tools, turns=turns)
            return [self._expand(*each) for each in zip(rendered, pictures, names, strict=True)]
        except DataError as error:
            hint = error.hint if SKIP_HINT in error.hint else f"{error.hint}, {SKIP_HINT}"
            raise DataError(str(error), hint) from error

    def _write_tags(self, turns: Sequence[Message], pictures: Sequence[str], name: str) -> list[dict[str, Any]]:
        if any(is_video(one) or one.startswith(OBJECTS) for one in pictures):
            raise DataError(
                f"{name}: the row has videos or objects, which {type(self._processor).__name__} is not given here",
                "show frames as pictures, and write boxes into the text",
            )
        return place_pictures(turns, pictures, name, [self._picture_text] * len(pictures))[0]

    def _expand(
        self, rendered: rendering.RenderedConversation, pictures: Sequence[str], name: str
    ) -> rendering.RenderedConversation:
        if not pictures:
            if np.isin(rendered.ids, [one for one in self._processor.image_token_ids if one is not None]).any():
                raise DataError(f"{name}: tokens of pictures in the text, and no pictures", f"write {TAG} alone")
            return rendered
        text, inputs = rendered.text, run_processor(self._processor, rendered.text, pictures, name)
        found = inputs.get("text_replacement_offsets")
        if not found or len(found[0]) != len(pictures):
            raise DataError(
                f"{name}: {type(self._processor).__name__} does not say which tokens are those of the pictures",
                "use another model",
            )
        whole, learned, is_picture = "", [], []
        at, before = 0, _mark_learned_characters(rendered)
        for one in sorted(found[0], key=lambda one: one["span"]):
            start, stop = one["span"]
            whole += text[at:start] + one["replacement"]
            learned += [before[at:start], np.zeros(len(one["replacement"]), bool)]
            is_picture += [np.zeros(start - at, bool), np.ones(len(one["replacement"]), bool)]
            at = stop
        whole += text[at:]
        marks = np.concatenate((*learned, before[at:])), np.concatenate((*is_picture, np.zeros(len(text) - at, bool)))
        ids = inputs["input_ids"][0].numpy()
        encoding = self._tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False)
        if ids.tolist() != encoding.ids:
            raise DataError(
                f"{name}: {type(self._processor).__name__} makes other tokens of a row than its tokenizer",
                "use another model",
            )
        if self._limit is not None and len(ids) > self._limit:
            raise DataError(
                f"{name}: {len(ids):,} tokens with those of {len(pictures)} pictures; at most {self._limit:,} fit"
                " (batch.seq_len), and rows with pictures are not cut",
                "raise batch.seq_len",
            )
        return _build_expanded(rendered, whole, encoding.offsets, ids, marks, pack_row(rendered.text, pictures))


def _mark_learned_characters(rendered: rendering.RenderedConversation) -> np.ndarray:
    """Return which characters of the text belong to target tokens, bool `[characters]`."""
    learned = np.zeros(len(rendered.text), bool)
    starts = [0, *rendered.token_ends]
    for start, stop, mark in zip(starts, rendered.token_ends, rendered.mask.tolist(), strict=False):
        learned[start:stop] = mark
    return learned


def _build_expanded(
    rendered: rendering.RenderedConversation,
    text: str,
    offsets: Sequence[tuple[int, int]],
    ids: np.ndarray,
    marks: tuple[np.ndarray, np.ndarray],
    pictures: bytes,
) -> rendering.RenderedConversation:
    """Return a conversation with its pictures' tokens.

    Args:
        marks: which characters of `text` are learned, and which are pictures'.
    """
    learned, is_picture = (np.asarray([bool(one[start:stop].any()) for start, stop in offsets]) for one in marks)
    special = np.isin(ids, rendered.ids[rendered.special_tokens_mask]) | is_picture
    ends = np.maximum.accumulate(np.asarray([stop for _, stop in offsets], dtype=np.int64)).tolist()
    mask = (learned & ~is_picture).astype(np.uint8)
    return rendering.RenderedConversation(ids, mask, text, ends, special, pictures, is_picture)


def run_processor(processor: Any, text: str, pictures: Sequence[str], name: str) -> Mapping[str, Any]:
    """Return what a processor makes of a conversation: its tokens with those of the pictures, and what the tower reads.

    Raises:
        DataError: a picture cannot be read, or the processor refuses the row; `name` says which.
    """
    try:
        images = [load_picture(one) for one in pictures]
    except DataError as error:
        raise DataError(f"{name}: {error}", error.hint) from error
    try:
        made: Mapping[str, Any] = processor(
            text=[text],
            images=images,
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            return_tensors="pt",
        )
    except _FAILURES as error:
        shown = ", ".join(map(make_name, pictures[:2]))
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{name}: {type(processor).__name__} refuses the row with {shown}: {what}", "change the row"
        ) from error
    return made


def pack_row(text: str, pictures: Sequence[str]) -> bytes:
    """Return a row with pictures as a shard keeps it, in one line: the processor is asked again when it is trained."""
    row = {"text": text, "pictures": [(one, 1, 1) for one in pictures]}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(*ENCODING)


def _make_template_tokenizer(tokenizer: Any, processor: Any) -> tuple[Any, str]:
    """Return a tokenizer whose chat template takes text in which a tag is a picture, and that tag.

    Templates of models that see take parts; of one that takes text alone, the tag is the processor's own.

    Raises:
        DataError: the template shows no pictures, and the processor has no tag.
    """
    own, changed = getattr(processor, "image_token", None), copy.copy(tokenizer)
    changed.chat_template = _AS_PARTS + hf_folder.get_chat_template(tokenizer)
    turn = [{"role": "user", "content": TAG + _PROBE}]
    try:
        text = changed.apply_chat_template(turn, tokenize=False)
    except Exception:  # templates of text alone raise anything for parts
        text = ""
    if _PROBE in text and (own is None or own in text):
        return changed, TAG
    if own is None:
        raise DataError(f"{tokenizer.name_or_path}: the chat template shows no pictures", "name a --chat-template")
    return tokenizer, str(own)


@dataclass(frozen=True)
class CollateRows:
    """Lays pieces as another `CollateFn` does, with what the model's processor makes of each row; a `CollateFn`."""

    rules: ProcessorRules
    collate: CollateFn = collate_packed

    def __call__(
        self,
        pieces: Sequence[TokenSegment],
        capacity: int,
        pad_id: int,
        seq_len: int,
        state: dict[str, Any] | None = None,
    ) -> Batch:
        """Return the batch; arguments as of `collate_packed`.

        Raises:
            DataError: a picture is not what it was when the rows were tokenised.
        """
        batch = self.collate(pieces, capacity, pad_id, seq_len, state)
        if batch.picture_names:
            batch.row_inputs = [self._read_row(batch, number) for number in range(len(batch.picture_names))]
        return batch

    def _read_row(self, batch: Batch, number: int) -> dict[str, Tensor]:
        if not batch.picture_names[number]:
            return {}
        row = json_reader.loads(batch.picture_names[number].decode(*ENCODING))
        sources = [source for source, _, _ in row["pictures"]]
        inputs = run_processor(load_processor(self.rules), row["text"], sources, "a row of the training")
        start, stop = batch.cu_seqlens[number : number + 2]
        if not torch.equal(inputs["input_ids"][0, : stop - start], batch.input_ids[start:stop]):
            raise DataError(
                f"{make_name(sources[0])}: the processor makes other tokens than when the rows were tokenised",
                "put the old pictures back, or give --data.cache a new folder",
            )
        return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
