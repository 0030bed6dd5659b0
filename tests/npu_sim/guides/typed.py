"""The commands that the guides make their readers type, and what is run here in the place of each."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from typing import Any

from npu_sim.guides import page
from npu_sim.guides.page import NAMES, NOTHING, ROOT, SPAN, Row

SEEDS = ROOT.parent / "shared" / "seeds"
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
PYTHON = re.compile(r'python3? -c "(.*?)"', re.S)
PROMPT = re.compile(r"^\(\w+\) \S+[#$] ")
SHOWN = re.compile(r"[#+|]|NPU\d|Legend|(X|SYS|PHB|PIX|PXB|HCCS|NA) |cd ")
"""Starts of lines that are not typed: comments, and what a command prints; and `cd`."""
SETS = ("export ", "--")
"""Starts of lines that set a variable, or are an option: test_row has the variables and the settings of the page."""

IS_THERE = 'python -c "import torch; import torch_npu; '
SWIFT = "swift sft --model_type qwen1half-7b-chat --dataset blossom-math-zh --num_train_epochs 5 --sft_type lora"
ONE_CARD = f"ASCEND_RT_VISIBLE_DEVICES=0 {SWIFT} --output_dir output"
FOUR_CARDS = f"NPROC_PER_NODE=4 ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 {SWIFT} --output_dir output"
SWIFT_INFER = "ASCEND_RT_VISIBLE_DEVICES=0 swift infer"
ORIGINAL = f"{SWIFT_INFER} --model_type qwen1half-7b-chat"
ADAPTER = f"{SWIFT_INFER} --ckpt_dir xxx/checkpoint-xxx --load_dataset_config true"
TRAJECTORY = "torchrun --standalone --nnodes=1 --nproc_per_node=8 train_model_npu.py"
BASE_ONE_CARD = "python -m scripts.base_train --depth=12 --device_batch_size=16"
TORCHRUN = "torchrun --standalone --nproc_per_node=8 -m scripts"
STAGES = {
    "tokenizer": "python -m scripts.tok_train",
    "base": f"{TORCHRUN}.base_train -- --depth=12 --device_batch_size=16 --total_batch_size=262144",
    "mid": f"{TORCHRUN}.mid_train -- --device_batch_size=16 --total_batch_size=262144",
    "sft": f"{TORCHRUN}.chat_sft -- --device_batch_size=8 --target_examples_per_step=32",
    "rl": f"{TORCHRUN}.chat_rl -- --device_batch_size=4 --examples_per_step=16",
}
"""Stage -> the command of the guide for NanoChat."""
PREDICT = (
    "python inference_npu.py --model_path ../model_out/trajectory_finetune_model_npu/best_model"
    " --input_file test_data.jsonl --output_file predictions.jsonl --batch_size 64 --npu_id 0"
)
CONVERTED = "tests/npu_sim/guides/test_guide_converted.py::test_what_is_converted_runs"
COUNTERPARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "trajectory": {
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh": ("anabatic env",),
        "./check_npu_env.sh": ("anabatic doctor",),
        "npu-smi info": ("anabatic monitor",),
        f"{IS_THERE}print('NPU可用:', torch.npu.is_available()); print('NPU数量:', torch.npu.device_count())\"":
            ("anabatic doctor",),
        "./train_distributed_npu.sh 8": ("anabatic classify train --npus 8",),
        "./train_distributed_npu.sh 4": ("anabatic classify train --npus N",),
        "python launch_npu_training.py --npus 8": ("anabatic classify train --npus 8",),
        "python launch_npu_training.py --npus 4": ("anabatic classify train --npus N",),
        "source setup_npu_env.sh": ("anabatic env",),
        TRAJECTORY: ("anabatic launch --nproc 8 -- classify train",),
        "watch -n 1 npu-smi info": ("anabatic monitor runs/vessel-8npu",),
        "npu-smi info -t board -c -d": ("anabatic monitor",),
    },
    "nanochat": {
        "npu-smi info": ("anabatic monitor",),
        "bash setup_ascend.sh": ("anabatic env",),
        "python check_npu.py": ("anabatic doctor",),
        "source setup_ascend.sh": ("anabatic env",),
        "bash speedrun_npu.sh":
            ("anabatic run speedrun", "tests/e2e/test_speedrun.py::test_every_stage_of_the_speedrun"),
        STAGES["tokenizer"]: ("anabatic tokenizer train",),
        BASE_ONE_CARD: ("anabatic pretrain --model.depth 12", f"{CONVERTED}[nanochat, one card]"),
        STAGES["base"]: ("anabatic pretrain --model.depth 12 --npus 8",),
        STAGES["mid"]: ("anabatic pretrain --model.path FOLDER --npus 8",),
        STAGES["sft"]: ("anabatic sft --npus 8",),
        STAGES["rl"]: ("anabatic rl --device-batch-size 4 --examples-per-step 16 --npus 8",),
        "watch -n 1 npu-smi info": ("anabatic monitor",),
        "tail -f $ASCEND_HOME/log/plog/plog-*.log": ("anabatic explain",),
    },
    "32b": {
        'python -c "import torch_npu; print(torch_npu.__version__)"': ("anabatic doctor",),
        "vim launch_qwen32b_single.sh": ("-c qwen32b-lora-curriculum",),
        "bash launch_qwen32b_single.sh": ("anabatic sft --npus 8",),
        "bash launch_qwen32b_multinode.sh": ("anabatic launch --nnodes 2 --node-rank 0 --master-addr ADDRESS",),
        "tail -f ./trained_models/qwen32b-lora-sft/trainer_log.txt":
            ("anabatic monitor runs/qwen32b-lora", "metrics.jsonl"),
        "cat ./trained_models/qwen32b-lora-sft/deepspeed_*.log": ("rank-0.log",),
    },
    "vessel": {
        "echo 'source /usr/local/Ascend/ascend-toolkit/set_env.sh' >> ~/.bashrc": ("anabatic env",),
        "source ~/.bashrc": ("anabatic env",),
        "npu-smi info": ("anabatic monitor",),
        f"{IS_THERE}print(f'NPU available: {{torch_npu.npu.is_available()}}'); "
        "print(f'NPU device count: {torch_npu.npu.device_count()}')\"": ("anabatic doctor",),
        "./run_training_npu.sh check": ("anabatic doctor",),
        "./run_training_npu.sh full": ("anabatic run vessel",),
        "./run_training_npu.sh pretrain": ("anabatic classify pretrain",),
        "./run_training_npu.sh finetune /path/to/pretrained/model": ("anabatic classify train --model.path FOLDER",),
        "watch -n 1 npu-smi info": ("anabatic monitor",),
        "watch -n 1 npu-smi info -t power": ("anabatic monitor",),
        "watch -n 1 npu-smi info -t usages": ("anabatic monitor",),
        "tail -f ../model_out/logs/pretrain_npu_*.log": ("rank-0.log",),
        "tail -f ../model_out/logs/finetune_npu_*.log": ("rank-0.log",),
        "grep -i error ../model_out/logs/*.log": ("anabatic explain",),
        PREDICT: ("anabatic classify predict",),
        "ping 127.0.0.1": ("anabatic doctor",),
        "netstat -tlnp | grep 29500": ("anabatic doctor", "anabatic launch --check"),
        "pkill -f train_pretrain_npu.py": ("the same command",),
        "python -m pytest tests/test_npu.py": ("anabatic sim --npus 8 -- python -m pytest tests/test_npu.py",),
        "python benchmark_npu.py": ("anabatic bench train",),
    },
    "swift": {
        "npu-smi info -t topo": ("anabatic doctor",),
        "npu-smi info": ("anabatic monitor",),
        ONE_CARD: ("anabatic sft -c qwen-lora", f"{CONVERTED}[swift, one card]"),
        FOUR_CARDS: ("anabatic sft -c qwen-lora --npus 4", f"{CONVERTED}[swift, ddp]"),
        f"{FOUR_CARDS} --deepspeed default-zero2":
            ("anabatic sft -c qwen-lora --npus 4 --parallel.deepspeed NAME", f"{CONVERTED}[swift, zero2]"),
        f"{FOUR_CARDS} --deepspeed default-zero3":
            ("anabatic sft -c qwen-lora --npus 4 --parallel.deepspeed default-zero3", f"{CONVERTED}[swift, zero3]"),
        ORIGINAL: ("anabatic chat --model Qwen/Qwen1.5-7B-Chat", f"{CONVERTED}[swift, model]"),
        ADAPTER: ("anabatic infer --ckpt-dir FOLDER",),
    },
}  # fmt: skip
"""Chapter -> what a guide has typed -> what a row of the page says in its place, and tests that run more of it."""


def lines_of(text: str) -> list[str]:
    """Return what a guide has typed in its blocks for the shell: each line once, on one line, without comments."""
    found: dict[str, None] = {}
    for language, block in FENCE.findall(text):
        if language not in ("bash", "shell"):
            continue
        block = re.sub(r"\\\s*\n\s*", " ", textwrap.dedent(block))
        block = PYTHON.sub(lambda code: f'python -c "{"; ".join(code[1].split(chr(10))).strip("; ")}"', block)
        for line in block.splitlines():
            line = " ".join(re.sub(r"\s+#.*", "", PROMPT.sub("", line)).split())
            if line and not SHOWN.match(line):
                found[re.sub(r'"(\S+)"', r"\1", line)] = None
    return list(found)


@functools.cache
def guides() -> dict[str, str]:
    """Return the text of each guide by the name of its chapter; nothing where they are not beside the checkout."""
    found = sorted(SEEDS.glob("*.txt"))
    return {name: path.read_text(encoding="utf-8") for name, path in zip(NAMES, found, strict=False)}


def json_rows(chapter: str) -> list[dict[str, Any]]:
    """Return the last rows of data that a guide shows as JSON; none where there is no guide."""
    blocks = [block for language, block in FENCE.findall(guides().get(chapter, "")) if language == "json"]
    return json.loads(blocks[-1]) if blocks else []


def rows_of(line: str, chapter: str) -> list[Row]:
    """Return the rows of a chapter that name the line on their left; `...` there stands for anything."""
    return [
        row
        for row in page.chapters()[chapter].rows
        if any(re.search(re.escape(span).replace(r"\.\.\.", ".*"), line) for span in SPAN.findall(row.theirs))
    ]


def needs_nothing(row: Row) -> bool:
    """True where the page says that nothing is to be typed here, or that an installation is."""
    return row.here.partition(";")[0] in NOTHING or {item.kind for item in row.items} == {"extra"}
