"""Do `anabatic eval` and lm-evaluation-harness give the same scores? Item by item, for every kind of task.

    python benchmarks/evals_agree.py --lm-eval /path/to/venv/bin/python --data FOLDER [--items 200] [--len 2048]

lm-evaluation-harness (`pip install "lm_eval[hf]"`) lives in its own environment and runs its own HFLM, on the
same random Qwen3 with the same tokenizer, on the same texts. FOLDER holds `gsm8k_test.jsonl` and `HumanEval.jsonl.gz`.
Prints for each kind how many items are equal (within 1e-4 nats, of sums beyond 100 nats within a millionth; generated
texts: letter by letter), the largest difference, and how many are longer than the context. Exits with 1 when one that
is not cut differs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from option_types import positive_int, program

_PEER = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, file, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
asked = json.load(open(file))
model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1, max_length=length)
found = {}
for kind, (way, rows) in asked.items():
    made = [Instance(way, {}, tuple(row), at) for at, row in enumerate(rows)]
    found[kind] = getattr(model, way)(made, disable_tqdm=True)
json.dump(found, open(sys.argv[4], "w"))
"""
_NEAR = 1e-4
_REPLY = 24
_STOP = ["\n\n", "Question:"]
Rows = list[list[Any]]


def kinds_of(folder: Path, items: int) -> dict[str, tuple[str, Rows]]:
    """What is asked, as the harness takes it: for each kind its method and the arguments of each request."""
    maths = [json.loads(line) for line in (folder / "gsm8k_test.jsonl").read_text("utf-8").splitlines()][: items + 4]
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        code = [json.loads(line) for line in file]
    code = (code * 2)[:items] if items > len(code) else code[:items]
    finals = [row["answer"].rpartition("#### ")[2] for row in maths]
    ask = [f"Question: {row['question']}\nAnswer:" for row in maths]
    shown = "".join(f"{ask[at]} {maths[at]['answer']}\n\n" for at in range(items, items + 4))
    whole = [row["prompt"] + row["canonical_solution"] for row in code]
    return {
        "multiple choice": (
            "loglikelihood",
            [[ask[at], f" {finals[(at + step) % len(maths)]}"] for at in range(items) for step in range(4)],
        ),
        "GSM8K solutions": ("loglikelihood", [[ask[at], f" {maths[at]['answer']}"] for at in range(items)]),
        "GSM8K with 4 examples": ("loglikelihood", [[shown + ask[at], f" {finals[at]}"] for at in range(items)]),
        "HumanEval solutions": ("loglikelihood", [[row["prompt"], row["canonical_solution"]] for row in code]),
        "blank at the border": ("loglikelihood", [[f"{ask[at]} ", maths[at]["answer"]] for at in range(items)]),
        "border inside a word": (
            "loglikelihood",
            [[whole[at][: 20 + 7 * (at % 13)], whole[at][20 + 7 * (at % 13) :][:60]] for at in range(len(whole))],
        ),
        "without a context": ("loglikelihood", [["", maths[at]["question"]] for at in range(items)]),
        "rolling, whole texts": (
            "loglikelihood_rolling",
            [[maths[at]["question"]] for at in range(items // 2)]
            + [[whole[at] * (1 + at % 4)] for at in range(items - items // 2)],
        ),
        "generation until": (
            "generate_until",
            [[ask[at], {"until": _STOP, "max_gen_toks": _REPLY, "do_sample": False}] for at in range(items)],
        ),
    }


def model_folder(folder: Path, length: int) -> None:
    """A Qwen3 of random weights, large enough to matter, and a tokenizer of the standard library."""
    import torch

    from anabatic.config.pretrain import PretrainModel
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.model_init import build_model
    from anabatic.models.pretrained import save_model
    from anabatic.plan.depth_dial import derive_model_sizes

    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(folder), vocab_size=2048, data=Data(train=["stdlib:docs"])))
    config = PretrainModel(depth=2, width=64, head_dim=16)
    made = build_model(derive_model_sizes(config, 2048), config, 2048, length, torch.device("cpu"), 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
    save_model(made, folder, hf_folder.load_tokenizer(folder))


class Ours:
    """The same requests, as the tasks of `anabatic eval` make them."""

    def __init__(self, folder: Path) -> None:
        from anabatic.config.sections.common import DeviceSettings as DeviceConfig
        from anabatic.data.tokenizer import hf_folder
        from anabatic.device.device import select_device
        from anabatic.evals.local_model import LocalModel
        from anabatic.evals.task_runner import EvalOptions
        from anabatic.models.pretrained import load_model

        device = select_device(DeviceConfig(type="cpu", dtype="fp32"))
        model = load_model(folder, device.torch_device, device.dtype)
        self.local = LocalModel(model, hf_folder.load_tokenizer(folder), device, 8192, 16)
        self.how = EvalOptions()

    def records(self, rows: list[dict[str, str]], **task: Any) -> list[dict[str, Any]]:
        """Ask a task of these rows; return its records."""
        from anabatic.config.task import EvalTask, TaskData
        from anabatic.evals.answer_cache import AnswerCache
        from anabatic.evals.task_runner import prepare_task, run_task
        from anabatic.evals.tasks.registry import PlannedTask

        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            made = EvalTask(name="agree", data=TaskData(files=["rows.jsonl"]), **task)
            prepared = prepare_task(PlannedTask(made, Path(name)), self.how)
            return run_task(prepared, self.local, self.how, AnswerCache(None)).records

    def loglikelihood(self, rows: Rows) -> tuple[list[Any], list[bool]]:
        """Sums of log-probabilities and whether all were the likeliest; which were cut."""
        found = self.records(
            [{"c": context, "e": ending} for context, ending in rows],
            kind="completion",
            prompt="{{ c }}",
            continuation="{{ e }}",
            between="",
        )
        return [[one["logprobs"][0], one["right"]["acc"]] for one in found], [bool(one.get("cut")) for one in found]

    def loglikelihood_rolling(self, rows: Rows) -> tuple[list[Any], list[bool]]:
        """Sums over whole texts."""
        found = self.records([{"t": text} for (text,) in rows], kind="perplexity", prompt="{{ t }}")
        return [[sum(one["logprobs"]), True] for one in found], [False] * len(found)

    def generate_until(self, rows: Rows) -> tuple[list[Any], list[bool]]:
        """Replies."""
        found = self.records(
            [{"c": context} for context, _ in rows],
            kind="generate",
            prompt="{{ c }}",
            answer="x",
            stop=_STOP,
            max_new_tokens=_REPLY,
            check="equal",
        )
        return [one["reply"] for one in found], [bool(one.get("cut")) for one in found]


def compared(way: str, mine: list[Any], theirs: list[Any]) -> tuple[list[bool], float]:
    """Which items are equal, and the largest difference."""
    if way == "generate_until":
        return [a == b for a, b in zip(mine, theirs, strict=True)], 0.0
    pairs = [(b, True) if isinstance(b, float) else b for b in theirs]
    gaps = [abs(a[0] - b[0]) for a, b in zip(mine, pairs, strict=True)]
    equal = [
        gap <= _NEAR * max(1.0, abs(a[0]) / 100) and a[1] == b[1] for gap, a, b in zip(gaps, mine, pairs, strict=True)
    ]
    return equal, max(gaps)


def main() -> int:
    """Ask both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", type=program, required=True, help="python of the environment with lm_eval")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--items", type=positive_int, default=200)
    parser.add_argument("--len", type=positive_int, default=2048, dest="length", help="positions of the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder, args.length)
        asked = kinds_of(args.data, args.items)
        (folder / "asked.json").write_text(json.dumps(asked))
        (folder / "peer.py").write_text(_PEER)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [args.lm_eval, "peer.py", name, "asked.json", str(args.length), "found.json"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr[-2000:])
            return 1
        theirs = json.loads((folder / "found.json").read_text())
        ours, differ = Ours(folder), 0
        for kind, (way, rows) in asked.items():
            method: Callable[[Rows], tuple[list[Any], list[bool]]] = getattr(ours, way)
            mine, cut = method(rows)
            equal, gap = compared(way, mine, theirs[kind])
            differ += sum(not same and not short for same, short in zip(equal, cut, strict=True))
            print(
                f"{kind}: {len(rows)} items, {sum(equal)} equal, largest difference {gap:.1e} nats, {sum(cut)} cut",
                flush=True,
            )
            for at in [at for at, same in enumerate(equal) if not same][:2]:
                print(f"  item {at}: {mine[at]!r:.90} and {theirs[kind][at]!r:.90}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
