"""Recipes from commands, scripts and files of other programs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.cli import app
from anabatic.config.loading import settings, yaml_reader
from anabatic.convert import converter, peer_tables
from anabatic.convert.command_finder import SHARED_NAMES
from anabatic.core.errors import AnabaticError, ConfigError
from anabatic.recipes.pipeline import stage_plan


def job(peer: str, *words: str, command: str | None = None) -> tuple[str, Any, list[str]]:
    """Return the command of ours, the job that the printed recipe makes, and the notes."""
    made = converter.convert_command(peer, words, command)
    usage = made.text.splitlines()[0].partition("anabatic ")[2].removesuffix(" -c FILE")
    name = usage.partition(" -- ")[2] or usage
    tree = yaml_reader.parse_yaml(made.text, "printed").tree
    return name, settings.build_job(name, tree, "printed"), made.messages


ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "comms_logger": {},
}
SWIFT = """
# 4 cards
NPROC_PER_NODE=4 \\
ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model_type qwen1half-7b-chat \\
    --dataset blossom-math-zh \\
    --num_train_epochs 5 \\
    --sft_type lora \\
    --output_dir output \\
    --deepspeed default-zero3 \\
"""


def test_swift_with_variables_and_joined_lines() -> None:
    name, made, notes = job("swift", SWIFT)
    assert name == "sft"
    assert (made.model, made.tuner, made.out) == ("Qwen/Qwen1.5-7B-Chat", "lora", "output")
    assert (made.device.nproc, made.parallel.strategy) == (4, "zero3")
    assert (made.lora.r, made.lora.alpha, made.lora.dropout, made.optim.lr) == (8, 32, 0.05, 1e-4)
    assert (made.batch.micro_batch_tokens, made.batch.global_batch_tokens) == (2048, 16 * 2048)
    assert (made.data.train, made.hub) == (["ms:AI-ModelScope/blossom-math-v2:train"], "modelscope")
    assert made.data.columns == {"query": "input", "response": "output"}
    assert any(note.startswith("changed: blossom-math-zh: ms-swift also writes") for note in notes)
    assert converter.convert_command("swift", [SWIFT]).text.startswith(
        "# ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 anabatic sft -c FILE"
    )


def test_rows_become_tokens() -> None:
    line = "swift sft --model M --dataset a.jsonl --max_length 1000 --per_device_train_batch_size 3"
    for processes in (1, 4):
        typed = f"NPROC_PER_NODE={processes} {line} --gradient_accumulation_steps 2"
        _, made, notes = job("swift", typed)
        assert (made.batch.micro_batch_tokens, made.batch.global_batch_tokens) == (3000, 6000 * processes)
        assert any("tokens, not rows, at 1000 a row" in note for note in notes)


LLAMAFACTORY = {
    "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "q_proj,v_proj",
    "dataset": "identity,mine",
    "dataset_dir": "data",
    "template": "qwen",
    "cutoff_len": 1024,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": "1.0e-4",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "val_size": 0.1,
    "report_to": "none",
    "deepspeed": "examples/deepspeed/ds_z3_offload_config.json",
    "lora_rnk": 8,
    "resume_from_checkpoint": None,
}


def test_llamafactory_yaml(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml_reader.dump_yaml(LLAMAFACTORY))
    (tmp_path / "data").mkdir()
    listed = {"mine": {"file_name": "mine.json", "num_samples": 50}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    name, made, notes = job("llamafactory", str(file))
    assert (name, made.lora.target_modules, made.recompute) == ("sft", ["q_proj", "v_proj"], "full")
    assert made.data.train == ["identity", "data/mine.json#50"]
    assert (made.data.valid_fraction, made.device.dtype, made.optim.lr) == (0.1, "bf16", 1e-4)
    assert (made.schedule.decay, made.schedule.decay_ratio, made.schedule.final_lr_ratio) == ("cosine", 0.9, 0.0)
    assert (made.parallel.strategy, made.parallel.offload) == ("zero3", "cpu")
    assert made.batch.global_batch_tokens == 16 * 1024
    assert 'not known: lora_rnk: 8. Did you mean "lora_rank"?' in notes
    assert made.log.sinks == []


def test_a_command_with_a_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model_name_or_path: M\nstage: sft\ndataset: a.json\nlearning_rate: 1.0e-5\n")
    script = tmp_path / "run.sh"
    script.write_text("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml learning_rate=3e-5 stage=dpo pref_loss=orpo\n")
    name, made, _ = job("llamafactory", str(script))
    assert (name, made.optim.lr, made.loss_type, made.data.train) == ("dpo", 3e-5, "orpo", ["a.json"])


@pytest.mark.parametrize(
    ("kind", "command", "loss"),
    [
        ("dpo", "dpo", "sigmoid"),
        ("kto", "dpo", "kto"),
        ("simpo", "dpo", "simpo"),
        ("rm", "reward", ""),
        ("grpo", "rl", ""),
    ],
)
def test_kinds_of_swift_rlhf(kind: str, command: str, loss: str) -> None:
    name, made, _ = job("swift", f"swift rlhf --rlhf_type {kind} --model M --dataset a.jsonl --num_train_epochs 2")
    assert name == command
    assert made.schedule.epochs == 2
    if loss:
        assert made.loss_type == loss
        assert made.batch.micro_batch_tokens == 2 * made.batch.seq_len
    if command == "rl":
        assert made.schedule.max_steps is None


def test_grpo_counts_answers() -> None:
    line = "swift rlhf --rlhf_type grpo --model M --dataset a.jsonl --num_generations 8 --reward_funcs accuracy format"
    _, made, _ = job(
        "swift", f"NPROC_PER_NODE=2 {line} --per_device_train_batch_size 4 --gradient_accumulation_steps 4"
    )
    assert (made.num_samples, made.device_batch_size, made.examples_per_step) == (8, 4, 4)
    assert (made.rewards, made.algorithm) == (["answer", "format"], "grpo")
    other = f"{line} own --loss_type grpo --advantage_estimator rloo --system prompt.txt"
    _, made, notes = job("swift", other)
    assert (made.algorithm, made.rewards, made.system) == ("rloo", ["answer", "format"], None)
    assert any("own of --reward_funcs" in note for note in notes)
    assert any("prompt.txt: a file there" in note for note in notes)


def test_a_chat_with_a_training_file_stays_a_chat(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: M\nstage: sft\n")
    assert job("llamafactory", f"llamafactory-cli chat {tmp_path / 'a.yaml'}")[0] == "chat"


@pytest.mark.parametrize("word", ["yes", "True", "on", "no", "off", "False"])
def test_switches_in_all_their_spellings(word: str) -> None:
    _, made, notes = job("swift", f"swift sft --model M --dataset d.jsonl --gradient_checkpointing {word}")
    assert made.recompute == ("full" if word in ("yes", "True", "on") else "none")
    assert not any("--gradient_checkpointing" in line for line in notes)


def test_what_has_no_like_is_told() -> None:
    name, _, notes = job(
        "llamafactory", "llamafactory-cli train stage=ppo dataset=a.json reward_model=R mask_history=1"
    )
    assert name == "rl"
    assert any("its critic and reward model have no place here" in note for note in notes)
    name, made, notes = job("swift", "swift rlhf --rlhf_type rm --model M --dataset a.jsonl")
    assert (name, made.tuner, made.optim.lr) == ("reward", "auto", None)
    assert any("a reward model is trained whole" in note for note in notes)
    _, _, notes = job("deepspeed", "deepspeed --hostfile hosts a.py --lr_scheduler_type polynomial")
    assert any("anabatic launch --hosts FILE` (one command for all machines)" in note for note in notes)
    assert any("--lr_scheduler_type polynomial: known are linear" in note for note in notes)


def test_another_kind_of_adapter_is_told() -> None:
    _, made, notes = job("llamafactory", "llamafactory-cli train finetuning_type=oft quantization_bit=4 dataset=a.json")
    assert (made.tuner, made.quantize) == ("lora", "nf4")
    assert "changed: finetuning_type=oft: no counterpart; lora is the nearest, and taken" in notes


def test_pretraining_of_others_is_adamw() -> None:
    typed = "llamafactory-cli train stage=pt model_name_or_path=M dataset=a.json"
    _, made, _ = job("llamafactory", typed)
    assert (made.optim.name, made.optim.weight_decay, made.optim.eps, made.optim.beta2) == ("adamw", 0.0, 1e-8, 0.999)


def test_infer_and_chat_of_swift() -> None:
    assert job("swift", "swift infer --model_type qwen1half-7b-chat")[0] == "chat"
    name, made, _ = job("swift", "swift infer --ckpt_dir xxx/checkpoint-xxx --load_dataset_config true")
    assert (name, made.ckpt_dir, made.inputs) == ("infer", "xxx/checkpoint-xxx", ["ROWS.jsonl"])
    name, made, _ = job("swift", "swift export --adapters out/checkpoint-9 --merge_lora true")
    assert (name, made.model) == ("export", "out/checkpoint-9")


def test_args_json_of_swift(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(
        json.dumps(
            {"model": "M", "dataset": ["a.jsonl#500"], "max_length": 4096, "hub_token": None, "odd": 3, "off": False}
        )
    )
    _, made, notes = job("swift", str(file))
    assert (made.data.train, made.batch.seq_len) == (["a.jsonl#500"], 4096)
    assert not any("hub_token" in note for note in notes)
    assert "not known: 1 keys: odd" in notes
    whole = {"model": "M", "dataset": "a.jsonl", "deepspeed": ZERO3, "ENV": {"NPROC_PER_NODE": 2}}
    file.write_text(json.dumps(whole))
    _, made, notes = job("swift", str(file))
    assert (made.device.nproc, made.parallel.strategy, made.parallel.offload) == (2, "zero3", "cpu")
    assert (made.batch.micro_batch_tokens, made.batch.global_batch_tokens) == (2048, 16 * 2048)
    assert "left out: comms_logger in deepspeed" in notes


LAUNCH = """
export NNODES=2 MASTER_ADDR=10.0.0.1
ARGS='--nproc_per_node 8 --nnodes 2'
torchrun $ARGS --node_rank=$RANK_HERE --master_addr=$MASTER_ADDR finetune.py --deepspeed ds_config_zero3.json \\
  --base_model M --data_path rows.json --lora_r 64 --target_modules q_proj v_proj --cutoff_len 1024 \\
  --use_curriculum True --curriculum_seed 42 --warmup_steps 100 --weight_decay 0.01
