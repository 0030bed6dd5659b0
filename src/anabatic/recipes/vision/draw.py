"""`anabatic vision draw`: pictures, and rows that ask about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabatic.config.vision_commands import VisionDrawJob
from anabatic.core import log
from anabatic.core.paths import make_write_error, write_atomic
from anabatic.data.builtin.drawn_pictures import DrawnPicture, draw_pictures

PICTURE_FOLDER = "pictures"


def run(job: VisionDrawJob) -> None:
    """Draw the pictures and write the rows; the rows come last, so that they name no picture that is not there.

    Raises:
        ConfigError: Pillow is not installed.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    rows: list[dict[str, Any]] = []
    try:
        (out / PICTURE_FOLDER).mkdir(parents=True, exist_ok=True)
        for number, drawn in enumerate(draw_pictures(job.held_out + job.train, job.side, job.seed)):
            name = f"{PICTURE_FOLDER}/{number:06}.png"
            drawn.image.save(out / name)
            rows.append(_make_row(drawn, name))
    except OSError as error:
        raise make_write_error(out, error) from error
    for name, part in (("held_out", rows[: job.held_out]), ("train", rows[job.held_out :])):
        _write_rows(out / f"{name}_text.jsonl", [_remove_picture(row) for row in part])
        _write_rows(out / f"{name}.jsonl", part)
    log.info(f"{job.train:,} pictures to train on and {job.held_out:,} held out; written to {out}")


def _make_row(drawn: DrawnPicture, name: str) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": f"<image>{drawn.question}"},
        {"role": "assistant", "content": drawn.answer},
    ]
    return {"category": drawn.kind, "messages": turns, "images": [name]}


def _remove_picture(row: dict[str, Any]) -> dict[str, Any]:
    asked, answered = row["messages"]
    question = {**asked, "content": asked["content"].removeprefix("<image>")}
    return {"category": row["category"], "messages": [question, answered]}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
