"""Plans of models that see: tokens of pictures, memory and time of the tower."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabatic.cli.app import main
from anabatic.config.loading.settings import load_job
from anabatic.core.errors import DataError
from anabatic.data.vision.picture_load import find_picture_load
from anabatic.device.table import find_chip
from anabatic.plan import cost_model, model_shape, step_time
from anabatic.plan.memory_estimate import estimate_peak_memory
from anabatic.plan.shapes.tower_sizes import PictureLoad, read_tower_shape
from anabatic.plan.tower_cost import estimate_tower_memory
from anabatic.plan.training_setup import TrainingSetup
from suite import tiny_vision

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
RATES = cost_model.get_chip_rates(CHIP)
SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen3-VL-8B-Instruct")
HALF = PictureLoad(1024, 0.5, 0.5, "half of the tokens")
SEEN = TrainingSetup(SHAPE, tuner="lora", micro_tokens=4096, seq_len=4096, pictures=HALF)


def test_a_frozen_tower_holds_pixels_and_works_before_the_decoder() -> None:
    """Qwen3-VL 8B: 2,048 tokens of 4 patches of 3 colors, 2 frames and 16 x 16 numbers, in fp32."""
    assert SHAPE.tower is not None and SHAPE.tower.features == 4
    seen, blind = estimate_peak_memory(SEEN), estimate_peak_memory(replace(SEEN, pictures=None))
    assert seen.parts["pixels"] == 4 * 2048 * 4 * 3 * 2 * 16 * 16
    assert seen.total == blind.total + seen.parts["pixels"] and seen.moment == blind.moment
    narrow = replace(SEEN, shape=replace(SHAPE, layers=1, vocab=320, inner=64))  # a decoder that saves little
    peak = estimate_peak_memory(narrow)
    assert peak.moment == "the tower's forward pass"
    tower = estimate_tower_memory(narrow, 2, 2)
    assert tower is not None and tower.saved == 0 and tower.features == 2 * 2048 * 4096 * 4
    assert estimate_peak_memory(replace(narrow, pictures=replace(HALF, most=1.0))).total > 1.4 * peak.parts["tower"]


def test_a_trained_tower_saves_its_blocks() -> None:
    """By hand for a block of width 1152 and 4304 inside, 16 heads, in bf16."""
    tower = estimate_tower_memory(replace(SEEN, trains_tower=True), 2, 2)
    block = 2 * (2 * 1152 + 8 + 2 * 1152) + 2 * 6 * 1152 + 64 * 16 + 2 * 2 * 4304
    merged = 4 * (2 + 3 * 2) * 4 * 1152  # of each token: four projectors of four patches
    assert tower is not None and tower.saved == 2048 * (4 * (27 * block + 2 * 1536) + merged)
    kept = estimate_tower_memory(replace(SEEN, trains_tower=True, recompute="full"), 2, 2)
    assert kept is not None and kept.saved < 0.2 * tower.saved
    only = estimate_tower_memory(replace(SEEN, trains_projector=True), 2, 2)
    assert only is not None and only.saved == 2048 * merged


def test_the_tower_takes_time_and_its_gradients_twice_as_much_again() -> None:
    long = replace(SEEN, tuner="full", micro_tokens=32_768)
    times = [
        step_time.estimate_step_time(one, RATES)
        for one in (replace(long, pictures=None), long, replace(long, trains_tower=True, trains_projector=True))
    ]
    forward, trained = times[1].compute - times[0].compute, times[2].compute - times[1].compute
    assert forward > 0 and 2 * forward < trained < 3 * forward  # and the update of its weights
    patches, tokens = 4 * 16_384, 16_384
    products = patches * 27 * (4 * 1152**2 + 2 * 1152 * 4304) + tokens * 4 * (4608**2 + 4608 * 4096)
    scores = 27 * 4 * patches * 4096 * 1152
    assert times[1].flops - times[0].flops == pytest.approx(2 * products + scores)


def test_windows_and_tiles_attend_to_less() -> None:
    shape = read_tower_shape(tiny_vision.make_config("qwen2_5_vl").to_dict())
    assert shape is not None and shape.gated and shape.window == 16 and shape.full_blocks == 2
    assert shape.count_attended(25) == (2 * 100 + 2 * 16) / 4
    tiles = read_tower_shape(tiny_vision.make_config("internvl").to_dict())
    assert tiles is not None and tiles.tile_tokens == 4 and tiles.count_attended(40) == 17
    glm = read_tower_shape(tiny_vision.make_config("glm4v").to_dict())
    assert glm is not None and glm.gated and glm.inner == 64 and glm.features == 1


def make_job(folder: Path, rows: str, **more: Any) -> Any:
    given = {"model": str(folder / "model"), "data": {"train": [rows]}, "batch": {"seq_len": 256}, **more}
    return load_job("sft", flags=given)


def test_rows_say_how_many_tokens_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    tiny_vision.save_processor(tmp_path / "model")
    config = tiny_vision.make_config().to_dict()
    rows = tiny_vision.write_shapes(tmp_path / "rows", rows=32, text_every=2)
    tower = read_tower_shape(config)
    found = find_picture_load(make_job(tmp_path, str(rows)), tower, tmp_path / "model", config)
    assert found is not None and found.source == "0.5 a row, by 32 rows"
    sizes = [(64, 64), (96, 64), (64, 100), (150, 40)]  # 2 x 2, 3 x 2, 2 x 3, 5 x 1 tokens, as many of each
    assert len(sizes) == 4 and found.tokens == round((4 + 6 + 6 + 5) / 4)
    assert 0.0 < found.share < found.most < 0.5
    for broken in (str(tmp_path / "none.jsonl"), f"{rows}#x"):
        assumed = find_picture_load(make_job(tmp_path, broken), tower, tmp_path / "model", config)
        assert assumed is not None and (assumed.share, assumed.tokens) == (1.0, 16) and "assumed" in assumed.source
    few = make_job(tmp_path, str(tmp_path / "none.jsonl"), vision={"max_pixels": 4096})
    smaller = find_picture_load(few, tower, None, {})
    assert smaller is not None and smaller.tokens == 4
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        find_picture_load(make_job(tmp_path, str(rows)), tower, tmp_path / "model", config)


def test_a_plan_names_pictures_and_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--chip", "910B3", "--json", "--", "sft", "--model", "Qwen/Qwen3-VL-8B-Instruct"]
    words += ["--data.train", str(tmp_path / "rows.jsonl"), "--tuner", "lora", "--vision.max-pixels", "1048576"]
    words += ["--batch.seq-len", "4096"]
    with pytest.raises(SystemExit):
        main(words)
    found = json.loads(capsys.readouterr().out)["pictures"]
    assert (found["tokens"], found["share"], found["most"]) == (1024, 1.0, 1.0)
    with pytest.raises(SystemExit):
        main([word for word in words if word != "--json"])
    said = [line for line in capsys.readouterr().out.splitlines() if "pictures: " in line]
    assert len(said) == 1 and "1,024 tokens each, 100% of all tokens" in said[0]