"""


def test_a_deepspeed_file_and_the_script_that_uses_it(tmp_path: Path) -> None:
    file = tmp_path / "ds_config_zero3.json"
    file.write_text(json.dumps(ZERO3))
    name, made, notes = job("deepspeed", str(file))
    assert (name, made.parallel.strategy, made.parallel.offload) == ("sft", "zero3", "cpu")
    assert (made.batch.micro_batch_tokens, made.batch.global_batch_tokens) == (2048, 8 * 2048)
    assert any(note.startswith("left out: comms_logger") for note in notes)
    script = tmp_path / "launch.sh"
    script.write_text(LAUNCH)
    name, made, notes = job("deepspeed", str(script))
    assert (name, made.tuner, made.lora.r, made.curriculum.use, made.seed) == ("sft", "lora", 64, True, 42)
    assert (made.lora.target_modules, made.batch.global_batch_tokens) == (["q_proj", "v_proj"], 128 * 1024)
    first = converter.convert_command("deepspeed", [str(script)]).text.splitlines()[0]
    assert first == "# anabatic launch --nnodes 2 --node-rank R --nproc 8 --master-addr 10.0.0.1 -- sft -c FILE"
    assert any("--warmup_steps 100" in note for note in notes)
    assert job("deepspeed", str(script), command="pretrain")[0] == "pretrain"
    assert job("deepspeed", "default-zero2")[1].parallel.strategy == "zero2"


def test_only_trainings_of_a_script_are_taken() -> None:
    script = (
        "python setup.py install\npython prepare.py --input a --shards 3\npython -m pip install deepspeed\n"
        "env NPROC_PER_NODE=3 srun --nodes=2 -n 2 torchrun --nproc_per_node 8 train.py --model_name_or_path M\n"
        "python evaluate.py --threshold 3\n"
    )
    name, made, _ = job("deepspeed", script)
    assert (name, made.model, made.device.nproc) == ("sft", "M", 8)
    with pytest.raises(ConfigError, match="no command of DeepSpeed"):
        converter.convert_command("deepspeed", ["python prepare.py --input a"])
    assert job("swift", "env NPROC_PER_NODE=3 nohup swift sft --model M > log 2>&1 &")[1].device.nproc == 3


SPEEDRUN = """
export NANOCHAT_BASE_DIR="$HOME/.cache/nanochat"
if [ -z "$WANDB_RUN" ]; then
    WANDB_RUN=dummy
