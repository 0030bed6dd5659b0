"""The jobs of `npu_budget.py`, inside a simulation: every rank is forked from one process that has imported torch.

    anabatic sim --npus 2 -- python benchmarks/npu_jobs.py FOLDER [JOB ...]

Each process leaves the simulator's counters in `FOLDER/JOB`, and its allocator's peak beside them.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from anabatic_sim.machine_spec import REPORT_VARIABLE
from anabatic_testing.multiprocess import find_free_port

STEPS, LOG_EVERY = 6, 3
"""Of a training: the last step is one that neither logs nor follows one that does."""
TOKENS = 512
LAYERS, WIDTH, INNER, VOCABULARY, HEADS, KV_HEADS = 4, 256, 704, 4096, 4, 2
RANK = 16
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
_PRELOADED = (
    "anabatic.cli.app",
    *(f"anabatic.recipes.training.{name}" for name in ("pretrain", "sft", "dpo", "rl")),
    "anabatic.infer.engine",
    "anabatic.train.report.page",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def prepare(folder: Path) -> None:
    """Write a tokenizer, a model and rows: the same on every machine."""
    import torch

    from anabatic.data.tokenizer import hf_folder
    from anabatic.models.pretrained import save_model
    from anabatic_testing.tiny_models import build_tiny_qwen2, train_tiny_tokenizer, write_tiny_text

    tokenizer = hf_folder.load_tokenizer(train_tiny_tokenizer(folder, write_tiny_text(folder)))
    torch.manual_seed(0)
    save_model(build_tiny_qwen2(**_SHAPE), folder / "model", tokenizer)
    draw = random.Random(0)

    def answer() -> str:
        return " ".join(draw.choice(["wind", "slope", "bird", "hill"]) for _ in range(draw.randint(20, 150)))

    rows = [{"query": f"{number}?", "response": answer()} for number in range(200)]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    pairs = [{"prompt": f"{number}?", "chosen": answer(), "rejected": answer()} for number in range(200)]
    (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    import vision

    (folder / "seeing").mkdir()
    vision.prepare(folder / "seeing", 40)
    (folder / "reward.py").write_text("def letters(text, row):\n    return sum(map(ord, text)) % 7\n", encoding="utf-8")


def _train(command: str, options: dict[str, Any], ranks: int = 1, batches: bool = True) -> list[str]:
    given: dict[str, Any] = {
        "device.dtype": "bf16",
        "device.threads": 1,
        "batch.seq-len": TOKENS,
        "schedule.max-steps": STEPS,
        "log.every": LOG_EVERY,
        "log.device-every": 0,
        "eval.every": 0,
        "save.resume": "never",
        "save.background": "off",
    }
    if batches:
        given |= {"batch.micro-batch-tokens": TOKENS, "batch.global-batch-tokens": ranks * TOKENS, "log.samples": 0}
        given |= {"data.valid-fraction": 0}
    return [command, *(f"--{key}={value}" for key, value in (given | options).items())]


def _command(command: str, options: dict[str, Any], ranks: int = 1, batches: bool = True) -> Callable[[Path], None]:
    """A training with the files of `prepare`."""

    def run(folder: Path) -> None:
        from anabatic.cli.app import main

        given = {key: str(value).format(folder=folder) for key, value in options.items()}
        words = _train(command, given | {"out": "run"}, ranks, batches)
        main(words)

    return run


def _sft(tuner: str, ranks: int = 1, **more: Any) -> Callable[[Path], None]:
    files = {"model": "{folder}/model", "data.train": "{folder}/rows.json", "tuner": tuner, "lora.r": RANK}
    return _command("sft", files | {key.replace("_", "."): value for key, value in more.items()}, ranks)


def _trainer(lora: bool) -> Callable[[Path], None]:
    """transformers' Trainer as its documentation shows it, with PEFT's LoRA in every linear layer."""

    def run(folder: Path) -> None:
        import torch
        from transformers import (
            AutoModelForCausalLM,
            AutoTokenizer,
            DataCollatorForSeq2Seq,
            Trainer,
            TrainingArguments,
        )

        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.bfloat16 if lora else torch.float32
        )
        if lora:
            import peft

            config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, config)
        examples = []
        for row in json.loads((folder / "rows.json").read_text(encoding="utf-8")):
            asked = [{"role": "user", "content": row["query"]}]
            whole = [*asked, {"role": "assistant", "content": row["response"]}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template(whole, return_dict=False)[:TOKENS]
            examples.append({"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]})
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=4,
            max_steps=STEPS,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=True,
            learning_rate=1e-4,
        )
        collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
        Trainer(model, arguments, train_dataset=examples, data_collator=collate).train()

    return run


def _seeing_trainer(rows_at_once: int) -> Callable[[Path], None]:
    """The same on four rows with pictures a step, padded or one at a time."""

    def run(folder: Path) -> None:
        import torch
        from transformers import Trainer, TrainingArguments

        import vision

        model, rows, encode = vision.build_peer(folder / "seeing", torch.bfloat16)

        def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
            found = encode(batch)
            print("tokens", found.pop("tokens"), flush=True)
            return found

        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=vision.MICRO_ROWS // rows_at_once,
            remove_unused_columns=False,
            max_steps=STEPS,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=True,
            learning_rate=1e-4,
        )
        Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()

    return run


def _decode(folder: Path) -> None:
    """Four requests that read one token each, greedily."""
    import torch

    from anabatic.data.tokenizer import hf_folder
    from anabatic.infer.engine import Engine
    from anabatic.infer.sampling import Sampling
    from anabatic.models import fused_ops
    from anabatic.models.pretrained import load_model

    tokenizer = hf_folder.load_tokenizer(folder / "model")
    model = load_model(folder / "model", dtype=torch.bfloat16, device=torch.device("npu:0"))
    fused_ops.apply_fused_setting(model, "auto", "npu")
    engine = Engine(model, tokenizer, max_batch=4, max_len=96)
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    engine.submit([engine.request([5 + row] * 20, sampling, []) for row in range(4)])
    while engine.get_load().new_tokens < 8:
        engine.step()
    for _ in range(STEPS):
        with torch.profiler.record_function("anabatic.step"):
            engine.step()


class Job(NamedTuple):
    """What is counted.

    Attributes:
        run: in each rank; the argument is the folder of `prepare`.
        ranks: processes, each with its own device.
        is_peer: another program, measured for the ratio and not held by a test.
    """

    run: Callable[[Path], None]
    ranks: int = 1
    is_peer: bool = False


_RL = {
    "model": "{folder}/model",
    "data.train": "task:spelling#40",
    "rewards": "{folder}/reward.py:letters",
    "tuner": "lora",
    "updates": 2,
    "examples-per-step": 4,
    "num-samples": 4,
    "device-batch-size": 8,
    "sampling.max-new-tokens": 8,
    "mask-truncated": "false",  # all answers are: nothing would be learnt
    "eval.rows": 2,
}
_PAIRS = {"model": "{folder}/model", "data.train": "{folder}/pairs.json", "tuner": "lora", "lora.r": RANK}
_PAIRS["batch.seq-len"] = TOKENS // 2  # a pair fits into a micro-batch
_SEEING = {
    "model": "{folder}/seeing/model",
    "data.train": "{folder}/seeing/rows.jsonl",
    "data.cache": "{folder}/seeing/cache",
    "tuner": "lora",
    "lora.r": RANK,
    "batch.seq-len": 640,
    "batch.micro-batch-tokens": 1024,
    "batch.global-batch-tokens": 1024,
}
_TEXT = {
    "tokenizer": "{folder}/tokenizer",
    "data.train": "{folder}/text.jsonl",
    "model.depth": LAYERS,
    "model.width": WIDTH,
    "model.head-dim": 64,
}
JOBS: dict[str, Job] = {
    "pretrain": Job(_command("pretrain", _TEXT)),
    "full": Job(_sft("full")),
    "lora": Job(_sft("lora")),
    "lora, nf4": Job(_sft("lora", quantize="nf4")),
    "dpo, lora": Job(_command("dpo", _PAIRS)),
    "rl, lora": Job(_command("rl", _RL, batches=False)),
    "full, ddp": Job(_sft("full", 2, parallel_strategy="ddp"), 2),
    "full, zero2": Job(_sft("full", 2, parallel_strategy="zero2"), 2),
    "full, zero3": Job(_sft("full", 2, parallel_strategy="zero3"), 2),
    "full, tensor": Job(_sft("full", 1, parallel_tensor="2"), 2),
    "lora, ddp": Job(_sft("lora", 2, parallel_strategy="ddp"), 2),
    "decode": Job(_decode),
    "lora, pictures": Job(_command("sft", _SEEING)),
    "Trainer, full": Job(_trainer(lora=False), is_peer=True),
    "Trainer + PEFT, lora": Job(_trainer(lora=True), is_peer=True),
    "Trainer + PEFT, pictures": Job(_seeing_trainer(4), is_peer=True),
    "Trainer + PEFT, one by one": Job(_seeing_trainer(1), is_peer=True),
}


def preload() -> None:
    """Import what the jobs need without opening a device, which may not live across a fork."""
    import torch

    torch.set_num_threads(1)
    devices = torch.npu
    asked, devices.is_available = devices.is_available, lambda: True
    for name in _PRELOADED:
        importlib.import_module(name)
    devices.is_available = asked


def _be_rank(call: Callable[[Path], None], folder: Path, out: Path, rank: int, ranks: int, port: int) -> NoReturn:
    """Run `call` in this forked process and end with it."""
    log = os.open(out / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(out)  # where a run leaves its files
    os.environ[REPORT_VARIABLE] = str(out / "counters")
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 0
    try:
        call(folder)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    import torch

    if torch.npu.is_initialized():
        (out / f"{rank}.peak").write_text(str(torch.npu.max_memory_allocated()))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.PyDLL(None).exit(code)  # the simulator writes its counters there; destructors need the interpreter
    raise AssertionError


def run_forked(call: Callable[[Path], None], folder: Path, out: Path, ranks: int) -> None:
    """Run `call` in `ranks` processes; raise what they said when one of them fails."""
    (out / "counters").mkdir(parents=True)
    port = find_free_port()
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            _be_rank(call, folder, out, rank, ranks, port)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank, code in enumerate(ended):
        if code:
            said = (out / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{out.name}, rank {rank}: exit code {code}\n{said[-3000:]}")


def main() -> None:
    """Run the jobs that are named."""
    warnings.filterwarnings("ignore")
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    preload()
    run_forked(prepare, folder, folder / "prepare", 1)
    for name in names:
        run_forked(JOBS[name].run, folder, folder / name, JOBS[name].ranks)


if __name__ == "__main__":
    main()
