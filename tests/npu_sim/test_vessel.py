"""The recipe for the classifier of the NPU guide, with a small model of the same architecture, on simulated NPUs."""

from __future__ import annotations

import json
from pathlib import Path

from anabatic.core import json_reader
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models.pretrained import save_model
from anabatic_testing.tiny_models import build_tiny_qwen2, train_tiny_tokenizer, write_tiny_text
from npu_sim.conftest import Sim

POINT = "YEAR_2021 MONTH_9 DAY_17 HOUR_6 MINUTE_{n} SECOND_4 {cell} SPD_{speed} COG_NE {name} POINT_END"
CELL = " ".join(f"H3_CHAR_{place}_{digit}" for place, digit in enumerate("8a0983d5250ffff"))


def write_rows(path: Path) -> None:
    """Rows as the scripts write them, class word included: fast vessels of class 7, slow ones of class 4."""
    rows = []
    for number in range(48):
        label, speed, name = ((7, "HIGH", "Passenger_Ship"), (4, "SLOW", "Fishing_Vessel"))[number % 2]
        points = [POINT.format(n=n, cell=CELL, speed=speed, name=name) for n in range(10)]
        rows.append(
            {
                "text": " ".join(points),
                "label": label,
                "segment_length": 10,
                "h3_method": "char_split",
                "source_file": f"{number // 2 * 2 + number % 2}.csv",
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_guides_job(sim: Sim) -> None:
    root = sim.folder
    tokenizer = train_tiny_tokenizer(root, write_tiny_text(root))
    model = build_tiny_qwen2(max_position_embeddings=512, tie_word_embeddings=True)
    save_model(model, root / "model", tokenizers.load_tokenizer(tokenizer))
    write_rows(root / "rows.jsonl")
    words = ["anabatic", "classify", "train", "-c", "vessel-8npu", "--model.path", "model", "--data", "rows.jsonl"]
    words += ["--out", "run", "--device.nproc", "2", "--batch.micro-batch-tokens", "1024", "--schedule.max-steps", "6"]
    words += ["--batch.global-batch-tokens", "2048", "--optim.lr", "0.003", "--log.every", "1", "--eval.every", "3"]
    done = sim.command("python", "-m", *words, flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "words are new to the tokenizer of model: one id each" in done.stderr
    found = [row for row in json_reader.read_json_lines(root / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(found) == 6 and found[-1]["loss"] < found[0]["loss"]
    kept = json.loads((root / "run" / "best_model" / "classifier.json").read_text())
    assert len(kept["classes"]) == 14 and kept["words"].startswith("char-v1")
