"""Small files for the guides' commands, under the names that the page gives them; the guides' own where present."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anabatic_testing.tiny_models import save_tiny_chat_model, write_tiny_text
from e2e.vessels import write_demo, write_table
from npu_sim.guides import typed
from npu_sim.guides.page import ROOT

SOURCE = Path(os.environ.get("ANABATIC_TEST_DATA") or ROOT.parent / "shared" / "data") / "ais" / "source_demo"
"""The demo files of the project that two of the guides are about."""
LEVELS = ("explain", "reasoning", "topology")
DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
}
"""The keys and values that the guide for 32B tells of its ds_config_zero3.json."""
AIS = "MMSI,BaseDateTime,LAT,LON,SOG,COG,Heading,VesselName,IMO,CallSign,VesselType,Status,Length,Width,Draft,Cargo"
CHECK = """import torch
import torch_npu


def test_devices():
    assert torch_npu.npu.is_available()
    print(torch.npu.device_count(), torch.randn(10, device="npu:0").sum().item())
"""
PIPELINES = {
    "nanochat": """stages:
  tokenizer: {job: {vocab_size: 320}}
  base: {job: {schedule: {max_steps: 6}, eval: {every: 6}}}
  mid: {job: {schedule: {max_steps: 4}}}
  sft: {job: {schedule: {max_steps: 4}}}
""",
    "vessel": """stages:
  pretrain: {job: {model: {depth: 1}, schedule: {max_steps: 2}, batch: {rows: 8}}}
  train: {job: {head: {trees: 2}, schedule: {max_steps: 2}, batch: {rows: 8}}}
""",
}
"""Chapter -> what makes its pipeline small."""
PLOG = "[ERROR] HCCL(17,python):2026-11-01-10:00:00.000.000 [hccl.cc:1] EI0006: Getting socket times out.\n"


def model(folder: Path) -> Path:
    """Make a Qwen2 with its own chat template, and the tokenizer it was made with."""
    return save_tiny_chat_model(folder)


def home(folder: Path, made: Path, chapter: str) -> Path:
    """Make a folder in which the commands of a chapter find what they name."""
    folder.mkdir(parents=True)
    (folder / "Qwen").mkdir()
    for name in ("MODEL", "Qwen/Qwen1.5-7B-Chat"):
        (folder / name).symlink_to(made)
    _plog(folder)
    (folder / "small.yaml").write_text(PIPELINES.get(chapter, ""))
    for name, write in FILES[chapter].items():
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name)
    return folder


def _lines(rows: Iterator[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _conversations(path: Path) -> None:
    path.write_text(_lines({"query": f"{n} and", "response": "the wind moves upward"} for n in range(300)))


def _maths(path: Path) -> None:
    path.write_text(_lines({"question": f"{n} and", "answer": "moves #### 5"} for n in range(60)))


def _texts(path: Path) -> None:
    path.mkdir()
    write_tiny_text(path)


def _levels(path: Path) -> None:
    draw = random.Random(0)
    told = {"instruction": "and", "input": "", "output": "the wind moves upward"}
    kinds = typed.json_rows("32b") or [{**told, "difficulty": level} for level in LEVELS]
    rows = [draw.choice(kinds) for _ in range(300)]
    numbered = [{**row, "instruction": f"{n} {row['instruction']}"} for n, row in enumerate(rows)]
    path.write_text(json.dumps(numbered, ensure_ascii=False), encoding="utf-8")


def _deepspeed(path: Path) -> None:
    path.write_text(json.dumps(DEEPSPEED))


def _check(path: Path) -> None:
    path.write_text(CHECK)


def _plog(folder: Path) -> None:
    path = folder / "ascend" / "log" / "debug" / "plog" / "plog-17_20261101.log"
    path.parent.mkdir(parents=True)
    path.write_text(PLOG)


def _vessels(path: Path) -> None:
    """Tracks of fast and of slow vessels in the columns of NOAA's files, two hours each, a point a minute."""
    lines = [AIS]
    for number in range(24):
        name, speed, kind = (("FERRY", 20.0, 60), ("TRAWLER", 5.0, 30))[number % 2]
        for minute in range(120):
            time = f"2020-01-01T{minute // 60:02d}:{minute % 60:02d}:00"
            north = 29.5 + number / 10 + speed * minute / 3600
            lines.append(f"{367000001 + number},{time},{north:.5f},-94.5,{speed},0.0,0.0,{name},,WX,{kind},0,30,8,3,52")
    path.write_text("\n".join(lines) + "\n")


def _demo(path: Path) -> None:
    """The 65 rows of three vessels that came with the guide."""
    _theirs("train_dataset_demo.jsonl", path, write_demo)


def _table(path: Path) -> None:
    """The vessel's table that came with the guide."""
    _theirs(path.name, path, write_table)


def _theirs(name: str, path: Path, write: Callable[[Path], None]) -> None:
    if (SOURCE / name).is_file():
        shutil.copyfile(SOURCE / name, path)
    else:
        write(path)


FILES: dict[str, dict[str, Callable[[Path], None]]] = {
    "trajectory": {"rows.jsonl": _demo},
    "nanochat": {"texts": _texts, "chats.jsonl": _conversations, "maths.jsonl": _maths},
    "32b": {"rows.json": _levels, "ds_config_zero3.json": _deepspeed},
    "vessel": {
        "train_dataset_demo.jsonl": _demo, "test_data.jsonl": _demo, "tests/test_npu.py": _check,
        "ais.csv": _vessels, "104694.csv": _table,
    },
    "swift": {"rows.jsonl": _conversations},
}  # fmt: skip
"""Chapter -> name on the page -> who writes it."""
