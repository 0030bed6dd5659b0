"""`anabatic vision score`: right answers by kind of question, beside those without the pictures."""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.vision_commands import VisionScoreJob
from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.core.paths import write_atomic

_MAX_PICTURE_BYTES = 100_000
"""Of a picture that eval.json holds; a larger one is left out."""


@dataclass(frozen=True)
class ScoredAnswer:
    """A row that was asked.

    Attributes:
        kind: of the question.
        answer: what is right.
        reply: what the model said; blind_reply: without the picture.
        picture: file.
    """

    kind: str
    question: str
    answer: str
    reply: str
    blind_reply: str
    picture: Path


def run(job: VisionScoreJob) -> None:
    """Print a table to stdout and write eval.json.

    Raises:
        DataError: a file does not belong to the others, or a picture cannot be read.
        Failure: the folder cannot be written.
    """
    kinds: dict[str, list[ScoredAnswer]] = {}
    for one in _read_answers(job):
        kinds.setdefault(one.kind, []).append(one)
    tasks = {kind: _score_kind(answers, job.show) for kind, answers in kinds.items()}
    width = max(map(len, tasks))
    for kind, task in tasks.items():
        others = f"without pictures {task['without_picture']:7.1%}   baseline {task['chance']:7.1%}"
        sys.stdout.write(f"{kind:{width}}  {task['accuracy']:7.1%}   {others}   ({task['n']:,} questions)\n")
    out = Path(job.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "eval.json", json.dumps({"tasks": tasks}, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out / 'eval.json'}")


def _read_answers(job: VisionScoreJob) -> list[ScoredAnswer]:
    rows, answers, blind = (
        list(json_reader.read_json_lines(Path(name).expanduser())) for name in (job.rows, job.answers, job.without)
    )
    if not rows or not len(rows) == len(answers) == len(blind):
        raise DataError(
            f"{job.rows} has {len(rows):,} rows, {job.answers} {len(answers):,} and {job.without} {len(blind):,}",
            "answer the same rows with and without their pictures: anabatic infer",
        )
    folder = Path(job.rows).expanduser().parent
    scored = []
    for number, (row, seen, unseen) in enumerate(zip(rows, answers, blind, strict=True), start=1):
        try:
            asked, answered = row["messages"]
            one = ScoredAnswer(
                str(row["category"]),
                str(asked["content"]).replace("<image>", ""),
                str(answered["content"]),
                str(seen["response"]).strip(),
                str(unseen["response"]).strip(),
                folder / row["images"][0],
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"{job.rows}: line {number}: no question and answer of a picture, or it was not answered ({error!r})",
                "give the rows of `anabatic vision draw` and the answers of `anabatic infer`",
            ) from error
        if not seen.get("label") == unseen.get("label") == one.answer:
            raise DataError(
                f"{job.answers}: line {number} answers another row than line {number} of {job.rows}",
                "give answers to these rows",
            )
        scored.append(one)
    return scored


def _score_kind(answers: list[ScoredAnswer], show: int) -> dict[str, Any]:
    """Return what eval.json says of a kind; the baseline is the most frequent of its answers."""
    count = len(answers)
    return {
        "accuracy": sum(one.reply == one.answer for one in answers) / count,
        "without_picture": sum(one.blind_reply == one.answer for one in answers) / count,
        "chance": Counter(one.answer for one in answers).most_common(1)[0][1] / count,
        "n": count,
        "examples": [
            {
                "prompt": one.question,
                "reply": one.reply,
                "answer": one.answer,
                "correct": one.reply == one.answer,
                "picture": _encode_picture(one.picture),
            }
            for one in answers[:show]
        ],
    }


def _encode_picture(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "draw the pictures again: anabatic vision draw") from error
    return f"data:image/png;base64,{base64.b64encode(content).decode()}" if len(content) < _MAX_PICTURE_BYTES else ""
