"""Pictures that are drawn: the same for a seed, all different, none held out and trained on."""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from PIL import Image

from anabatic.config.vision_commands import VisionDrawJob
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.data.builtin.drawn_pictures import COLOURS, KINDS, draw_pictures
from anabatic.recipes.vision import draw


def digests(folder: Path, name: str) -> list[str]:
    rows = json_reader.read_json_lines(folder / name)
    return [hashlib.sha256(Image.open(folder / row["images"][0]).tobytes()).hexdigest() for row in rows]


def test_a_seed_decides_every_pixel() -> None:
    first, again, other = (
        [(one.question, one.answer, one.image.tobytes()) for one in draw_pictures(40, 64, seed)] for seed in (0, 0, 1)
    )
    assert first == again and first != other
    assert len({pixels for _, _, pixels in first}) == 40


def test_equal_pictures_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_number(canvas: object) -> tuple[str, str]:
        level = canvas.random.randrange(3)  # type: ignore[attr-defined]
        canvas.image.paste((level, level, level), (0, 0, 32, 32))  # type: ignore[attr-defined]
        return "Which level?", str(level)

    monkeypatch.setitem(KINDS, "colour", draw_number)
    for kind in [kind for kind in KINDS if kind != "colour"]:
        monkeypatch.delitem(KINDS, kind)
    drawn = list(draw_pictures(3, 32, 0))
    assert sorted(one.answer for one in drawn) == ["0", "1", "2"]


def test_held_out_pictures_are_not_trained_on(tmp_path: Path) -> None:
    draw.run(VisionDrawJob(out=str(tmp_path), train=60, held_out=20))
    train, held_out = (digests(tmp_path, f"{name}.jsonl") for name in ("train", "held_out"))
    assert (len(train), len(held_out)) == (60, 20)
    assert not set(train) & set(held_out)


def test_rows_without_pictures_ask_the_same(tmp_path: Path) -> None:
    draw.run(VisionDrawJob(out=str(tmp_path), train=5, held_out=25))
    seen, blind = (list(json_reader.read_json_lines(tmp_path / f"held_out{name}.jsonl")) for name in ("", "_text"))
    assert Counter(row["category"] for row in seen) == dict.fromkeys(KINDS, 5)
    for row, same in zip(seen, blind, strict=True):
        assert row["messages"][0]["content"] == "<image>" + same["messages"][0]["content"]
        assert row["messages"][1] == same["messages"][1] and "images" not in same


def test_every_kind_has_several_answers() -> None:
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in draw_pictures(500, 32, 3):
        answers[one.kind][one.answer] += 1
    assert {kind: len(found) for kind, found in answers.items()} == dict(colour=6, shape=4, count=4, digit=10, bars=3)
    assert all(max(found.values()) < 50 for found in answers.values())


def test_colour_is_in_the_picture() -> None:
    for one in draw_pictures(30, 64, 5):
        if one.kind == "colour":
            colours = {colour for _, colour in one.image.getcolors(4096)}
            assert COLOURS[one.answer] in colours and len(colours & set(COLOURS.values())) == 1


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="PIL")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match="drawing pictures needs pillow") as raised:
        next(draw_pictures(1, 64, 0))
    assert "[vision]" in raised.value.hint