fi
python -m nanochat.dataset -n 170 &
python -m scripts.tok_train --max-chars=2000000000
NPROC=8
torchrun --standalone --nproc_per_node=$NPROC -m scripts.base_train -- --depth=20 --run=$WANDB_RUN
torchrun --standalone --nproc_per_node=$NPROC -m scripts.base_eval
torchrun --standalone --nproc_per_node=$NPROC -m scripts.mid_train -- --device_batch_size=16 --total_batch_size=262144
torchrun --standalone --nproc_per_node=$NPROC -m scripts.chat_sft -- --target_examples_per_step=32
torchrun --standalone --nproc_per_node=$NPROC -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
torchrun --standalone --nproc_per_node=$NPROC -m scripts.chat_eval -- -i rl -a "GSM8K|MMLU"
python -m scripts.chat_web
"""


def test_a_speedrun_is_a_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "speedrun.sh"
    file.write_text(SPEEDRUN)
    made = converter.convert_command("nanochat", [str(file)])
    whole = settings.build_job("run", yaml_reader.parse_yaml(made.text, "printed").tree, "printed")
    assert list(whole.stages) == ["tokenizer", "base", "base_eval", "mid", "sft", "rl", "eval"]
    assert list(whole.vars) == ["text", "rows", "questions"]
    plan = {one.name: one for one in stage_plan.plan_stages(whole, {"text": "t", "rows": "r", "questions": "q"})}
    assert {name: one.depends_on for name, one in plan.items()} == {
        "tokenizer": (),
        "base": ("tokenizer",),
        "base_eval": ("base",),
        "mid": ("base",),
        "sft": ("mid",),
        "rl": ("sft",),
        "eval": ("rl",),
    }
    assert (plan["base"].job.model.depth, plan["base"].job.device.nproc) == (20, 8)
    assert plan["mid"].job.batch.global_batch_tokens == 262144
    assert plan["eval"].job.tasks == ["gsm8k_chat", "mmlu_chat"]
    assert "then: anabatic serve runs/pipeline/rl" in made.text


def test_several_machines_in_a_pipeline() -> None:
    line = "torchrun --nproc_per_node=8 --nnodes=2 --master_addr=a -m scripts.base_train"
    made = converter.convert_command("nanochat", [f"python -m scripts.tok_train; {line} -- --depth=4"])
    assert any(
        "a pipeline runs on one machine; on several start it by anabatic launch" in note for note in made.messages
    )
    assert "nproc: 8" in made.text


def test_one_stage_of_nanochat() -> None:
    typed = "torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --device-batch-size=16"
    name, made, _ = job("nanochat", typed + " --total-batch-size=262144 --num-iterations=-1 --matrix-lr 0.02")
    assert (name, made.model.depth, made.device.nproc, made.schedule.max_steps) == ("pretrain", 12, 8, None)
    assert (made.batch.micro_batch_tokens, made.batch.global_batch_tokens) == (16 * 2048, 262144)
    name, made, _ = job("nanochat", "python -m scripts.chat_cli -p 'Why is the sky blue?'")
    assert (name, made.prompt) == ("chat", ["Why is the sky blue?"])


def test_a_command_that_runs_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="runs/speedrun.sh is not here"):
        converter.convert_command("nanochat", ["WANDB_RUN=x bash runs/speedrun.sh"])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "speedrun.sh").write_text(SPEEDRUN)
    assert "stages:" in converter.convert_command("nanochat", ["bash runs/speedrun.sh"]).text


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(SWIFT))
    assert job("swift", "-")[1].out == "output"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["swift sft --model M --dataset a.jsonl --lora_rnk 4"],
        ["swift", "sft", "--model", "M", "--lora_rnk", "4"],
    ):
        with pytest.raises(SystemExit) as caught:
            app.main(["config", "from-swift", "--", *words])
        out, err = capsys.readouterr()
        assert caught.value.code == 0
        assert 'not known: --lora_rnk 4. Did you mean "lora_rank"?' in err.splitlines()
        assert "model: M" in out.splitlines()[-40:][0] or "model: M  # --model M" in out


OPTIONS = sorted(
    {name for row in peer_tables.load_tables("transformers").all_rows() for name in row.theirs if name.islower()}
)
VALUE = st.sampled_from(["1", "0", "true", "false", "0.5", "-1", "x", "a,b", "none", "$X", "", "1e-4", "[1"])


@given(st.text(max_size=30), st.sampled_from(["out", "dataset", "model", "system", "run_name", "nonsense"]))
def test_any_text_is_kept_or_an_error(text: str, name: str) -> None:
    words = ["swift", "rlhf", "--rlhf_type", "grpo", f"--{name}={text}"]
    try:
        made = converter.convert_command("swift", words)
    except AnabaticError as error:
        assert error.hint
        return
    tree = yaml_reader.parse_yaml(made.text, "printed").tree
    settings.build_job("rl", tree, "printed")
    if name == "run_name" and text and "$" not in text and "`" not in text:
        assert tree["log"]["name"] == text


@given(st.sampled_from(sorted(SHARED_NAMES)), st.lists(st.tuples(st.sampled_from(OPTIONS), VALUE), max_size=6))
def test_any_options_make_a_good_recipe_or_an_error(peer: str, options: list[tuple[str, str]]) -> None:
    program = {"swift": "swift sft", "llamafactory": "llamafactory-cli train", "deepspeed": "torchrun a.py"}
    words = program.get(peer, "python -m scripts.chat_sft").split()
    try:
        made = converter.convert_command(peer, [*words, *(f"--{name}={value}" for name, value in options)])
    except AnabaticError as error:
        assert error.hint
        return
    settings.build_job("sft", yaml_reader.parse_yaml(made.text, "printed").tree, "printed")
