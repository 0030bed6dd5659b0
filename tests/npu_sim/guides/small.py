"""The commands of the page in seconds: few steps of few tokens on two devices, and what a command would ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

ALL = os.environ.get("ANABATIC_TEST_GUIDES") == "all"
TRAIN = {
    "batch.seq-len": "64", "batch.micro-batch-tokens": "128", "batch.global-batch-tokens": "512",
    "schedule.max-steps": "3", "log.every": "1", "save.every": "2", "eval.every": "2", "optim.lr": "0.003",
}  # fmt: skip
ROWS = {**TRAIN, "batch.seq-len": "512", "batch.micro-batch-tokens": "1024", "batch.global-batch-tokens": "2048"}
SIZES: dict[str, Mapping[str, str]] = {
    "tokenizer train": {"vocab-size": "320"},
    "pretrain": {**TRAIN, "model.depth": "2", "eval.tokens": "1000", "data.valid-fraction": "0.2"},
    "sft": {**TRAIN, "data.valid-fraction": "0.1"},
    "rl": {
        "batch.seq-len": "64", "examples-per-step": "4", "num-samples": "4", "device-batch-size": "2",
        "sampling.max-new-tokens": "8", "schedule.max-steps": "2", "eval.every": "0", "eval.rows": "1",
        "save.every": "1", "data.valid-fraction": "0.1",
    },
    "classify words": {},
    "classify pretrain": {**ROWS, "data.valid-fraction": "0.2"},
    "classify train": {**ROWS, "data.valid-fraction": "0.2"},
    "classify predict": {},
    "chat": {"prompt": "the wind", "sampling.max-new-tokens": "4"},
    "infer": {"ckpt-dir": "output/checkpoint-2", "sampling.max-new-tokens": "4"},
    "merge": {},
    "bench train": {"repeats": "1", "warm-up": "0", "steps": "1", "plot": "off"},
}  # fmt: skip
"""Command -> settings that take the place of the page's, or are added."""
COUNTS = ("--npus", "--nproc")
DEVICES = "8" if ALL else "2"
"""Of the machine: the page's eight are two, unless everything is asked for."""
SEVERAL = ("launch", "sft", "plan", "classify train -c vessel-8npu")
"""Commands that then have both; the others have one, which takes half as long."""
LAUNCHED = "runs/launched"
"""Run folder of a launched job: another command of the page has already ended in the recipe's folder."""


PIPELINES = {
    "speedrun": ("-c", "overlays/tiny", "-c", "small.yaml", "--set", "nproc=2"),
    "vessel": ("-c", "small.yaml"),
}
"""Pipeline -> what is laid over it; small.yaml is written by world.py."""


def small(words: Sequence[str]) -> list[str]:
    """Return a command of the page, made small; what stands behind `--` is made small as well."""
    words = list(words)
    several = " ".join(words).startswith(SEVERAL)
    if words[0] == "run":
        return [*words, *PIPELINES.get(words[1], ())]
    if "--" in words:
        cut = words.index("--")
        inner = words[cut + 1 :]
        inner = ["anabatic", *small(inner[1:])] if inner[0] == "anabatic" else small(inner)
        inner = with_option(inner, "--out", LAUNCHED) if words[0] == "launch" else inner
        return [*small(words[:cut]), "--", *inner]
    for option in COUNTS:
        if option in words:
            at = words.index(option) + 1
            words[at] = str(min(int(words[at]), int(DEVICES) if ALL or several else 1))
    for name, value in SIZES.get(command(words), {}).items():
        words = with_option(words, f"--{name}", value)
    return words


def command(words: Sequence[str]) -> str:
    """Return the longest name of SIZES that the words begin with."""
    fitting = [name for name in SIZES if list(words[: len(name.split())]) == name.split()]
    return max(fitting, key=len, default="")


def with_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """Return the words with the option's value changed, or the option added."""
    words = list(words)
    if option not in words:
        return [*words, option, value]
    words[words.index(option) + 1] = value
    return words
