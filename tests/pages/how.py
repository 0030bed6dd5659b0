"""What becomes of each command of the pages: it runs, it is only read, or it stands in a table with a reason."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from anabatic.config.loading import command_table

ALL = os.environ.get("ANABATIC_TEST_DOCS") == "all"
"""Also what costs more than a moment."""
TRAIN = "--schedule.max-steps 2 --log.every 1 --device.threads 1"
SEQ, MICRO, GLOBAL = (f"--batch.{name}" for name in ("seq-len", "micro-batch-tokens", "global-batch-tokens"))
CHAT = "--sampling.max-new-tokens 4"
SIZES = {
    **dict.fromkeys(("pretrain", "sft", "dpo", "reward", "classify pretrain", "classify train"), TRAIN),
    "pretrain": f"{TRAIN} --model.width 64",
    "rl": "--sampling.max-new-tokens 4 --schedule.max-steps 1 --device-batch-size 4 --log.every 1 --device.threads 1",
    "chat": CHAT,
    "tokenizer train": "--vocab-size 320",
    "infer": CHAT,
    "eval": "--limit 2 --max-new-tokens 4",
    "bench train": "--steps 1 --repeats 1 --warm-up 0",
    "bench scaling": "--steps 1 --repeats 1 --warm-up 0",
    "bench infer": "--repeats 1 --warm-up 0",
    "bench collective": "--repeats 1 --warm-up 0",
    "bench tokenize": "--repeats 1 --warm-up 0",
    "bench io": "--repeats 1 --warm-up 0",
    "bench compare": "--repeats 1 --warm-up 0",
    "monitor": "--once",
}
"""Command -> options that make it short; those that the page gives itself are left as they are there."""


@dataclass(frozen=True)
class How:
    """What becomes of commands that match a pattern from their beginning."""

    pattern: str
    way: str
    """The method of `Visit` that does it; elsewhere: another test does; no: nothing does, for the reason."""
    why: str = ""
    costly: bool = False
    """With ANABATIC_TEST_DOCS=all alone; read otherwise."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that are right here."""
    here: tuple[tuple[str, str], ...] = ()
    """What this machine is asked instead: (regular expression, words)."""
    variables: tuple[tuple[str, str], ...] = ()
    """Set for it."""


