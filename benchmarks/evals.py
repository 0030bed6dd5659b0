"""Multiple choice by likelihood: items a second of `anabatic` beside lm-evaluation-harness, same model, same items.

    python benchmarks/evals.py --lm-eval /path/to/venv/bin/python [--items 400] [--rounds 3]

lm-evaluation-harness (`pip install "lm_eval[hf]"`) lives in its own environment. Both are handed the same pairs
of context and continuation, load the same folder, run with one thread and are timed without their start; rounds
alternate between them. Prints the CPU time of both, the ratio, and how far the log-probabilities differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from option_types import positive_int, program

_PEER = """
import json, sys, time
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, file, batch, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pairs = json.load(open(file))
model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=batch)
for line in sys.stdin:
    asked = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in pairs]
    started, cpu = time.perf_counter(), time.process_time()
    found = model.loglikelihood(asked, disable_tqdm=True)
    row = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    print(json.dumps(row | {"found": [[a, bool(b)] for a, b in found]}), flush=True)
"""


def pairs_of(items: int, shots: int, seed: int) -> list[tuple[str, str]]:
    """Generated questions with four choices of two to eight words, examples before each."""
    rng = random.Random(seed)
    words = ["wind", "slope", "bird", "warm", "hill", "upward", "air", "cold", "night", "valley", "sea", "stone"]

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    asked = [(f"Question: {text(8, 30)}?\nAnswer:", [f" {text(2, 8)}" for _ in range(4)]) for _ in range(items)]
    made = []
    for number, (question, choices) in enumerate(asked):
        others = rng.sample([one for at, one in enumerate(asked) if at != number], shots)
        before = "".join(f"{question}{choices[0]}\n\n" for question, choices in others)
        made += [(before + question, choice) for choice in choices]
    return made


def model_folder(folder: Path, depth: int) -> None:
    """A Qwen3 from nothing with a tokenizer of the standard library."""
    from anabatic.config.pretrain import PretrainModel
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.model_init import build_model
    from anabatic.models.pretrained import save_model
    from anabatic.plan.depth_dial import derive_model_sizes

    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(folder), vocab_size=4096, data=Data(train=["stdlib:docs"])))
    import torch

    config = PretrainModel(depth=depth, width=256, head_dim=64)
    made = build_model(derive_model_sizes(config, 4096), config, 4096, 2048, torch.device("cpu"), 0)
    save_model(made, folder, hf_folder.load_tokenizer(folder))


def ours(folder: Path, pairs: list[tuple[str, str]], batch_tokens: int):
    """Yield `(seconds, cpu, found)` of each round asked for."""
    from anabatic.config.sections.common import DeviceSettings as DeviceConfig
    from anabatic.data.tokenizer import hf_folder
    from anabatic.device.device import select_device
    from anabatic.evals.local_model import LocalModel
    from anabatic.evals.tasks.item_encoding import encode_items
    from anabatic.evals.tasks.items import ContextPair, EvalItem
    from anabatic.models.pretrained import load_model

    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    tokens = hf_folder.load_tokenizer(folder)
    local = LocalModel(load_model(folder, device.torch_device, device.dtype), tokens, device, batch_tokens, 32)
    while True:
        started, cpu = time.perf_counter(), time.process_time()
        items = [
            EvalItem(at, "", [ContextPair(*pair) for pair in pairs[at : at + 4]]) for at in range(0, len(pairs), 4)
        ]
        texts = encode_items(tokens, items, local.max_len).texts
        found = {number: one for part in local.score_texts(texts, "scoring") for number, one in part.items()}
        row = [(found[number].logprob, found[number].is_greedy) for number in range(len(pairs))]
        yield time.perf_counter() - started, time.process_time() - cpu, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", type=program, required=True, help="python of the environment with lm_eval")
    parser.add_argument("--items", type=positive_int, default=200)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--depth", type=positive_int, default=4)
    parser.add_argument("--batch-tokens", type=positive_int, default=8192)
    parser.add_argument("--peer-batch", type=positive_int, default=32)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder, args.depth)
        pairs = pairs_of(args.items, args.shots, 0)
        (folder / "pairs.json").write_text(json.dumps(pairs))
        (folder / "peer.py").write_text(_PEER)
        command = [args.lm_eval, str(folder / "peer.py"), name, str(folder / "pairs.json"), str(args.peer_batch)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        peer = subprocess.Popen(
            [*command, str(args.rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        assert peer.stdin is not None and peer.stdout is not None
        rounds = ours(folder, pairs, args.batch_tokens)
        for number in range(args.rounds):
            seconds, cpu, mine = next(rounds)
            peer.stdin.write("go\n")
            peer.stdin.flush()
            row = json.loads(peer.stdout.readline())
            worst = max(abs(a - b) for (a, _), (b, _) in zip(mine, row["found"], strict=True))
            greedy = sum(a == b for (_, a), (_, b) in zip(mine, row["found"], strict=True))
            print(
                f"round {number}: anabatic {args.items / seconds:.1f} items/s, {cpu:.2f} s of CPU;"
                f" lm_eval {args.items / row['seconds']:.1f} items/s, {row['cpu']:.2f} s;"
                f" {row['cpu'] / cpu:.2f}x by CPU time; log-probabilities differ by {worst:.1e} at most,"
                f" greedy alike in {greedy} of {len(pairs)}",
                flush=True,
            )
        peer.stdin.close()
        peer.wait()


if __name__ == "__main__":
    sys.exit(main())
