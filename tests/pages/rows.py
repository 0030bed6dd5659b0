"""Small files under the names that the pages use: texts, rows, tracks, recipes, scripts of other programs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from anabatic_testing.tiny_models import CORPUS_TEXT
from pages import blocks

WORDS = CORPUS_TEXT.split()
SMALL_RECIPE = """model: models/base
out: runs/recipe
data: {train: [rows.jsonl]}
batch: {seq_len: 64, micro_batch_tokens: 128, global_batch_tokens: 256}
schedule: {max_steps: 2}
log: {every: 1}
device: {type: cpu, threads: 1}
"""
TRAINER = """import sys, torch, torch_npu
print("trains on", torch.npu.get_device_name(0), sys.argv[1:])
"""
PEER = """import sys
from pathlib import Path
assert Path(sys.argv[1]).is_file()
Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
print("12.5 tok/s")
"""
LOG = "[ERROR] RuntimeError: NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507015\n"
TIMEOUT = "[ERROR] EI0002: The wait execution of the Notify register times out. HCCL_EXEC_TIMEOUT\n"
ZERO3 = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": True},
}  # fmt: skip
FACTORY = """model_name_or_path: models/base
stage: sft
finetuning_type: lora
dataset: rows
template: qwen
cutoff_len: 1024
output_dir: runs/factory
num_train_epochs: 1.0
"""
SWIFT = "NPROC_PER_NODE=4 swift sft --model models/base --dataset rows.jsonl --tuner_type lora --output_dir output\n"
FSDP = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: 0\nmixed_precision: bf16\n"
    "num_machines: 1\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"
)
NODES = "torchrun --nnodes 2 --nproc_per_node 8 train.py --deepspeed ds_config_zero3.json --num_train_epochs 1\n"
NANOCHAT = "python -m scripts.tok_train --max-chars=1000\npython -m scripts.base_train -- --depth=4\n"
PROGRAM = {
    "task_id": "one/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n", "entry_point": "one",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}  # fmt: skip
TRACK = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type"


def text(number: int) -> str:
    """Return a sentence of the small regular language of all stand-ins."""
    at = number % len(WORDS)
    return " ".join(WORDS[at:] + WORDS[:at]) + "."


def document(number: int) -> dict[str, Any]:
    """Return a text of four sentences."""
    return {"text": " ".join(map(text, range(number, number + 4)))}


def pair(number: int) -> dict[str, Any]:
    return {"query": f"Which way {number}?", "response": text(number)}


def chat(number: int) -> dict[str, Any]:
    asked, said = pair(number).values()
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def unseen_chat(number: int) -> dict[str, Any]:
    said = {"role": "assistant", "content": f"Unseen answer {number}."}
    return {"messages": [{"role": "user", "content": f"Unseen {number}?"}, said]}


def alpaca(number: int) -> dict[str, Any]:
    level = ("explain", "reasoning", "topology")[number % 3]
    return {"instruction": f"Explain {number}.", "input": "", "output": text(number), "difficulty": level}


def preferred(number: int) -> dict[str, Any]:
    return {"prompt": f"Which way {number}?", "chosen": text(number), "rejected": f"hill {number % 5}"}


def rated(number: int) -> dict[str, Any]:
    return {"prompt": f"Which way {number}?", "completion": text(number), "label": number % 2 == 0}


def question(number: int) -> dict[str, Any]:
    return {"question": f"How much is {number} and 1?", "answer": f"{number + 1}\n#### {number + 1}"}


def jsonl(path: Path, made: Callable[[int], dict[str, Any]], count: int = 48) -> None:
    """Write JSON lines."""
    write(path, "".join(json.dumps(made(number)) + "\n" for number in range(count)))


def array(path: Path, made: Callable[[int], dict[str, Any]], count: int = 48) -> None:
    """Write one JSON array."""
    write(path, json.dumps([made(number) for number in range(count)]))


def write(path: Path, content: str) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def tracks(path: Path, ids: Iterable[int], points: int = 60, classes: tuple[str, str] = ("Cargo", "Tanker")) -> None:
    """Write an AIS table: vessels of two classes, fast and slow, half of them off California."""
    lines = []
    for one in ids:
        west, knots = (-121.0, -94.5)[one % 4 // 2], (14, 7)[one % 2]
        for step in range(points):
            north, seconds = 33 + 0.1 * one + step * 0.002, 1_577_836_800 + 60 * step
            lines.append(f"{367000000 + one},{seconds},{north},{west},{knots},0,1,{classes[one % 2]}")
    write(path, "\n".join([TRACK, *lines]) + "\n")


def source_tracks(folder: Path) -> None:
    """Write files of one vessel each, as PGeogre/traj_token has them."""
    for number in range(4):
        lines = [
            f"2021-09-17 06:{step:02d}:00,{31 + step * 0.002:.4f},121.5,{7 + number},0,{number % 2}"
            for step in range(50)
        ]
        write(folder / f"{number}.csv", "date,lat,lon,sog,cog,class\n" + "\n".join(lines) + "\n")


def make(folder: Path) -> None:
    """Write every file that needs no model; blocks that a page shows as files are those files."""
    for name in ("corpus/a.jsonl", "texts/a.jsonl", "data/books/a.jsonl", "corpus.jsonl"):
        jsonl(folder / name, document, 120)
    for name in ("unseen.txt", "more.txt"):
        write(folder / name, "".join(text(number) + "\n" for number in range(8)))
    for name in ("chats.jsonl", "data/chats.jsonl", "facts.jsonl"):
        jsonl(folder / name, chat)
    jsonl(folder / "unseen.jsonl", unseen_chat)
    for name in ("chats.json", "facts.json"):
        array(folder / name, chat)
    for name in ("questions.jsonl", "maths.jsonl", "gsm8k_train.jsonl"):
        jsonl(folder / name, question)
    jsonl(folder / "rows.jsonl", pair)
    array(folder / "rows.json", alpaca)
    jsonl(folder / "pairs.jsonl", preferred)
    jsonl(folder / "ratings.jsonl", rated)
    jsonl(folder / "capitals.jsonl", lambda n: {"country": f"Land {n}", "towns": ["Oslo", "Rome"], "right": n % 2}, 6)
    jsonl(folder / "doubled.jsonl", lambda n: {"name": "double", "wish": "doubles x", "wanted": 4}, 3)
    tracks(folder / "ais.csv", range(16))
    tracks(folder / "ais/day.csv", range(16))
    tracks(folder / "named.csv", range(4), classes=("渡轮", "37"))
    for name in ("other.csv", "others.csv"):
        tracks(folder / name, range(40, 48))
    (folder / "ais.csv.gz").write_bytes(gzip.compress((folder / "ais.csv").read_bytes()))
    source_tracks(folder / "demo")
    write(folder / "104694.csv", (folder / "demo/0.csv").read_text())
    scripts(folder)
    shown(folder)


def scripts(folder: Path) -> None:
    """Write recipes, logs, and what people have of other programs."""
    write(folder / "recipe.yaml", SMALL_RECIPE)
    write(folder / "train.py", TRAINER)
    write(folder / "peer.py", PEER)
    for name in ("test_one", "test_npu"):
        write(folder / f"tests/{name}.py", "def test_it():\n    import torch_npu\n")
    write(folder / "train.log", LOG)
    write(folder / "plog/plog-1.log", LOG)
    (folder / "rank-0.log.gz").write_bytes(gzip.compress(LOG.encode()))
    write(folder / "ds_config_zero3.json", json.dumps(ZERO3))
    write(folder / "qwen_lora_sft.yaml", FACTORY)
    write(folder / "train.sh", SWIFT)
    arguments = {"model": "models/base", "dataset": ["rows.jsonl"], "train_type": "lora", "output_dir": "output"}
    write(folder / "output/v0-20260801/args.json", json.dumps(arguments))
    write(folder / "launch_multinode.sh", NODES)
    write(folder / "fsdp_config.yaml", FSDP)
    write(folder / "runs/speedrun.sh", NANOCHAT)


SHOWN = (
    ("asked.json", "guides/dpo.md", "json", 0),
    ("capitals.yaml", "guides/tasks.md", "yaml", 0),
    ("doubled.yaml", "guides/tasks.md", "yaml", 1),
    ("mine.py", "guides/rewards.md", "python", 0),
    ("chat.yaml", "guides/migration.md", "yaml", 0),
    ("hosts.txt", "guides/launch-hosts.md", "text", 0),
)
"""File, and the block that shows it: page, language, number."""


def shown(folder: Path) -> None:
    """Write the files that a page shows whole."""
    for name, *place in SHOWN:
        write(folder / name, blocks.of(*place))
