"""Options, keys, commands and files of other programs, typed here: the answer is right, and its line works."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

import pytest

from anabatic.cli import app
from anabatic.config.loading import command_table, validation
from anabatic.config.loading import settings as settings_module
from anabatic.convert import foreign_options

HUGGING_FACE = "Hugging Face's trainers"

# What is typed for `anabatic sft`, and the setting that it is here.
NAMES = {
    "--model_name_or_path": "model",
    "--model-name-or-path": "model",
    "--base_model": "model",
    "--output_dir": "out",
    "--learning_rate": "optim.lr",
    "--lr": "optim.lr",
    "--num_train_epochs": "schedule.epochs",
    "--epochs": "schedule.epochs",
    "--max_steps": "schedule.max_steps",
    "--max_length": "batch.seq_len",
    "--max_seq_length": "batch.seq_len",
    "--cutoff_len": "batch.seq_len",
    "--bf16": "device.dtype",
    "--fp16": "device.dtype",
    "--torch_dtype": "device.dtype",
    "--lora_rank": "lora.r",
    "--lora_r": "lora.r",
    "--lora_alpha": "lora.alpha",
    "--lora_dropout": "lora.dropout",
    "--lora_target": "lora.target_modules",
    "--target_modules": "lora.target_modules",
    "--use_dora": "lora.use_dora",
    "--finetuning_type": "tuner",
    "--train_type": "tuner",
    "--sft_type": "tuner",
    "--use_peft": "tuner",
    "--load_in_4bit": "quantize",
    "--quantization_bit": "quantize",
    "--gradient_checkpointing": "recompute",
    "--per_device_train_batch_size": "batch.micro_batch_tokens",
    "--batch_size": "batch.micro_batch_tokens",
    "--dataset": "data.train",
    "--train_file": "data.train",
    "--val_dataset": "data.valid",
    "--split_dataset_ratio": "data.valid_fraction",
    "--val_size": "data.valid_fraction",
    "--dataset_num_proc": "data.workers",
    "--warmup_ratio": "schedule.warmup_ratio",
    "--warmup_steps": "schedule.warmup_ratio",
    "--lr_scheduler_type": "schedule.decay",
    "--weight_decay": "optim.weight_decay",
    "--adam_beta2": "optim.beta2",
    "--adam_epsilon": "optim.eps",
    "--max_grad_norm": "optim.max_grad_norm",
    "--gradient_clipping": "optim.max_grad_norm",
    "--optim": "optim.name",
    "--save_steps": "save.every",
    "--save_total_limit": "save.keep_last",
    "--overwrite_output_dir": "save.resume",
    "--eval_steps": "eval.every",
    "--logging_steps": "log.every",
    "--report_to": "log.sinks",
    "--run_name": "log.name",
    "--early_stopping_patience": "eval.patience",
    "--deepspeed": "parallel.deepspeed",
    "--zero_stage": "parallel.strategy",
    "--fsdp": "parallel.strategy",
    "--tensor_parallel_size": "parallel.tensor",
    "--sequence_parallel_size": "parallel.context",
    "--context_parallel_size": "parallel.context",
    "--expert_model_parallel_size": "parallel.expert",
    "--pipeline_model_parallel_size": "parallel.pipeline",
    "--nproc_per_node": "device.nproc",
    "--num_gpus": "device.nproc",
    "--num_processes": "device.nproc",
}

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

# The same for other commands: what is typed, and what it is called here; empty: no counterpart.
OTHERS = {
    "pretrain --learning_rate 1e-3": "--optim.lr",
    "pretrain --model_name_or_path m": "--model.path",
    "pretrain --gradient_checkpointing true": "--model.recompute",
    "pretrain --device_batch_size 2 --max_seq_len 512": "--batch.micro-batch-tokens",
    "dpo --pref_beta 0.2": "--beta",
    "dpo --pref_loss simpo": "--loss-type",
    "dpo --pref_ftx 1.0": "--rpo-alpha",
    "reward --output_dir x": "--out",
    "rl --num_generations 4": "--num-samples",
    "rl --max_completion_length 64": "--sampling.max-new-tokens",
    "infer --val_dataset a.jsonl": "--inputs",
    "infer --result_path x.jsonl": "--out",
    "infer --max_batch_size 8": "--batching.batch",
    "infer --adapters runs/a": "--adapter",
    "chat --model_name_or_path m": "--model",
    "chat --learning_rate 1": "",
    "serve m --server_port 9000": "--port",
    "serve m --served_model_name x": "",
    "eval m --eval_limit 10": "--limit",
    "export m --export_dir x": "--out",
    "export m --export_size 2": "--shard-gib",
    "merge --output_dir x -m m": "--out",
    "tokenizer train --model_type qwen --output_dir x": "--out",
    "tokenizer train --output_dir x": "--out",
    "classify train --learning_rate 0.001": "--optim.lr",
    "plan -- sft --lora_rank 4": "--lora.r",
    "launch --nnodes 2 -- sft --bf16": "--device.dtype",
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


@pytest.mark.parametrize("typed", NAMES)
def test_options_of_other_programs_have_a_name_here(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {key for key, _ in validation.iter_settings(command_table.COMMANDS.find_row("sft").import_job_class())}
    error, hint = ends(capsys, f"sft {typed} 1")
    option = validation.OptionNamer().format_key(NAMES[typed])
    assert NAMES[typed] in known and error.startswith(f'error: unknown option "{typed}"')
    assert f"): {option} here" in error or error.endswith(f". Did you mean {option}?"), error
    assert hint.startswith("see `anabatic sft --help --all`")


@pytest.mark.parametrize("typed", NOTHING)
def test_what_has_no_counterpart_says_why(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    owner, said, why = NOTHING[typed]
    error, hint = ends(capsys, f"sft --model m {typed}")
    assert f"(of {owner}): {said}" in error and why in error
    assert "Did you mean" not in error
    assert hint.startswith("see `anabatic sft --help --all`")


@pytest.mark.parametrize("typed", OTHERS)
def test_other_commands_answer_too(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint = ends(capsys, typed)
    assert (f": {OTHERS[typed]} here" if OTHERS[typed] else "no counterpart here") in error
    assert hint.startswith("see `anabatic ")


def test_every_unknown_option_of_a_line_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    typed = (
        "sft --model_name_or_path Qwen/Qwen3-8B --dataset a.jsonl --template qwen --finetuning_type lora "
        "--output_dir saves/x --cutoff_len 1024 --learning_rate 1e-4 --seed 7 --bf16"
    )
    error, hint = ends(capsys, typed)
    assert '"--model_name_or_path" (of ' in error and ": --model here" in error and error.endswith("and 2 more")
    assert "`anabatic config from-llamafactory --help` converts" in hint


def test_a_setting_without_hyphens_is_an_option_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(capsys, "sft optim.lr=2e-5")[0] == 'error: unknown word "optim.lr". Did you mean --optim.lr?'
    assert '"learning_rate" (of ' in ends(capsys, "sft learning_rate=2e-5 output_dir=x")[0]


@pytest.mark.parametrize(("typed", "meant"), [("--optim.lrr", "--optim.lr"), ("--modle", "--model")])
def test_slips_are_still_guessed(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f'Did you mean "{meant}"?' in ends(capsys, f"sft {typed} 1")[0]


def test_a_known_word_is_never_guessed_by_its_letters() -> None:
    names = [name for name in sorted(foreign_options._option_names("transformers")) if name.islower()]
    near = [name for name in names if difflib.get_close_matches(name, ["model", "seed", "optim.lr", "save.every"])]
    assert len(near) > 8
    for name in [*near, "output_dir", "save_steps", "logging_steps"]:
        assert foreign_options.find_option("sft", name) is not None, name


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
    *(
        ("a.yaml", LLAMA_FACTORY, line, "of LLaMA-Factory",
         "anabatic config from-llamafactory a.yaml > a-anabatic.yaml")
        for line in ("dpo -c a.yaml --out z", "sft a.yaml", "a.yaml", "train a.yaml", "run a.yaml",
                     "plan --npus 8 -- dpo -c a.yaml")
    ),
    ("s.yaml", SWIFT, "sft -c s.yaml", "of ms-swift", "anabatic config from-swift s.yaml > s-anabatic.yaml"),
    ("args.json", ARGS, "sft -c args.json", "of ms-swift",
     "anabatic config from-swift args.json > args-anabatic.yaml"),
    ("d.json", DEEPSPEED, "sft -c d.json --model m", "of DeepSpeed", "give it as --parallel.deepspeed d.json"),
    ("d.json", DEEPSPEED, "sft --model m d.json", "of DeepSpeed", "give it as --parallel.deepspeed d.json"),
    ("d.json", DEEPSPEED, "chat -c d.json", "of DeepSpeed",
     "anabatic config from-deepspeed d.json > d-anabatic.yaml"),
    ("t.yaml", TRAINER, "sft -c t.yaml --model m", HUGGING_FACE, "write a recipe: `anabatic config show sft`; the guide"
     " Migration names each setting here"),
    ("acc.yaml", ACCELERATE, "sft -c acc.yaml --model m", "of accelerate",
     "anabatic config from-deepspeed acc.yaml > acc-anabatic.yaml"),
    ("t.sh", "#!/bin/sh\nswift sft --model m --dataset a.jsonl\n", "sft t.sh", "script of ms-swift",
     "anabatic config from-swift t.sh > t-anabatic.yaml"),
    ("p.yaml", PIPELINE, "sft -c p.yaml", "recipe for `anabatic run`", "anabatic run p.yaml"),
    ("p.yaml", PIPELINE, "p.yaml", "recipe for `anabatic run`", "anabatic run p.yaml"),
    ("o.yaml", OURS, "sft -c o.yaml", "recipe for `anabatic pretrain`", "anabatic pretrain -c o.yaml"),
    ("o.yaml", OURS, "run o.yaml", "recipe for `anabatic pretrain`", "anabatic pretrain -c o.yaml"),
    ("o.yaml", OURS, "pretrain o.yaml --out x", "Did you mean -c o.yaml?", "anabatic pretrain -c o.yaml"),
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
    assert hint == "write out"


@pytest.mark.parametrize(
    ("line", "message", "meant"),
    [
        ("finetune --model m", "`anabatic sft` here", "see `anabatic sft --help`"),
        ("rlhf", "(of ms-swift): anabatic dpo", "see `anabatic dpo --help`"),
        ("webchat m", "(of LLaMA-Factory): anabatic serve here", "see `anabatic serve --help`"),
        ("deploy m", "(of ms-swift): anabatic serve here", "see `anabatic serve --help`"),
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
