"""What the guides have their readers type, converted, and the recipe run on simulated NPUs with a small model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from anabatic.config.loading import yaml_reader
from anabatic.core import json_reader
from npu_sim.guides import page, small, world
from npu_sim.guides.run import Done, Story
from npu_sim.guides.typed import ADAPTER, BASE_ONE_CARD, FOUR_CARDS, ONE_CARD, ORIGINAL, STAGES, TRAJECTORY

SCRIPT = "deepspeed --num_gpus 8 finetune_npu_deepspeed.py --deepspeed ds_config_zero3.json"
LORA = "--lora_r 64 --lora_alpha 128 --lora_dropout 0.05 --target_modules q_proj k_proj v_proj o_proj"
RATES = "--learning_rate 2e-5 --num_epochs 3 --warmup_steps 100 --weight_decay 0.01"
CURRICULUM = "--use_curriculum True --curriculum_seed 42 --micro_batch_size 2 --cutoff_len 1024"
CASES: dict[str, tuple[str, str, str, bool]] = {
    "swift, one card": ("swift", "swift", ONE_CARD, True),
    "swift, full": ("swift", "swift", FOUR_CARDS.replace("lora", "full"), False),
    "swift, ddp": ("swift", "swift", FOUR_CARDS, True),
    "swift, zero2": ("swift", "swift", f"{FOUR_CARDS} --deepspeed default-zero2", True),
    "swift, zero3": ("swift", "swift", f"{FOUR_CARDS} --deepspeed default-zero3", True),
    "swift, model": ("swift", "swift", ORIGINAL, True),
    "swift, adapter": ("swift", "swift", ADAPTER, False),
    "deepspeed, file": ("32b", "deepspeed", "ds_config_zero3.json", True),
    "deepspeed, script": ("32b", "deepspeed", f"{SCRIPT} {CURRICULUM} {LORA} {RATES}", False),
    "torchrun": ("trajectory", "deepspeed --command 'classify train'", TRAJECTORY, False),
    "launcher": ("trajectory", "deepspeed --command 'classify train'", "python launch_npu_training.py --npus 8", False),
    "nanochat, one card": ("nanochat", "nanochat", BASE_ONE_CARD, True),
}  # fmt: skip
"""Case -> chapter that has the files, `config from-...`, what is converted, and whether it always runs."""
FILLED = {
    "swift": "--data.train rows.jsonl --data.columns query=query response=response",
    "32b": "--data.train rows.json --model MODEL",
    "nanochat": "--data.train texts --tokenizer runs/tokenizer",
    "trajectory": "--data.train rows.jsonl --model.path MODEL",
}
"""Chapter -> what a reader fills in for a training."""
PIPELINE = """
vars: {text: texts, rows: chats.jsonl, questions: maths.jsonl}
stages:
  tokenizer: {job: %(tokenizer)s}
  base: {job: %(base)s}
  mid: {job: %(mid)s}
  sft: {job: %(sft)s}
  rl: {job: %(rl)s}
"""
COMMANDS = {"tokenizer": "tokenizer train", "base": "pretrain", "mid": "pretrain", "sft": "sft", "rl": "rl"}


@pytest.fixture(scope="module")
def model(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.model(tmp_path_factory.mktemp("model"))


def story(folder: Path, made: Path, chapter: str) -> Story:
    return Story(page.chapters()[chapter], world.home(folder / chapter, made, chapter))


def good(done: Done) -> str:
    assert done.code == 0, f"{done.line}\n{done.out[-1500:]}\n{done.err[-3000:]}"
    return done.out


def convert(told: Story, program: str, what: str) -> tuple[str, dict[str, str]]:
    """Convert, keep the recipe as recipe.yaml, and return the command that its first line says, and its variables."""
    recipe = good(told.run(f"anabatic config from-{program} {shlex.quote(what)}"))
    (told.folder / "recipe.yaml").write_text(recipe)
    found = re.fullmatch(r"# ((?:\w+=\S+ )*)anabatic (.+) -c FILE", recipe.splitlines()[0])
    assert found is not None, recipe.splitlines()[0]
    return found[2], dict(told.variable(pair) for pair in found[1].split())


@pytest.mark.parametrize("case", CASES)
def test_what_is_converted_runs(tmp_path: Path, model: Path, case: str) -> None:
    chapter, program, what, always = CASES[case]
    if not (always or small.ALL):
        pytest.skip("ANABATIC_TEST_GUIDES=all runs it")
    told = story(tmp_path, model, chapter)
    name, variables = convert(told, program, what)
    if chapter == "nanochat":
        good(told.run("anabatic tokenizer train --data texts --out runs/tokenizer"))
    if name == "chat":
        good(told.run(f"anabatic {name} -c recipe.yaml", variables))
        return
    if name == "infer":  # of what a training here has saved
        good(told.run("anabatic sft -c qwen-lora --model MODEL --data rows.jsonl --out output"))
        good(told.run("anabatic infer rows.jsonl -c recipe.yaml", variables))
        return
    devices = min(int(yaml_reader.read_yaml(told.folder / "recipe.yaml").tree.get("device", {}).get("nproc", 1)), 2)
    line = f"anabatic {name} -c recipe.yaml --out converted --npus {devices} {FILLED[chapter]}"
    good(told.run(line, variables))
    rows = [
        row
        for row in json_reader.read_json_lines(told.folder / "converted" / "metrics.jsonl")
        if row["kind"] == "train"
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.skipif(not small.ALL, reason="ANABATIC_TEST_GUIDES=all runs it")
def test_the_guides_nanochat_as_one_pipeline(tmp_path: Path, model: Path) -> None:
    told = story(tmp_path, model, "nanochat")
    (told.folder / "speedrun.sh").write_text("\n".join(STAGES.values()) + "\n")
    recipe = good(told.run("anabatic config from-nanochat speedrun.sh"))
    (told.folder / "recipe.yaml").write_text(recipe)
    assert list(yaml_reader.parse_yaml(recipe, "recipe").tree["stages"]) == list(STAGES)
    (told.folder / "small.yaml").write_text(PIPELINE % {stage: overlay(stage) for stage in STAGES})
    good(told.run("anabatic run recipe.yaml -c small.yaml"))
    ended = {
        row["stage"]: row["state"]
        for row in json_reader.read_json_lines(told.folder / "runs/pipeline/pipeline.jsonl")
        if row["event"] == "stage"
    }
    assert ended == dict.fromkeys(STAGES, "done")


def overlay(stage: str) -> str:
    """Return the small settings of a stage as a tree."""
    tree: dict[str, object] = {}
    options = {
        **small.SIZES[COMMANDS[stage]],
        **({} if stage == "tokenizer" else {"device.nproc": small.DEVICES}),
    }
    if stage == "mid":
        options.pop("model.depth", None)
    for key, value in options.items():
        *sections, last = key.replace("-", "_").split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})  # type: ignore[assignment]
        place[last] = yaml_reader.parse_yaml(f"x: {value}", "value").tree["x"]
    return json.dumps(tree)