NO_MACHINES = "the other machine is not there; tests/cluster/test_nodes.py starts several"
TWO = ((r"--(npus|nproc|device\.nproc) \d+", r"--\1 2"),)
NANO = (*TWO, ("depth 12", "depth 2"), ("seq-len 2048", "seq-len 64"), ("32768", "256"), ("262144", "512"))
FEW = (("trees 250", "trees 3"), ("trees 120", "trees 3"))
HOW = (
    # --- other programs
    How("(pip install|uv tool install|uvx) ", "no", "installing asks an index; scripts/check_install.py does it"),
    # --- models that see, which the stand has not
    How(
        "anabatic (sft --model Qwen/Qwen3-VL|infer --model runs/sft questions|data preview rows.jsonl --model Qwen)",
        "elsewhere",
        "tests/e2e/test_vision.py",
    ),
    How(
        "anabatic (dpo --model runs/sft --data.train pairs.jsonl$|rl --model runs/sft --data.train questions.jsonl"
        "|reward --model runs/sft --data.train pairs.jsonl --tuner lora$|export runs/sft -o models/mine$"
        "|chat --model runs/sft$|serve runs/sft$)",
        "elsewhere",
        "tests/e2e/test_vision_answers.py",
    ),
    How("echo 'source <", "no", "changes the shell's start; tests/unit/cli/test_completion.py types Tab"),
    How(
        "(npu-smi|docker|kubectl|ray start|ray get-auth-token|git clone)\\b",
        "no",
        "needs a driver, a daemon, a cluster or the network",
    ),
    How("helm ", "elsewhere", "needs a cluster; tests/unit/launch/test_chart.py renders the chart"),
    How("source /usr/local/Ascend|python3 -m venv|source .venv", "no", "sets a machine up; CI's is set up by make"),
    How(".venv/bin/pre-commit", "no", "changes the checkout's hooks"),
    How("ssh -L", "no", "needs another machine"),
    How("make ", "elsewhere", "tests/house/test_commands.py: the targets exist; CI runs them"),
    How("python scripts/fetch_web", "elsewhere", "needs npm and the network; tests/house/test_web_libraries.py"),
    How("pytest --npu-sim|PYTHONPATH=. pytest", "elsewhere", "another project; tests/npu_sim/test_pytest_plugin.py"),
    How("anabatic-sim ", "elsewhere", "another distribution; tests/e2e/test_sim_wheel.py"),
    How(
        "python scripts/(torch_npu_tests|pytorch_tests|sim_programs|sim_versions)",
        "elsewhere",
        "takes an hour; tests/npu_sim/test_torch_npu_tests.py runs a sample",
    ),
    How(
        "python scripts/sim_stacks",
        "elsewhere",
        "needs checkouts of seven projects; tests/unit/scripts/test_sim_stacks.py counts in one of its own",
    ),
    How("python benchmarks/", "program", "takes minutes: its options are looked up"),
    How("export ", "run"),
    How("curl ", "curl"),
    How("tar ", "shell"),
    How('eval "\\$\\(anabatic env', "shell"),
    # --- other machines, and what lasts
    How(
        "anabatic (launch .*)?classify train -c vessel-8npu",
        "read",
        "other words; tests/npu_sim/test_recipes.py runs it",
    ),
    How("anabatic launch ray", "read", "needs a cluster of Ray; tests/cluster/test_on_ray.py"),
    How("anabatic data tokenize .*--engine ray", "read", "needs a cluster of Ray; tests/cluster/test_on_ray.py"),
    How("anabatic launch k8s .*--submit", "read", "needs a cluster of Kubernetes"),
    How("anabatic launch (k8s|slurm)", "run"),
    How("anabatic launch --hosts", "read", "needs machines with sshd; tests/cluster/test_sshd.py"),
    How("anabatic launch .*--nnodes", "read", NO_MACHINES),
    How("anabatic launch --check -- sft -c qwen32b", "read", NO_MACHINES),
    How(
        "anabatic run (demo|rl_demo|vision_demo|speedrun|vessel)",
        "dry",
        "minutes; tests/e2e/test_speedrun.py, CI's demo",
    ),
    How("anabatic eval .*--endpoint", "read", "needs a server at node1; tests/unit/evals/test_endpoint.py"),
    How("HF_ENDPOINT=|.* --hub modelscope", "read", "asks a hub; tests/unit/hub/test_model_download.py"),
    How("anabatic export .*--gguf", "read", "needs llama.cpp; tests/unit/export/test_gguf.py"),
    How("anabatic push .*ms:", "read", "needs a token of ModelScope; tests/unit/hub/test_push.py"),
    How("anabatic eval .* --tasks common_sense", "read", "fetches data sets"),
    How("anabatic eval .*task:all#", "run", costly=True, here=(("#500", "#4"), ("#200", "#4"))),
    How("anabatic bench io", "run", costly=True, here=(("/data/bench-io", "runs/bench-io"),)),
    How("anabatic pretrain .*--model.depth 12", "run", costly=True, here=NANO),
    How("anabatic sft .*--chat-template", "run", costly=True),
    How("anabatic sft .*--out output", "run", costly=True, here=(*TWO, ("--out output", "--out runs/output"))),
    How("anabatic bench scaling", "run", costly=True, here=(("1,2,4,8", "1,2"),)),
    How("anabatic bench (compare|train|infer|tokenize)", "run", costly=True, here=TWO),
    How(
        "anabatic eval .* --tasks core --npus",
        "run",
        costly=True,
        here=(*TWO, ("core", "core --tasks-from eval_bundle")),
    ),
    # --- what continues until it is asked to end
    How("anabatic (serve|studio)", "serve"),
    How("anabatic monitor --prom", "metrics"),
    # --- simulated devices
    How("anabatic sim .*npu-smi|anabatic sim .*monitor", "sim"),
    How("anabatic sim", "sim", costly=True),
    # --- several processes, each with its own torch; several measurements
    How("anabatic plan (--sweep|--chip 910B4)", "plan", "1: not as it is typed; it says what fits", codes=(0, 1)),
    How("anabatic .*--(npus|nproc|device.nproc) .*--dry-run|anabatic plan", "plan"),
    How("anabatic .*--dry-run", "plan"),
    How("anabatic (launch|.*--(npus|nproc|device.nproc) [1-9])", "run", costly=True, here=TWO),
    # --- what this machine answers otherwise
    How("anabatic doctor", "run", "1 where something is broken, 2 a warning under --strict", codes=(0, 1, 2)),
    How("anabatic explain$", "run", variables=(("ASCEND_PROCESS_LOG_PATH", "plog"),)),
    How("anabatic classify words ais.csv --tracks.classes", "run", here=(("ais.csv", "named.csv"),)),
    How("anabatic classify train .*--head.trees", "run", here=FEW),
    How("anabatic pretrain .* task:all", "run", here=(("task:all", "task:all#200"),)),
    How("anabatic tokenizer train", "run", here=((r"--vocab-size \d+", "--vocab-size 320"),)),
    How("anabatic monitor .*--device 0,1", "run", here=(("--device 0,1", "--device 0"),)),
    How("anabatic", "run"),
)
"""The first one that matches counts."""


def how(text: str) -> How:
    """Return the row of a command."""
    return next(row for row in HOW if re.match(row.pattern, text))


def sized(words: list[str]) -> list[str]:
    """Add the options that make a command short, also those of the command behind `--`."""
    if "--" in words:
        at = words.index("--")
        return [*sized(words[:at]), "--", *sized(words[at + 1 :])]
    names = [*command_table.COMMANDS, *SIZES]
    name = max((name for name in names if words[: len(name.split())] == name.split()), key=len, default="")
    more = SIZES.get(name, "").split()
    if "--model.path" in words and "--model.width" in more:
        more = TRAIN.split()
    given = dict(zip((word.replace("_", "-") for word in words), [*words[1:], ""], strict=True))
    if more[:2] == TRAIN.split()[:2]:
        more += batch(given)
    added: list[str] = []
    while more:
        option = more.pop(0)
        values = [more.pop(0)] if more and not more[0].startswith("--") else []
        if option not in given:
            added += [option, *values]
    return [*words, *added]


def batch(given: dict[str, str]) -> list[str]:
    """Return small batches that fit to what the page gives: two micro-batches, of at least one whole row."""
    length = int(given.get(SEQ, 64))
    micro = int(given.get(MICRO, max(256, length)))
    return [SEQ, str(length), MICRO, str(micro), GLOBAL, str(2 * micro)]
