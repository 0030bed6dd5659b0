"""Example command lines for the help of every command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from anabatic.config.loading import command_table

HELP_FLAGS = frozenset({"--help", "-h"})
GENERAL_EPILOGUE = "Every command: `anabatic COMMAND --help`. Add `--debug` for the traceback of an error."

COMMAND_EXAMPLES = {
    "run": "recipes/demo.yaml",
    "pretrain": "--tokenizer runs/mine/tokenizer --data corpus/ --model.depth 6",
    "sft": "--model Qwen/Qwen2.5-0.5B --data chats.jsonl --tuner lora --out runs/mine",
    "dpo": "--model runs/mine --data pairs.jsonl --out runs/dpo",
    "rl": "--model runs/mine --data task:arithmetic --out runs/rl",
    "reward": "--model runs/mine --data pairs.jsonl --out runs/reward",
    "merge": "--model runs/mine --out runs/merged",
    "export": "runs/mine --out exported",
    "eval": "runs/mine --data.valid unseen.txt",
    "infer": "-m runs/mine rows.jsonl -o answers.jsonl",
    "chat": '-m runs/mine -p "What did you read?"',
    "serve": "runs/mine --port 8000",
    "tokenizer train": "--data.train corpus/ --vocab-size 16384 --out runs/mine/tokenizer",
    "tokenizer eval": "--tokenizers runs/mine/tokenizer models/other --data.valid unseen.txt",
    "classify words": "ais/ -o words.jsonl",
    "classify pretrain": "--data words.jsonl --out runs/vessel-words",
    "classify train": "--data words.jsonl --out runs/vessel",
    "classify predict": "others.csv -m runs/vessel -o predictions.jsonl",
    "classify eval": "-m runs/vessel --data others.csv",
    "classify map": "predictions.jsonl ais.csv -o map.html",
    "doctor": "--bundle doctor.tar.gz",
    "env": "--explain",
    "explain": "runs/mine",
    "launch": "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc 8 -- sft -c recipe.yaml",
    "launch slurm": "--nnodes 2 --nproc 8 --submit -- sft -c recipe.yaml",
    "launch k8s": "--image my/anabatic --nnodes 2 --nproc 8 -- sft -c recipe.yaml",
    "launch ray": "--nnodes 2 --nproc 8 -- sft -c recipe.yaml",
    "plan": "--chip 910B3 --npus 8 --nodes 2 -- sft -c recipe.yaml",
    "bench train": "-- sft -c recipe.yaml",
    "bench infer": "--model runs/mine --requests 32",
    "bench tokenize": "--tokenizer runs/mine/tokenizer --data corpus/",
    "bench collective": "--nproc 8 --mib 1 16 256",
    "bench scaling": "--npus 1,2,4,8 -- sft -c recipe.yaml",
    "bench io": "--model runs/mine --out /mnt/disk/bench",
    "bench compare": '--ours "sft -c recipe.yaml --out {out}" -- python peer.py',
    "checkpoint list": "runs/mine",
    "checkpoint verify": "runs/mine",
    "checkpoint export": "runs/mine --out model",
    "sim": "--npus 8 --chip 910B3 -- torchrun --nproc_per_node 8 train.py",
    "sim status": "",
    "sim clean": "",
    "monitor": "--run runs/mine",
    "config show": "sft",
    "config check": "recipe.yaml",
    "config from-swift": "'swift sft --model Qwen/Qwen2.5-7B --dataset rows.jsonl'",
    "config from-llamafactory": "examples/train_lora/llama3_lora_sft.yaml",
    "config from-deepspeed": "ds_z3_config.json",
    "config from-nanochat": "speedrun.sh",
}
"""Command -> example arguments."""


def make_epilogue(tokens: Sequence[str], show_all: bool = False) -> str:
    """Return the epilogue of the help of a command.

    Args:
        tokens: arguments of the command line.
        show_all: the help lists all settings; otherwise the last line says how many are missing.
    """
    leading = list(takewhile(lambda token: not token.startswith("-"), tokens))
    name = next((name for name in (" ".join(leading[:2]), *leading[:1]) if name in COMMAND_EXAMPLES), "")
    if not name:
        return GENERAL_EPILOGUE
    epilogue = (
        f"For example: `anabatic {f'{name} {COMMAND_EXAMPLES[name]}'.strip()}`\n\nAdd `--debug` for the "
        f"traceback of an error."
    )
    if show_all or name not in command_table.COMMANDS or HELP_FLAGS.isdisjoint(tokens):
        return epilogue
    from anabatic.config.loading import common_settings  # the general help has none

    num_further = common_settings.count_further_settings(name)
    return f"{epilogue}\n\n{num_further} more settings: `anabatic {name} --help --all`" if num_further else epilogue
