"""Options, keys, commands and files of other programs, typed here: the answer is right, and its line works."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Any

import pytest

from anabatic.cli import app, command_tree, job_command
from anabatic.config.loading import settings as settings_module
from anabatic.convert import foreign_options
from anabatic.core.errors import ConfigError

HUGGING_FACE = "Hugging Face's trainers"
BATCH = {"batch.micro_batch_tokens": 2048, "batch.global_batch_tokens": 2048}

# What is typed for `anabatic sft`, and the settings that it becomes.
BECOMES: dict[str, dict[str, Any]] = {
    "--model_name_or_path Qwen/Qwen3-8B": {"model": "Qwen/Qwen3-8B"},
    "--model-name-or-path Qwen/Qwen3-8B": {"model": "Qwen/Qwen3-8B"},
    "--base_model models/x": {"model": "models/x"},
    "--output_dir runs/x": {"out": "runs/x"},
    "--output_dir=runs/x": {"out": "runs/x"},
    "--learning_rate 2e-5": {"optim.lr": 2e-5},
    "--lr 2e-5": {"optim.lr": 2e-5},
    "--num_train_epochs 3": {"schedule.epochs": 3.0},
    "--epochs 2": {"schedule.epochs": 2.0},
    "--max_steps 50": {"schedule.max_steps": 50},
    "--max_length 512": {"batch.seq_len": 512},
    "--max_seq_length 512": {"batch.seq_len": 512},
    "--cutoff_len 512": {"batch.seq_len": 512},
    "--bf16": {"device.dtype": "bf16"},
    "--bf16 true": {"device.dtype": "bf16"},
    "--fp16 True": {"device.dtype": "fp16"},
    "--torch_dtype bfloat16": {"device.dtype": "bf16"},
    "--lora_rank 16": {"lora.r": 16, "tuner": "lora"},
    "--lora_r 16": {"lora.r": 16, "tuner": "lora"},
    "--lora_alpha 32": {"lora.alpha": 32.0, "tuner": "lora"},
    "--lora_dropout 0.1": {"lora.dropout": 0.1, "tuner": "lora"},
    "--lora_target all": {"lora.target_modules": ["all-linear"], "tuner": "lora"},
    "--target_modules q_proj v_proj": {"lora.target_modules": ["q_proj", "v_proj"], "tuner": "lora"},
    "--use_dora true": {"lora.use_dora": True, "tuner": "lora"},
    "--finetuning_type lora": {"tuner": "lora"},
    "--train_type full": {"tuner": "full"},
    "--sft_type lora": {"tuner": "lora"},
    "--use_peft": {"tuner": "lora"},
    "--load_in_4bit true": {"quantize": "nf4"},
    "--quantization_bit 8": {"quantize": "int8"},
    "--gradient_checkpointing true": {"recompute": "full"},
    "--per_device_train_batch_size 2 --batch.seq-len 1024": BATCH,
    "--batch_size 2 --batch.seq-len 1024": BATCH,
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 1024": {
        "batch.seq_len": 1024, "batch.micro_batch_tokens": 2048, "batch.global_batch_tokens": 8192,
    },
    "--dataset a.jsonl": {"data.train": ["a.jsonl"]},
    "--dataset a.jsonl b.jsonl": {"data.train": ["a.jsonl", "b.jsonl"]},
    "--train_file a.jsonl": {"data.train": ["a.jsonl"]},
    "--val_dataset v.jsonl": {"data.valid": ["v.jsonl"]},
    "--split_dataset_ratio 0.01": {"data.valid_fraction": 0.01},
    "--val_size 0.01": {"data.valid_fraction": 0.01},
    "--dataset_num_proc 4": {"data.workers": 4},
    "--packing false": {},
    "--warmup_ratio 0.03": {"schedule.warmup_ratio": 0.03},
    "--warmup_steps 10 --schedule.max-steps 100": {"schedule.warmup_ratio": 0.1},
    "--lr_scheduler_type linear": {"schedule.decay": "linear"},
    "--weight_decay 0.1": {"optim.weight_decay": 0.1},
    "--adam_beta2 0.95": {"optim.beta2": 0.95},
    "--adam_epsilon 1e-8": {"optim.eps": 1e-8},
    "--max_grad_norm 1.0": {"optim.max_grad_norm": 1.0},
    "--gradient_clipping 1.0": {"optim.max_grad_norm": 1.0},
    "--optim adamw_torch": {"optim.name": "adamw"},
    "--save_steps 100": {"save.every": 100},
    "--save_total_limit 2": {"save.keep_last": 2},
    "--overwrite_output_dir": {"save.resume": "never"},
    "--eval_steps 50": {"eval.every": 50},
    "--logging_steps 5": {"log.every": 5},
    "--report_to tensorboard": {"log.sinks": ["tensorboard"]},
    "--report_to none": {},
    "--run_name mine": {"log.name": "mine"},
    "--early_stopping_patience 3": {"eval.patience": 3},
    "--deepspeed zero3": {"parallel.strategy": "zero3"},
    "--zero_stage 2": {"parallel.strategy": "zero2"},
    "--fsdp full_shard": {"parallel.strategy": "zero3"},
    "--tensor_parallel_size 2": {"parallel.tensor": 2},
    "--sequence_parallel_size 2": {"parallel.context": 2},
    "--context_parallel_size 2": {"parallel.context": 2},
    "--expert_model_parallel_size 2": {"parallel.expert": 2},
    "--pipeline_model_parallel_size 2": {"parallel.pipeline": 2},
    "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 3": {
        "parallel.pipeline": 2, "parallel.pipeline_chunks": 3,
    },
    "--nproc_per_node 8": {"device.nproc": 8},
    "--num_gpus 8": {"device.nproc": 8},
    "--num_processes 8": {"device.nproc": 8},
    "--set learning_rate=2e-5": {"optim.lr": 2e-5},
    "learning_rate=2e-5 output_dir=x": {"optim.lr": 2e-5, "out": "x"},
    "optim.lr=2e-5": {"optim.lr": 2e-5},
}  # fmt: skip

# What needs no setting, or has no counterpart, and a word of the reason.
NOTHING = {
    "--attn_impl flash_attn": ("ms-swift", "nothing to set here", "fused attention"),
    "--flash_attn fa2": ("LLaMA-Factory", "nothing to set here", "fused attention"),
    "--dataloader_num_workers 4": (HUGGING_FACE, "nothing to set here", "by themselves"),
    "--save_strategy steps": (HUGGING_FACE, "nothing to set here", "save.every"),
    "--ddp_find_unused_parameters false": (HUGGING_FACE, "nothing to set here", "automatic"),
    "--streaming true": (HUGGING_FACE, "nothing to set here", "shards"),
    "--do_train": (HUGGING_FACE, "nothing to set here", "command says it"),
    "--trust_remote_code true": (HUGGING_FACE, "no counterpart here", "never run"),
    "--push_to_hub": (HUGGING_FACE, "no counterpart here", "nothing is uploaded"),
    "--use_badam true": ("LLaMA-Factory", "no counterpart here", ""),
    "--use_galore true": ("LLaMA-Factory", "no counterpart here", ""),
    "--rope_scaling linear": (HUGGING_FACE, "no counterpart here", "config.json"),
    "--auto_find_batch_size": (HUGGING_FACE, "no counterpart here", "anabatic plan"),
    "--ddp_timeout 1800": ("launchers", "no counterpart here", "anabatic launch"),
}

# The same for other commands: what is typed, and what stands in the hint; empty: no counterpart.
OTHERS = {
    "pretrain --learning_rate 1e-3": "--optim.lr 0.001",
    "pretrain --model_name_or_path m": "--model.path m",
    "pretrain --gradient_checkpointing true": "--model.recompute full",
    "pretrain --device_batch_size 2 --max_seq_len 512": "--batch.micro-batch-tokens 1024",
    "dpo --pref_beta 0.2": "--beta 0.2",
    "dpo --pref_loss simpo": "--loss-type simpo",
    "dpo --pref_ftx 1.0": "--rpo-alpha 1",
    "reward --output_dir x": "--out x",
    "rl --num_generations 4": "--num-samples 4",
    "rl --max_completion_length 64": "--sampling.max-new-tokens 64",
    "rl --per_device_train_batch_size 4": "--device-batch-size 4",
    "infer --val_dataset a.jsonl": "--inputs a.jsonl",
    "infer --result_path x.jsonl": "--out x.jsonl",
    "infer --max_batch_size 8": "--batching.batch 8",
    "infer --adapters runs/a": "--model runs/a",
    "chat --model_name_or_path m": "--model m",
    "chat --max_new_tokens 8": "--sampling.max-new-tokens 8",
    "chat --learning_rate 1": "",
    "serve m --server_port 9000": "--port 9000",
    "serve m --served_model_name x": "",
    "eval m --eval_limit 10": "--limit 10",
    "export m --export_dir x": "--out x",
    "export m --export_size 2": "--shard-gib 2",
    "merge --output_dir x -m m": "--out x",
    "tokenizer train --model_type qwen --output_dir x": "--out x",
    "tokenizer train --output_dir x": "--out x",
    "classify train --learning_rate 0.001": "--optim.lr 0.001",
    "plan -- sft --lora_rank 4": "plan -- sft --lora.r 4 --tuner lora",
    "launch --nnodes 2 -- sft --bf16": "launch --nnodes 2 -- sft --device.dtype bf16",
}


def ends(capsys: pytest.CaptureFixture[str], line: str) -> tuple[str, str]:
    """Type a line that is wrong; return its error and its hint."""
    with pytest.raises(SystemExit) as caught:
        app.main(shlex.split(line))
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert out == "" and error.startswith("error: ") and hint.startswith("hint: ")
    return error, hint.removeprefix("hint: ")


def settings(hint: str) -> dict[str, Any]:
    """Return what the line of a hint sets, as the command itself reads it."""
    words = shlex.split(hint)
    assert words[0] == "anabatic", hint
    _, line = command_tree.parse_command("sft", words[2:])
    tree = job_command.read_job_options("sft", line).tree
    whole = {"model": "m", "data": {"train": ["a.jsonl"]}}
    made = settings_module.build_job("sft", settings_module.merge_trees(whole, checked(tree)), "")
    return flat(settings_module.job_to_dict(made))


def checked(tree: dict[str, Any]) -> dict[str, Any]:
    from anabatic.config.loading import command_table, validation

    return validation.check_section(tree, command_table.get_command("sft").import_job_class(), validation.OptionNamer())


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@pytest.mark.parametrize("typed", BECOMES)
def test_options_of_other_programs_become_ours(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    if typed == "optim.lr=2e-5":  # ours, and no option
        hint = ends(capsys, f"sft {typed}")[1]
        assert hint == "anabatic sft --optim.lr 2e-5"
        return
    error, hint = ends(capsys, f"sft {typed}")
    assert error.startswith("error: unknown ")
    made = settings(hint)
    assert {key: made[key] for key in BECOMES[typed]} == BECOMES[typed]


@pytest.mark.parametrize("typed", NOTHING)
def test_what_has_no_counterpart_says_why(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    owner, said, why = NOTHING[typed]
    error, hint = ends(capsys, f"sft --model m {typed}")
    assert f"(of {owner}): {said}" in error and why in error
    assert "Did you mean" not in error
    assert hint == "anabatic sft --model m"


@pytest.mark.parametrize("typed", OTHERS)
def test_other_commands_answer_too(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint = ends(capsys, typed)
    assert OTHERS[typed] in hint, error
    assert ("no counterpart" in error) or OTHERS[typed]


def test_every_word_of_a_line_is_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    typed = (
        "sft --model_name_or_path Qwen/Qwen3-8B --dataset a.jsonl --template qwen --finetuning_type lora "
        "--output_dir saves/x --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --cutoff_len 1024 "
        "--learning_rate 1e-4 --num_train_epochs 3 --seed 7 --bf16 --report_to none"
    )
    error, hint = ends(capsys, typed)
    assert '"--model_name_or_path" (of LLaMA-Factory): --model here' in error and "more" in error
    made = settings(hint)
    assert (made["model"], made["out"], made["seed"], made["tuner"]) == ("Qwen/Qwen3-8B", "saves/x", 7, "lora")
    assert (made["batch.micro_batch_tokens"], made["batch.global_batch_tokens"]) == (1024, 8192)


@pytest.mark.parametrize(("typed", "meant"), [("--optim.lrr", "--optim.lr"), ("--modle", "--model")])
def test_slips_are_still_guessed(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f'Did you mean "{meant}"?' in ends(capsys, f"sft {typed} 1")[0]


def test_a_known_word_is_never_guessed_by_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in sorted(foreign_options._option_names("transformers")) if name.islower()]
    near = [name for name in names if difflib.get_close_matches(name, ["model", "seed", "optim.lr", "save.every"])]
    assert len(near) > 8
    for name in [*near, "output_dir", "save_steps", "logging_steps"]:
        if name in ("model", "seed", "tokenizer", "beta"):
            continue
        try:
            answer = foreign_options.translate_options("sft", [foreign_options.PeerOption(name, "1", f"--{name}")])
        except ConfigError:
            continue
        assert [word.original_text for word in answer.words] == [f"--{name}"] and not answer.unknown


LLAMA_FACTORY = (
    "model_name_or_path: Q/q\nstage: dpo\nfinetuning_type: lora\ndataset: a\ncutoff_len: 64\noutput_dir: x\n"
)
SWIFT = "model: Q/q\ntrain_type: lora\ndataset: [a.jsonl]\nsplit_dataset_ratio: 0.1\noutput_dir: x\n"
DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'
TRAINER = "output_dir: x\nlearning_rate: 1.0e-5\nnum_train_epochs: 2\n"
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_NPU\nnum_processes: 8\nmixed_precision: bf16\n"
)
ARGS = '{"model": "Q/q", "train_type": "lora", "tuner_type": "lora", "dataset": ["a.jsonl"], "output_dir": "x"}'
PIPELINE = "out: x\nstages:\n  one: {command: sft, job: {model: m, data: {train: [a.jsonl]}}}\n"
OURS = "tokenizer: t\ndata: {train: [a.txt]}\nmodel: {depth: 4}\n"

# File, its text, the line that is given it, the title in the error, the whole hint.
FILES = [
    ("a.yaml", LLAMA_FACTORY, "dpo -c a.yaml --out z", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic dpo -c a-anabatic.yaml --out z"),
    ("a.yaml", LLAMA_FACTORY, "sft a.yaml", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic dpo -c a-anabatic.yaml"),
    ("a.yaml", LLAMA_FACTORY, "a.yaml", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic dpo -c a-anabatic.yaml"),
    ("a.yaml", LLAMA_FACTORY, "train a.yaml", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic dpo -c a-anabatic.yaml"),
    ("a.yaml", LLAMA_FACTORY, "run a.yaml", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic dpo -c a-anabatic.yaml"),
    ("a.yaml", LLAMA_FACTORY, "plan --npus 8 -- dpo -c a.yaml", "of LLaMA-Factory",
     "anabatic config from-llamafactory a.yaml > a-anabatic.yaml && anabatic plan --npus 8 -- dpo -c a-anabatic.yaml"),
    ("s.yaml", SWIFT, "sft -c s.yaml", "of ms-swift",
     "anabatic config from-swift s.yaml > s-anabatic.yaml && anabatic sft -c s-anabatic.yaml"),
    ("args.json", ARGS, "sft -c args.json", "of ms-swift",
     "anabatic config from-swift args.json > args-anabatic.yaml && anabatic sft -c args-anabatic.yaml"),
    ("d.json", DEEPSPEED, "sft -c d.json --model m", "of DeepSpeed",
     "anabatic sft --model m --parallel.deepspeed d.json"),
    ("d.json", DEEPSPEED, "sft --model m d.json", "of DeepSpeed",
     "anabatic sft --model m --parallel.deepspeed d.json"),
    ("d.json", DEEPSPEED, "chat -c d.json", "of DeepSpeed",
     "anabatic config from-deepspeed d.json > d-anabatic.yaml && anabatic sft -c d-anabatic.yaml"),
    ("t.yaml", TRAINER, "sft -c t.yaml --model m", HUGGING_FACE,
     "anabatic sft --model m --out x --optim.lr 1e-5 --schedule.epochs 2"),
    ("acc.yaml", ACCELERATE, "sft -c acc.yaml --model m", "of accelerate",
     "anabatic sft --model m --device.dtype bf16 --device.nproc 8"),
    ("t.sh", "#!/bin/sh\nswift sft --model m --dataset a.jsonl\n", "sft t.sh", "script of ms-swift",
     "anabatic config from-swift t.sh > t-anabatic.yaml && anabatic sft -c t-anabatic.yaml"),
    ("t.sh", "#!/bin/sh\nswift sft --model m --dataset a.jsonl\n", "sft -c t.sh", "script of ms-swift",
     "anabatic config from-swift t.sh > t-anabatic.yaml && anabatic sft -c t-anabatic.yaml"),
    ("p.yaml", PIPELINE, "sft -c p.yaml", "recipe for `anabatic run`", "anabatic run p.yaml"),
    ("p.yaml", PIPELINE, "p.yaml", "recipe for `anabatic run`", "anabatic run p.yaml"),
    ("o.yaml", OURS, "sft -c o.yaml", "recipe for `anabatic pretrain`", "anabatic pretrain -c o.yaml"),
    ("o.yaml", OURS, "run o.yaml", "recipe for `anabatic pretrain`", "anabatic pretrain -c o.yaml"),
    ("o.yaml", OURS, "pretrain o.yaml --out x", "Did you mean -c o.yaml?", "anabatic pretrain -c o.yaml --out x"),
    ("o.yaml", OURS, "chat o.yaml", "recipe for `anabatic pretrain`", "anabatic pretrain -c o.yaml"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "line", "title", "meant"), FILES, ids=[one[2] for one in FILES])
def test_files_are_recognised(
    name: str,
    text: str,
    line: str,
    title: str,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    error, hint = ends(capsys, line)
    assert title in error
    assert hint == meant
    convert, _, _ = hint.partition(" > ")
    if " > " in hint:
        with pytest.raises(SystemExit) as caught:
            app.main(shlex.split(convert)[1:])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith("# anabatic ")


def test_one_foreign_key_of_a_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: m\ndata: {train: [a.jsonl]}\noptim: {weight_decay: 0.1}\noutput_dir: runs/x\n")
    error, hint = ends(capsys, f"sft -c {file}")
    assert error == f'error: {file}:4: unknown setting "output_dir" (of {HUGGING_FACE}): out here'
    assert hint == "write out: runs/x"


@pytest.mark.parametrize(
    ("line", "message", "meant"),
    [
        ("finetune --model m", "`anabatic sft` here", "anabatic sft --model m"),
        ("rlhf", "(of ms-swift): anabatic dpo", "see `anabatic dpo --help`"),
        ("webchat m", "(of LLaMA-Factory): anabatic serve here", "anabatic serve m"),
        ("deploy m", "(of ms-swift): anabatic serve here", "anabatic serve m"),
        ("sftt", 'Did you mean "sft"?', "see `anabatic --help`"),
    ],
)
def test_commands_of_other_programs(line: str, message: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint = ends(capsys, line)
    assert message in error and hint == meant


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat runs/mine --sampling.temperature -1", "temperature is -1"),
        ("infer runs/mine --data rows.jsonl -o a.jsonl --batching.batch 0", "batching.batch is 0"),
        ("infer -m runs/mine --data a.jsonl b.jsonl -o a.jsonl --batching.batch 0", "batching.batch is 0"),
        ("infer a.jsonl -m runs/mine -o a.jsonl --batching.batch 0", "batching.batch is 0"),
        ("classify predict runs/mine --data a.csv --batch 0", "--batch"),
        ("merge runs/mine --shard-gib 0", ""),
        ("export runs/mine --format gguf -o x --devices 0", "devices is 0"),
        ("export runs/mine --format gguff -o x", 'Did you mean "gguf"?'),
        ("eval runs/mine --data a.txt --limit -1", "limit"),
        ("serve runs/mine --port -1", "port is -1"),
    ],
)
def test_what_comes_first_to_mind_is_understood(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last word of each line is refused for its value: the words before it were read."""
    error, hint = ends(capsys, line)
    assert message in error + hint
    assert "not given" not in error and "does not belong" not in error


