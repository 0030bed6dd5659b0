"""How fast is a step of reinforcement learning - answers, rewards, update - beside TRL's GRPOTrainer?

    python benchmarks/rl.py --peer-python VENV/bin/python [--model FOLDER] [--turns N] [--steps N] [--tokens N]

TRL lives in its own environment: `python -m venv VENV && VENV/bin/pip install torch==2.13.0 trl psutil`. Both
sides train the same Qwen3 on the same questions: 8 a step with 8 answers each, up to `--tokens` new tokens at
temperature 1, rewarded for vowels, one update a step without a reference, fp32, one thread. With `--model` (the SFT
stage of rl_demo) answers end where the model ends them, as in use; without it the weights are random (4
layers, width 256, vocabulary of 4,096), and nearly every answer fills the room: nobody pads. The Trainer runs with what
it is fastest with here: all answers in one batch, no gradient checkpointing. Ours is `anabatic rl` itself, whose
rewards are called in their own process.

Sides take turns, each in a fresh process; the first two steps of a turn are not counted. What counts is CPU time of the
process and its children; the wall clock is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from option_types import names_among, positive_int, program

QUESTIONS, ANSWERS, WARM = 8, 8, 2
LR = 1e-5
MINE = "def vowels(text, row):\n    return sum(letter in 'aeiou' for letter in text) / 100\n"


def prepare(folder: Path, given: Path | None) -> None:
    """Write the questions, the reward, and a model folder with tokenizer and chat template."""
    from anabatic.data.builtin import synthetic_tasks

    asked = [row.messages[0]["content"] for row in synthetic_tasks.generate_task_rows("all", "train", 256, 0)]
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    (folder / "mine.py").write_text(MINE)
    if given is not None:
        (folder / "model").symlink_to(given.resolve())
        return
    import torch

    from anabatic.config.pretrain import PretrainModel
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.model_init import build_model
    from anabatic.models.pretrained import save_model
    from anabatic.plan.depth_dial import derive_model_sizes

    words = folder / "tokenizer"
    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(words), vocab_size=4096, data=Data(train=["stdlib:#60"])))
    known = hf_folder.load_tokenizer(words)
    config = PretrainModel(depth=4, width=256, head_dim=64)
    model = build_model(derive_model_sizes(config, len(known)), config, len(known), 512, torch.device("cpu"), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.02, generator=generator)
    save_model(model, folder / "model", known)


class Cpu:
    """CPU seconds of this process and of its children; who they are is found out once."""

    def __init__(self) -> None:
        self._children: list[Any] | None = None

    def __call__(self) -> float:
        import psutil

        if self._children is None:
            self._children = psutil.Process().children(recursive=True)
        times = os.times()
        return times.user + times.system + sum(sum(child.cpu_times()[:2]) for child in self._children)


def ours(folder: Path, steps: int, tokens: int) -> list[tuple[float, float, int]]:
    """Return (CPU seconds, wall seconds, tokens of answers so far) after every step."""
    from anabatic.config.rl import HeldoutEvaluate, RlJob
    from anabatic.config.sections.common import BatchSettings, Data, DeviceSettings, LogSettings, Optim, Schedule
    from anabatic.recipes.training.rl import run
    from anabatic.train.metrics.recorder import MetricsRecorder

    marks: list[tuple[float, float, int]] = []
    cpu = Cpu()
    record = MetricsRecorder.log_train_step

    def train(self: MetricsRecorder, step: int, row: dict[str, Any]) -> None:
        record(self, step, row)
        before = marks[-1][2] if marks else 0
        marks.append((cpu(), time.monotonic(), before + round(row["answer_tokens"] * QUESTIONS * ANSWERS)))

    MetricsRecorder.log_train_step = train  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as out:
        job = RlJob(
            model=str(folder / "model"),
            out=out,
            data=Data(train=[str(folder / "questions.jsonl")]),
            rewards=[f"{folder / 'mine.py'}:vowels"],
            examples_per_step=QUESTIONS,
            num_samples=ANSWERS,
            device_batch_size=QUESTIONS * ANSWERS,
            mask_truncated=False,
            batch=BatchSettings(seq_len=128),
            schedule=Schedule(max_steps=steps),
            optim=Optim(name="adamw", lr=LR, weight_decay=0.0),
            eval=HeldoutEvaluate(rows=1),
            log=LogSettings(every=1),
            device=DeviceSettings(type="cpu", dtype="fp32", threads=1),
        )
        job.sampling.max_new_tokens = tokens
        run(job)
    return marks


def trl(folder: Path, steps: int, tokens: int) -> list[tuple[float, float, int]]:
    """The same by GRPOTrainer."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    marks: list[tuple[float, float, int]] = []
    cpu = Cpu()
    made = [0]

    def vowels(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        made[0] += sum(map(len, completion_ids))
        return [sum(letter in "aeiou" for letter in one[0]["content"]) / 100 for one in completions]

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((cpu(), time.monotonic(), made[0]))

    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=QUESTIONS * ANSWERS,
            num_generations=ANSWERS,
            beta=0.0,
            max_completion_length=tokens,
            temperature=1.0,
            top_k=0,
            learning_rate=LR,
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            loss_type="dapo",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            args=config,
            train_dataset=data,
            reward_funcs=vowels,
            callbacks=[Marks()],
        )
        trainer.train()
    return marks


SIDES = {"ours": ours, "trl": trl}


def turn(python: str, side: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run a side in a fresh process; return its figures per step."""
    words = [python, __file__, "--side", side, "--folder", str(folder), "--steps", str(options.steps + WARM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [*words, "--tokens", str(options.tokens)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    marks = json.loads(done.stdout.splitlines()[-1])
    first, last = marks[WARM - 1], marks[-1]
    cpu_s, wall_s, made = (last[at] - first[at] for at in range(3))
    return {"cpu_s": cpu_s / options.steps, "wall_s": wall_s / options.steps, "tokens": made / options.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=program, default=sys.executable)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--turns", type=positive_int, default=3)
    parser.add_argument("--steps", type=positive_int, default=6)
    parser.add_argument("--tokens", type=positive_int, default=64)
    parser.add_argument("--only", type=names_among(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options.folder, options.steps, options.tokens)))
        return
    pythons = {"ours": sys.executable, "trl": options.peer_python}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in options.only}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), options.model)
        for number in range(options.turns):
            for side, turns in found.items():
                turns.append(turn(pythons[side], side, Path(name), options))
                told = ", ".join(f"{key} {value:.3f}" for key, value in turns[-1].items())
                print(f"turn {number + 1}, {side}: {told}", flush=True)
    for side, turns in found.items():
        each = statistics.median(one["cpu_s"] / one["tokens"] * 1000 for one in turns)
        print(f"{side}: {each:.3f} CPU ms per token of an answer, whole steps")
    if len(found) == 2:
        for key in ("cpu_s", "wall_s"):
            pairs = zip(found["ours"], found["trl"], strict=True)
            ratios = [other[key] / other["tokens"] / (mine[key] / mine["tokens"]) for mine, other in pairs]
            print(f"{key}: trl / ours = {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
