"""The cache of resized pictures: the same patches, bounded, and nothing damaged is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anabatic.data.vision import picture_batch
from anabatic.data.vision.picture_cache import PictureCache
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.data.vision.rule_files import read_picture_rules
from suite import tiny_vision

pytest.importorskip("PIL")


@pytest.fixture(params=["qwen3_vl", "internvl"])
def rules(tmp_path: Path, request: pytest.FixtureRequest) -> PictureRules:
    tiny_vision.save_processor(tmp_path / "model", request.param)
    return read_picture_rules(tmp_path / "model", tiny_vision.make_config(request.param).to_dict())


def read_pixels(sources: list[str], rules: PictureRules) -> torch.Tensor:
    shown = [PictureGrid(source, *rules.fit_grid(*load_picture(source).size[::-1])) for source in sources]
    return picture_batch._read_all_patches(shown, rules)[0]


def draw_noise(folder: Path, number: int) -> str:
    from PIL import Image

    path = folder / f"{number}.png"
    noise = np.random.default_rng(number).integers(0, 255, (70, 90 + 40 * number, 3))
    Image.fromarray(noise.astype(np.uint8)).save(path)
    return str(path)


def test_patches_are_the_same_and_nothing_is_decoded_twice(
    tmp_path: Path, rules: PictureRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [draw_noise(tmp_path, number) for number in range(4)]
    plain = read_pixels(sources, rules)
    kept = replace(rules, cache=PictureCache(tmp_path / "cache", 1 << 20))
    assert torch.equal(read_pixels(sources, kept), plain)
    assert len(list((tmp_path / "cache").glob("*/*"))) == 4
    grids = [PictureGrid(source, *rules.fit_grid(*load_picture(source).size[::-1])) for source in sources]
    monkeypatch.setattr(picture_batch, "decode_picture", lambda *_: pytest.fail("decoded again"))
    later = replace(rules, cache=PictureCache(tmp_path / "cache", 1 << 20))  # of another rank, or the next start
    assert torch.equal(picture_batch._read_all_patches(grids, later)[0], plain)


def test_damaged_entries_are_made_again(tmp_path: Path, rules: PictureRules) -> None:
    source = draw_noise(tmp_path, 1)
    kept = replace(rules, cache=PictureCache(tmp_path / "cache", 1 << 20))
    plain = read_pixels([source], kept)
    (entry,) = (tmp_path / "cache").glob("*/*")
    whole = entry.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (b"", whole[:3], whole[:4], whole[:5], whole[:-1], flipped, whole + b"x", b"\0" * len(whole)):
        entry.write_bytes(damaged)
        assert torch.equal(read_pixels([source], kept), plain)
        assert entry.read_bytes() == whole


def test_another_picture_under_the_name_and_other_sizes_have_entries_of_their_own(
    tmp_path: Path, rules: PictureRules
) -> None:
    source = draw_noise(tmp_path, 1)
    kept = replace(rules, cache=PictureCache(tmp_path / "cache", 1 << 20))
    first = read_pixels([source], kept)
    Path(draw_noise(tmp_path, 0)).rename(source)
    assert torch.equal(read_pixels([source], kept), read_pixels([source], rules))
    smaller = replace(kept, max_pixels=2 * rules.unit**2, min_pixels=1)
    assert torch.equal(read_pixels([source], smaller), read_pixels([source], replace(smaller, cache=None)))
    assert len(list((tmp_path / "cache").glob("*/*"))) == 3 and len(first)


def test_a_full_or_closed_folder_is_a_warning_once(
    tmp_path: Path, rules: PictureRules, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [draw_noise(tmp_path, number) for number in range(4)]
    full = replace(rules, cache=PictureCache(tmp_path / "cache", 30_000))
    assert torch.equal(read_pixels(sources, full), read_pixels(sources, rules))
    used = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*/*"))
    assert 0 < used <= 30_000 and caplog.text.count("grows no more") == 1
    caplog.clear()
    (tmp_path / "file").write_text("x")
    closed = replace(rules, cache=PictureCache(tmp_path / "file", 1 << 20))
    assert torch.equal(read_pixels(sources, closed), read_pixels(sources, rules))
    assert caplog.text.count("grows no more") == 1
