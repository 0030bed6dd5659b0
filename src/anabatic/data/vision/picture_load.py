"""Estimate the tokens of a training's pictures from its first rows, for `plan`. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.readers import sources
from anabatic.data.readers.document import Document
from anabatic.data.vision.picture_files import measure_picture
from anabatic.data.vision.row_objects import split_objects
from anabatic.data.vision.video_files import is_video, measure_video
from anabatic.plan.shapes.tower_sizes import PictureLoad, TowerShape

if TYPE_CHECKING:
    from anabatic.data.vision.picture_rules import PictureRules, VideoRules

_SAMPLE = 64
"""Rows that are read."""
_BYTES_PER_TOKEN = 4
"""Of text, where the folder has no tokenizer.json."""


def find_picture_load(
    job: Any, tower: TowerShape | None, folder: Path | None, config: Mapping[str, Any]
) -> PictureLoad | None:
    """Return the pictures of a job's rows; None: its model sees nothing that is known.

    By its first rows, if they are files here; else a micro-batch may be nothing but pictures, as large as
    `vision.max_pixels` or the folder allows and no larger than a row.

    Args:
        folder: of the model with the description of its pictures; config: its config.json.

    Raises:
        DataError: the folder's description of pictures is damaged.
    """
    if tower is None or not hasattr(job, "vision"):
        return None
    from anabatic.data.vision.rule_files import read_picture_rules  # needs numpy, and few models see

    rules = None
    if folder is not None and "vision_config" in config:
        try:
            rules = read_picture_rules(folder, config, **job.vision.get_bounds())
        except DataError:
            if any(folder.glob("*processor_config.json")):
                raise
    reason = "no rows with pictures are here"
    if rules is not None:
        try:
            if (found := _read_load(job, rules, _choose_counter(folder))) is not None:
                return found
        except (ConfigError, DataError) as error:  # the training says what is wrong; a plan may come before its rows
            reason = str(error)
    pixels = rules.max_pixels if rules else job.vision.max_pixels
    values = tower.values_per_token // 3
    side_pixels = values if tower.tile_tokens else values // 2  # two equal frames
    length = job.batch.resolved_seq_len
    tokens = length if pixels is None else max(1, min(length, pixels // side_pixels))
    return PictureLoad(tokens, 1.0, 1.0, f"the most there can be, assumed: {reason}")


def _choose_counter(folder: Path | None) -> Callable[[str], int]:
    if folder is None or not (file := folder / "tokenizer.json").is_file():
        return lambda text: len(text.encode()) // _BYTES_PER_TOKEN
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file}: {error}", "copy it again") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _read_load(job: Any, rules: PictureRules, count_text: Callable[[str], int]) -> PictureLoad | None:
    data = replace(job.data, media=job.data.media or "")
    given = [one for one in sources.parse_sources(data.train) if sources.source_kind(one) in ("file", "folder", "glob")]
    total = shown = pictures = rows = 0
    most = 0.0
    for source in given:
        limit = min(source.rows or _SAMPLE, max(1, _SAMPLE // len(given)))
        for document in sources.read_documents(source, data, max_documents=limit):
            sizes = [_count_tokens(picture, rules) for picture in split_objects(document.pictures)[0]]
            length = sum(sizes) + count_text(_join_text(document))
            rows, pictures, total, shown = rows + 1, pictures + len(sizes), total + length, shown + sum(sizes)
            most = max(most, sum(sizes) / max(1, length))
    if not pictures:
        return None
    source_text = f"{pictures / rows:.2g} a row, by {rows} rows"
    return PictureLoad(round(shown / pictures), shown / total, most, source_text)


def _count_tokens(picture: str, rules: PictureRules) -> int:
    if is_video(picture):
        return _count_video_tokens(picture, rules.video)
    width, height = measure_picture(picture)
    try:
        return rules.count_tokens(rules.fit_grid(height, width))
    except ValueError as error:
        raise DataError(f"{picture[:80]}: {error}", "cut the picture") from error


def _count_video_tokens(source: str, rules: VideoRules | None) -> int:
    if rules is None:
        raise DataError("a video, and how the model's processor reads those is not known here", "show its frames")
    facts = measure_video(source)
    count = len(rules.sample_frames(facts.num_frames, facts.rate)) if facts.rate else facts.num_frames
    return rules.count_tokens(rules.fit_frames(facts.height, facts.width, count)) * math.ceil(count / rules.frames)


def _join_text(document: Document) -> str:
    return document.text or "\n".join(str(turn.get("content") or "") for turn in document.messages or ())
