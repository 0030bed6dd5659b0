"""`anabatic data preview`: the first rows of data, as the model sees them."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from anabatic.config.data_commands import DataPreviewJob
from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.core.formatting import escape_control_characters
from anabatic.data.chat.loss_mask import LossTurns, select_target_turns
from anabatic.data.chat.loss_preview import MaskedSpan, format_preview, split_by_loss_mask
from anabatic.data.chat.preference_pairs import split_pair_messages
from anabatic.data.readers import sources
from anabatic.data.readers.document import Document, Message
from anabatic.data.readers.row_use import UnusedColumns
from anabatic.data.vision.picture_encoder import measure_pictures
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.row_objects import split_objects
from anabatic.data.vision.video_files import describe_source, is_video, load_first_frame, measure_video
from anabatic.recipes.row_tokens import RowTokenizer

MAX_TEXT_CHARS = 100_000
"""Of a row without a chat template: a text file is one row."""
MAX_THUMBNAILS = 16
"""Of a row."""


@dataclass(frozen=True)
class TextSegment:
    """A stretch of a row that is learned from, or not."""

    text: str
    learned: bool


@dataclass(frozen=True)
class PreviewPicture:
    """A picture or video of a row: its path or the beginning of its data URI, its pixels, and with a model its tokens.

    Attributes:
        thumbnail: a small JPEG as data URI, of a video's first frame; empty: none is asked for, or the row has many
            before it.
        frames: of a video, with a model those that it is shown; None: a picture.
    """

    name: str
    width: int
    height: int
    num_tokens: int | None = None
    thumbnail: str = ""
    frames: int | None = None


@dataclass(frozen=True)
class PreviewRow:
    """One row; of a pair of answers each answer is one.

    Attributes:
        location: file and row.
        kind: text, conversation, chosen or rejected (also a single answer that is marked as a bad one).
        segments: the text in order.
        num_tokens: tokens of the whole row; None without a tokenizer.
        num_learned: target tokens among them.
        pictures: of the row, in order.
    """

    location: str
    kind: str
    segments: list[TextSegment]
    num_tokens: int | None = None
    num_learned: int | None = None
    pictures: list[PreviewPicture] = field(default_factory=list)


@dataclass(frozen=True)
class SourcePreview:
    """The first rows of one source.

    Attributes:
        format: how its rows were read; empty for text files.
        columns: columns that were read.
    """

    source: str
    format: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[PreviewRow] = field(default_factory=list)


def run(job: DataPreviewJob) -> int:
    """Print the preview.

    Raises:
        ConfigError, DataError: a source, a row, the tokenizer or the template cannot be used.
    """
    previews = preview_sources(job)
    if job.json:
        tree = {
            "sources": [asdict(preview) for preview in previews],
            "rows": [asdict(row) for preview in previews for row in preview.rows],
        }
        sys.stdout.write(json.dumps(json_reader.replace_nonfinite(tree)) + "\n")
        return 0
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for preview in previews:
        form = f": read as {preview.format} ({', '.join(preview.columns)})" if preview.format else ""
        sys.stdout.write(f"{escape_control_characters(preview.source)}{form}\n")
        for row in preview.rows:
            sys.stdout.write(f"\n{_describe_row(row)}\n{_format_segments(row, colour)}\n")
        sys.stdout.write("\n")
    return 0


def preview_sources(job: DataPreviewJob) -> list[SourcePreview]:
    """Return the first rows of each source.

    Raises:
        ConfigError, DataError: as `run`.
    """
    reader = None if job.model is None else RowTokenizer(job.model, job.chat_template, job.vision)
    return [_preview_source(source, job, reader) for source in sources.parse_sources(job.inputs)]


def _preview_source(source: sources.DataSource, job: DataPreviewJob, reader: RowTokenizer | None) -> SourcePreview:
    data = replace(job.data, train=[str(source)], media=job.data.media or "")
    documents = list(sources.read_documents(source, data, max_documents=job.rows))
    unused = UnusedColumns()
    unused.count_documents(documents)
    unused.warn(f"the first rows of {source}")
    form = documents[0].row_format if documents else None
    rows = [row for document in documents for row in _preview_document(document, job, reader)]
    return SourcePreview(str(source), form.name if form else "", list(form.columns) if form else [], rows)


def _preview_document(document: Document, job: DataPreviewJob, reader: RowTokenizer | None) -> Iterator[PreviewRow]:
    if document.messages is None:
        yield _preview_text(document, reader)
    elif document.rejected is not None:
        for kind, messages in zip(("chosen", "rejected"), split_pair_messages(document), strict=True):
            yield _preview_conversation(document, messages or [], kind, job, reader)
    else:
        kind = "conversation" if document.label is not False else "rejected"
        yield _preview_conversation(document, document.messages, kind, job, reader)


def _preview_text(document: Document, reader: RowTokenizer | None) -> PreviewRow:
    text = (document.text or "")[:MAX_TEXT_CHARS]
    count = None if reader is None else len(reader.tokenizer(text, add_special_tokens=False)["input_ids"])
    return PreviewRow(document.location, "text", [TextSegment(text, True)], count, count)


def _preview_conversation(
    document: Document, messages: list[Message], kind: str, job: DataPreviewJob, reader: RowTokenizer | None
) -> PreviewRow:
    turns: LossTurns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    pictures = [
        _measure_picture(source, document.location, reader, job.thumbnails if at < MAX_THUMBNAILS else 0)
        for at, source in enumerate(split_objects(document.pictures)[0])
    ]
    if reader is None:
        keep = None if turns == "all" else select_target_turns(messages, turns, document.location)
        answers = iter(keep or [True] * len(messages))
        learned = [next(answers) if turn["role"] == "assistant" else turns == "all" for turn in messages]
        segments = [
            TextSegment(f"{turn['role']}: {_format_content(turn)}\n", is_learned)
            for turn, is_learned in zip(messages, learned, strict=True)
        ]
        return PreviewRow(document.location, kind, segments, pictures=pictures)
    (rendered,) = reader.render([(messages, document)], turns)
    mask = np.ones_like(rendered.mask) if turns == "all" else rendered.mask.copy()
    shown = np.ones(len(mask), dtype=bool)
    if (at := rendered.is_picture) is not None:  # one token stands for all of a picture
        mask[at] = 0
        shown[1:] = ~(at[1:] & at[:-1])
    spans = split_by_loss_mask(rendered.ids[shown], mask[shown], reader.tokenizer)
    segments = [TextSegment(span.text, span.is_target) for span in spans]
    return PreviewRow(document.location, kind, segments, len(rendered.ids), int(mask[1:].sum()), pictures)


def _measure_picture(source: str, location: str, reader: RowTokenizer | None, side: int) -> PreviewPicture:
    rules = None if reader is None else reader.rules
    try:
        image = load_first_frame(source)
        frames = measure_video(source).num_frames if is_video(source) else None
    except DataError as error:
        raise DataError(f"{location}: {error}", error.hint) from error
    (width, height), count = image.size, None
    if isinstance(rules, PictureRules):
        grid = measure_pictures([(source,)], [location], rules)[0][0].grid
        count = rules.count_tokens(grid.grid) * grid.times
        frames = len(grid.frames) or None
    small = io.BytesIO()
    if side:
        image.thumbnail((side, side))
        image.save(small, "JPEG")
    thumbnail = f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}" if side else ""
    return PreviewPicture(describe_source(source), width, height, count, thumbnail, frames)


def _format_content(turn: Message) -> str:
    calls = [call.get("function", call) for call in turn.get("tool_calls", [])]
    parts = [turn.get("reasoning_content"), turn.get("content"), *calls]
    texts = [part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part]
    return "\n".join(texts)


def _describe_row(row: PreviewRow) -> str:
    counts = "" if row.num_tokens is None else f", {row.num_tokens:,} tokens, {row.num_learned:,} of them targets"
    pictures = [
        f"\n    {escape_control_characters(one.name)}: {one.width} x {one.height} pixels"
        + ("" if one.frames is None else f", {one.frames:,} frames")
        + ("" if one.num_tokens is None else f", {one.num_tokens:,} tokens")
        for one in row.pictures
    ]
    return f"--- {row.location} ({row.kind}{counts}){''.join(pictures)}"


def _format_segments(row: PreviewRow, colour: bool) -> str:
    return format_preview([MaskedSpan(segment.text, segment.learned) for segment in row.segments], colour)
