"""Readers of what people write: recipes, options, tasks, templates, commands and files of other programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from anabatic.config.loading import deepspeed_json, settings, shipped_recipes, validation, yaml_reader
from anabatic.config.task import EvalTask
from anabatic.convert import converter
from anabatic.data.readers import raw_rows
from anabatic.data.readers.raw_rows import RawRow
from anabatic.evals.tasks import items, registry
from fuzz.engine import Good
from fuzz.reading import Reader

COMMANDS = {"rl_demo": "rl", "dpo": "dpo", "tools": "sft", "qwen-lora": "sft", "demo": "pretrain", "vessel": "pipeline"}


@cache
def recipes() -> list[Good]:
    """The recipes that come with the package, named by their commands, one of them as JSON, which is YAML too."""
    found = []
    for name in ("rl_demo", "dpo", "qwen-lora", "speedrun", "vessel", "qwen32b-lora-curriculum"):
        text = shipped_recipes.get_recipe(name).path.read_text(encoding="utf-8")
        tree = yaml_reader.parse_yaml(text, name).tree
        command = "pipeline" if "stages" in tree else "sft" if "lora" in name else name.partition("_")[0]
        found.append(Good(f"{command}/{name}.yaml", text.encode()))
        found.append(Good(f"{command}/{name}.json.yaml", json.dumps(tree).encode(), "json"))
    return found


def recipe(path: Path) -> None:
    """Read a recipe, and write what was understood."""
    tree = yaml_reader.read_yaml(path).tree
    yaml_reader.parse_yaml(yaml_reader.dump_yaml(tree), "again")
    name = path.parent.name
    settings.load_job("run" if name == "pipeline" else name, [path])


SET = (
    "seed=1 optim.lr=3e-4 data.train=[a.jsonl,b.jsonl#5@0.5] batch.seq_len=512 save.resume=never"
    " model=Qwen/Qwen2.5-0.5B lora.target_modules=[q_proj] schedule.max_steps=10 log.sinks=[] recompute=full"
)


def _set(path: Path) -> None:
    """Options of the command line."""
    tree: dict[str, Any] = {}
    for word in path.read_bytes().decode("utf-8", "surrogateescape").split():
        key, _, value = word.partition("=")
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            place = inner if isinstance(inner, dict) else {}
        place[last] = validation.UntypedText(value)
    settings.load_job("sft", [], tree)


TASKS = {
    "choices.yaml": {
        "name": "mine", "about": "A task.", "kind": "choices", "prompt": "Q: {{ question }}\nA:",
        "choices": "{{ choices }}", "answer": "{{ answer }}", "data": {"files": ["rows.jsonl"]}, "metric": "acc_norm",
        "keep": "{{ answer >= 0 }}", "shots": 1,
    },
    "answer.yaml": {
        "name": "sums", "about": "Sums.", "kind": "generate", "prompt": "{{ question }}", "answer": "{{ answer }}",
        "extract": "regex", "pattern": "#### (.*)", "check": "number", "data": {"files": ["rows.jsonl"]},
        "stop": ["\n\n"], "max_new_tokens": 20,
    },
}  # fmt: skip
_ROW = {"question": "1 + 1?", "choices": ["1", "2", "three"], "answer": 1, "more": {"a": [1, "b"]}}


def _tasks() -> list[Good]:
    return [Good(name, json.dumps(task).encode(), "json") for name, task in TASKS.items()] + [
        Good("text.yaml", yaml_reader.dump_yaml(TASKS["choices.yaml"]).encode())
    ]


def task(path: Path) -> None:
    """Read a task and ask it of three rows."""
    found, _ = registry.read_task(str(path))
    if isinstance(found, EvalTask):
        rows = [RawRow({**_ROW, "answer": at % 2}, f"rows.jsonl: line {at}") for at in range(3)]
        items.build_items(found, rows, None, shots=0 if found.kind == "generate" else 1, limit=3, seed=0)


def _task_rows(path: Path) -> None:
    rows = list(raw_rows.read_raw_rows(path))
    for name in ("choices.yaml", "answer.yaml"):
        items.build_items(load_task(name), rows * 2, None, shots=0, limit=2, seed=0)


@cache
def load_task(name: str) -> EvalTask:
    """Return one of the tasks above."""
    found = registry._parse_task(yaml_reader.parse_yaml(json.dumps(TASKS[name]), name), name)
    assert isinstance(found, EvalTask)
    return found


LLAMAFACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "stage": "sft", "do_train": True, "finetuning_type": "lora",
    "lora_target": "q_proj,v_proj", "dataset": "identity,mine", "dataset_dir": "data", "template": "qwen",
    "cutoff_len": 1024, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "learning_rate": "1.0e-4",
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "val_size": 0.1, "report_to": "none",
    "num_train_epochs": 3.0, "save_steps": 500, "max_samples": 1000, "lora_rank": 8, "output_dir": "out",
}  # fmt: skip
SWIFT = {
    "model": "Qwen/Qwen2.5-7B", "dataset": ["a.jsonl#500"], "train_type": "lora", "lora_rank": 8, "max_length": 2048,
    "learning_rate": 1e-4, "num_train_epochs": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16,
    "target_modules": ["all-linear"], "system": "You help.", "torch_dtype": "bfloat16",
    "columns": {"q": "query", "a": "response"}, "ENV": {"NPROC_PER_NODE": 2},
}  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True},
    "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": "auto"}},
}  # fmt: skip
SCRIPT = """#!/bin/bash
set -e
export OMP_NUM_THREADS=1
MODEL=Qwen/Qwen2.5-7B
BATCH=$((100 * 2))
if [ -z "$X" ]; then X=1; fi
NPROC_PER_NODE=${N:-4} ASCEND_RT_VISIBLE_DEVICES=0,1 swift sft --model $MODEL \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' a.jsonl --max_length 2048 \\
    --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 8 > log.txt 2>&1