@pytest.mark.parametrize(
    ("given", "gguf", "recipes"),
    [
        ("safetensors", "none", ["ollama", "vllm", "mindie"]),
        ("gguf", "f16", ["ollama", "vllm", "mindie"]),
        ("ollama", "f16", ["ollama"]),
        ("vllm", "none", ["vllm"]),
        ("mindie", "none", ["mindie"]),
    ],
)
def test_formats_of_an_export(given: str, gguf: str, recipes: list[str]) -> None:
    made = settings_module.build_job("export", {"model": "m", "out": "x", "format": given}, "")
    assert (made.gguf, made.recipes) == (gguf, recipes)
    assert (
        settings_module.build_job("export", {"model": "m", "out": "x", "format": given, "gguf": "q8_0"}, "").gguf
        == "q8_0"
    )


def test_a_mistyped_run_is_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "vessels").mkdir(parents=True)
    (tmp_path / "runs" / "vessels" / "metrics.jsonl").touch()
    for line in ("chat runs/vesels", "chat run/vessels", "checkpoint list runs/vesels", "monitor --run runs/vesels"):
        assert 'Did you mean "runs/vessels"?' in ends(capsys, line)[0], line
    error, hint = ends(capsys, "plan -- sft --model runs/vesels --data a.jsonl")
    assert 'Did you mean "runs/vessels"?' in error
