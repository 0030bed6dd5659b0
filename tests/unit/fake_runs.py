"""Run folders that look like a real demo's, for tests of everything that reads one. Standard library only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anabatic.config.pipeline import PipelineJob, PipelineStage

START_TIME = 1_760_000_000.0
LEVEL_MIXES = {"explain": (0.8, 0.4, 0.25), "reasoning": (0.2, 0.4, 0.35), "topology": (0.0, 0.2, 0.4)}
"""Share of each level in three stages."""
HOSTILE_TEXT = "</pre><script>window.stolen = 1</script>\x1b[31m\x00 \ud800 <|im_end|>"


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` to `path`, lone surrogates as JSON escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_training_run(
    folder: Path, *, steps: int = 600, start: float = START_TIME, first_loss: float = 8.3, levels: bool = False
) -> None:
    """Write the run folder of one finished training stage: curves, samples, a resume, a skipped update.

    Args:
        levels: it had a curriculum of three levels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(str(folder.name))
    rows: list[dict[str, Any]] = []
    counts = dict.fromkeys(LEVEL_MIXES, 0)
    for step in range(1, steps + 1):
        done = step / steps
        trend = 1.9 + (first_loss - 1.9) * math.exp(-7 * done) + 0.5 * (1 - done)
        row: dict[str, Any] = {
            "loss": trend + draw.gauss(0, 0.09),
            "lr": 0.02 * min(1, done / 0.05, 0.02 + 2 * (1 - done)),
            "grad_norm": 0.4 + 1.5 * math.exp(-12 * done) + abs(draw.gauss(0, 0.08)),
            "tokens": step * 8192,
            "tokens_per_s": 24_000 + draw.gauss(0, 600) - (7_000 if step == 1 else 0),
            "mfu": 0.31 + draw.gauss(0, 0.008),
            "memory_bytes": int(1.4e9 + 2e8 * min(1, done * 8)),
            "data_wait": abs(draw.gauss(0.002, 0.001)),
            "eta_s": (steps - step) * 0.34,
            "skipped": int(done > 0.5),
        }
        if levels:
            stage = sum(done > until for until in (0.3, 0.7))
            for name in draw.choices(list(LEVEL_MIXES), [mix[stage] for mix in LEVEL_MIXES.values()], k=24):
                counts[name] += 1
            row |= {"stage": stage + 1, "samples": dict(counts)}
        rows.append({"step": step, "time": start + step * 0.34, "kind": "train", **row})
        if step % max(1, steps // 8) == 0:
            rows.append(_build_eval_row(step, start, trend))
            rows.extend(_build_sample_rows(step, done, start))
    write_jsonl(folder / "metrics.jsonl", rows)
    write_jsonl(folder / "events.jsonl", _build_event_rows(steps, start))
    (folder / "config.yaml").write_text(_CONFIG_TEMPLATE.format(out=folder.name, steps=steps), encoding="utf-8")
    summary = {
        "steps": steps,
        "tokens": steps * 8192,
        "seconds": steps * 0.34,
        "train_loss": 1.95,
        "valid_loss": 2.01,
        "valid_bpb": 1.78,
        "params": 6_815_744,
        "device": "cpu",
        "peak_memory_bytes": 1_650_000_000,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def write_pipeline_run(out: Path, *, steps: int = 600) -> PipelineJob:
    """Write a finished demo in `out`: tokenizer, base, mid, sft, eval, chat. Return its job."""
    stages = {
        "tokenizer": PipelineStage(command="tokenizer train", title="Byte-level BPE, 4,096 tokens"),
        "base": PipelineStage(command="pretrain", title="Pretraining on the standard library's sources"),
        "mid": PipelineStage(command="pretrain", title="Mid-training: text, conversations and tasks"),
        "sft": PipelineStage(command="sft", title="Supervised fine-tuning on conversations"),
        "eval": PipelineStage(command="eval", title="Bits per byte and generated tasks"),
        "chat": PipelineStage(command="chat", title="A short conversation"),
    }
    write_training_run(out / "base", steps=steps)
    write_training_run(out / "mid", steps=max(1, steps // 3), start=START_TIME + 250, first_loss=3.4)
    write_training_run(out / "sft", steps=max(1, steps // 6), start=START_TIME + 330, first_loss=2.9, levels=True)
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    (out / "tokenizer" / "config.yaml").write_text("vocab_size: 4096\n", encoding="utf-8")
    (out / "eval").mkdir(parents=True, exist_ok=True)
    (out / "eval" / "eval.json").write_text(json.dumps(EVAL_RESULTS), encoding="utf-8")
    write_jsonl(out / "chat" / "chat.jsonl", CHAT_MESSAGES)
    seconds = {"tokenizer": 4.1, "base": 204.0, "mid": 68.2, "sft": 34.5, "eval": 21.9, "chat": 3.2}
    rows: list[dict[str, Any]] = []
    now = START_TIME
    for stage, took in seconds.items():
        rows.append({"time": now, "event": "stage", "stage": stage, "state": "run", "seconds": 0.0})
        now += took
        rows.append({"time": now, "event": "stage", "stage": stage, "state": "done", "seconds": took})
    write_jsonl(out / "pipeline.jsonl", rows)
    return PipelineJob(out=str(out), title="From text to a chatting model", stages=stages)


def _build_eval_row(step: int, start: float, trend: float) -> dict[str, Any]:
    loss = trend + 0.06
    values = {"valid_loss": loss, "valid_bpb": loss * 0.885, "tokens": 200_000}
    values |= {"valid_perplexity": math.exp(loss), "valid_accuracy": math.exp(-loss / 2)}
    return {"step": step, "time": start + step * 0.34, "kind": "eval", **values}


def _build_sample_rows(step: int, done: float, start: float) -> list[dict[str, Any]]:
    texts = {
        "def read_lines(path):\n": '    """Return the lines of a file."""\n    with open(path) as file:\n'
        "        return [line.rstrip() for line in file]\n",
        "The module `json` is": " used to encode and decode objects. It returns a string that can be read "
        "again by another program, or `None` if the file is empty.",
    }
    draw = random.Random(step)
    rows = []
    for prompt, good in texts.items():
        noise = "".join(draw.choice("etaoin srhldcumf_.,()=\n") for _ in good)
        text = "".join(a if draw.random() < done else b for a, b in zip(good, noise, strict=True))
        rows.append({"step": step, "time": start + step * 0.34, "kind": "sample", "prompt": prompt, "text": text})
    return rows


def _build_event_rows(steps: int, start: float) -> list[dict[str, Any]]:
    device = {"name": "Intel(R) Xeon(R) Processor", "type": "cpu", "dtype": "bf16", "threads": 2}
    return [
        {"time": start, "event": "start", "step": 0},
        {
            "time": start,
            "event": "device",
            **device,
            "reason": "auto: no accelerator answered",
        },
        {"time": start, "event": "model", "params": 6_815_744, "depth": 4, "width": 256},
        {"time": start + 60, "event": "checkpoint", "step": steps // 2, "seconds": 0.4},
        {"time": start + 61, "event": "stop", "step": steps // 2, "reason": "SIGTERM"},
        {"time": start + 90, "event": "resume", "step": steps // 2},
        {
            "time": start + 91,
            "event": "skip",
            "step": steps // 2 + 1,
            "reason": "gradient norm not finite",
        },
    ]


_CONFIG_TEMPLATE = """out: runs/demo/{out}
seed: 0
model:
  depth: 4
  width: 256
  heads: 4
data:
  train: ["stdlib:"]
  valid_fraction: 0.02
batch:
  seq_len: 512
  global_batch_tokens: 8192
schedule:
  max_steps: {steps}
  warmup_ratio: 0.02
"""


def _build_example(prompt: str, reply: str, answer: str, correct: bool) -> dict[str, Any]:
    return {"prompt": prompt, "reply": reply, "answer": answer, "correct": correct}


EVAL_RESULTS: dict[str, Any] = {
    "bits_per_byte": {"model": 1.712, "gzip9": 2.064, "bytes": 412_332, "tokens": 118_204},
    "tasks": {
        "spelling": {
            "accuracy": 0.945,
            "chance": 0.004,
            "n": 200,
            "examples": [
                _build_example("Spell the word python.", "p-y-t-h-o-n", "p-y-t-h-o-n", True),
                _build_example("Spell the word rhythm.", "r-h-y-t-m", "r-h-y-t-h-m", False),
            ],
        },
        "counting": {
            "accuracy": 0.81,
            "chance": 0.24,
            "n": 200,
            "examples": [
                _build_example("How often does 'a' occur in 'banana'?", "3", "3", True),
            ],
        },
        "arithmetic": {
            "accuracy": 0.365,
            "chance": 0.03,
            "n": 200,
            "examples": [
                _build_example("What is 17 + 26?", "43", "43", True),
                _build_example("What is 48 + 35?", "73", "83", False),
            ],
        },
        "identity": {
            "accuracy": 0.99,
            "chance": 0.25,
            "n": 100,
            "examples": [
                _build_example("你是谁?", "我是 anabatic。", "anabatic", True),
            ],
        },
    },
}

CHAT_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a small model that was trained a few minutes ago."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am anabatic, a small language model trained on this very machine."},
    {"role": "user", "content": "How do I read a file in Python?"},
    {
        "role": "assistant",
        "content": "Use `open` in a with statement:\n\nwith open(path) as file:\n    text = file.read()",
    },
    {"role": "user", "content": "用中文说你好"},
    {"role": "assistant", "content": "你好!"},
]