swift rlhf --rlhf_type dpo --model "$MODEL" --dataset pairs.jsonl --beta 0.1
swift infer --adapters output/x --val_dataset rows.jsonl
"""
NANOCHAT = """#!/bin/bash
NPROC_PER_NODE=8
python -m nanochat.dataset -n 8
python -m scripts.tok_train --max-chars=2000000000 --vocab-size=65536
torchrun --standalone --nproc_per_node=$NPROC_PER_NODE -m scripts.base_train -- --depth=20 --run=$WANDB_RUN
torchrun --standalone --nproc_per_node=$NPROC_PER_NODE -m scripts.chat_sft -- --device-batch-size=16
"""
FACTORY_SCRIPT = "FORCE_TORCHRUN=1 llamafactory-cli train x.yaml learning_rate=3e-5 stage=dpo pref_loss=orpo\n"
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "machine_rank": 1, "num_machines": 2,
    "main_process_ip": "10.0.0.1", "main_process_port": 29500, "main_training_function": "main", "num_processes": 16,
    "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"},
    "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_offload_params": True},
}  # fmt: skip
SLURM_SCRIPT = """#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )
LAUNCHER="torchrun --nproc_per_node `npu-smi info -l | wc -l` --nnodes $SLURM_NNODES --rdzv_id $RANDOM"
read -r A B <<< "$(hosts)"
cat > ds.json <<END
{"made": "$(date)", 'torn
END
for rate in 1e-4 2e-4; do
  srun bash -c "$LAUNCHER --master_addr ${nodes[0]} train.py --model_name_or_path M --learning_rate $rate"
done
"""
OWN_SCRIPT = "torchrun --nproc_per_node 4 train.py --model_name_or_path M --learning_rate 1e-4 --max_length 512\n"


def _peers() -> Sequence[Good]:
    return [
        Good("llamafactory/x.yaml", yaml_reader.dump_yaml(LLAMAFACTORY).encode()),
        Good("llamafactory/x.json", json.dumps(LLAMAFACTORY).encode(), "json"),
        Good("llamafactory/run.sh", FACTORY_SCRIPT.encode()),
        Good("swift/x.yaml", yaml_reader.dump_yaml(SWIFT).encode()),
        Good("swift/args.json", json.dumps(SWIFT).encode(), "json"),
        Good("swift/run.sh", SCRIPT.encode()),
        Good("deepspeed/ds.json", json.dumps(DEEPSPEED).encode(), "json"),
        Good("deepspeed/run.sh", OWN_SCRIPT.encode()),
        Good("deepspeed/acc.yaml", yaml_reader.dump_yaml(ACCELERATE).encode()),
        Good("deepspeed/slurm.sh", SLURM_SCRIPT.encode()),
        Good("nanochat/speedrun.sh", NANOCHAT.encode()),
    ]


def peer(path: Path) -> None:
    """Convert what another program is told; what comes of it is a recipe that can be read."""
    made = converter.convert_command(path.parent.name, [str(path)])
    yaml_reader.parse_yaml(made.text, "made")
    if path.name == "ds.json":
        deepspeed_json.translate_config(deepspeed_json.read_config(str(path)), str(path))


def _typed(path: Path) -> None:
    """A command as one text."""
    text = path.read_bytes().decode("utf-8", "surrogateescape").replace("\0", "")
    converter.convert_command("swift", [text])
    converter.convert_command("swift", shlex.split("swift sft") + text.split())


def _dataset_info(path: Path) -> None:
    folder = path.parent.parent
    (folder / "x.yaml").write_text(yaml_reader.dump_yaml(LLAMAFACTORY), encoding="utf-8")
    converter.convert_command("llamafactory", [str(folder / "x.yaml")])


INFO = {
    "mine": {"file_name": "mine.json", "num_samples": 50, "columns": {"prompt": "q", "response": "r", "system": "s"}},
    "identity": {
        "hf_hub_url": "a/b",
        "ms_hub_url": "c/d",
        "subset": "en",
        "split": "train[:9]",
        "formatting": "sharegpt",
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
    },
}
TYPED = (
    "swift sft --model M --dataset a.jsonl b.jsonl#5 HF::o/n:a/b#9 --max_length 1000 --per_device_train_batch_size 3"
)

READERS = [
    Reader("recipes", recipes, recipe, 400),
    Reader("options", lambda: [Good("words.txt", SET.encode())], _set, 300),
    Reader("tasks", _tasks, task, 200),
    Reader("rows of tasks", lambda: [Good("row.jsonl", json.dumps(_ROW).encode(), "jsonl")], _task_rows, 150),
    Reader("other programs", _peers, peer, 300),
    Reader("typed commands", lambda: [Good("typed.txt", TYPED.encode())], _typed, 100),
    Reader("dataset_info", lambda: [Good("data/dataset_info.json", json.dumps(INFO).encode(), "json")], _dataset_info),
]  # fmt: skip
