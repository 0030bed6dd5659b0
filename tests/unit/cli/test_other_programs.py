"""Commands, words and files of programs that `config from-...` does not read: the answer is the whole line to type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.cli import app
from anabatic.config.loading import command_table, validation
from anabatic.convert import foreign_options, peer_tables


def ends(capsys: pytest.CaptureFixture[str], line: str) -> tuple[str, str]:
    """Run a line that must be refused; return its error and its hint."""
    with pytest.raises(SystemExit) as caught:
        app.main(shlex.split(line))
    assert caught.value.code == 2
    error, _, hint = capsys.readouterr().err.strip().partition("\nhint: ")
    return error, hint


# What is typed, part of the error, and the whole hint.
LINES = [
    ("rlhf --rlhf_type dpo --model m", "(of ms-swift)", "anabatic dpo --model m"),
    ("rlhf --rlhf_type=grpo --model m --num_generations 8", "(of ms-swift)", "anabatic rl --model m --num-samples 8"),
    ("rlhf --model m --rlhf_type rm", "(of ms-swift)", "anabatic reward --model m"),
    ("rlhf --model m --rlhf_type magic", "(of ms-swift)", "known: dpo, "),
    ("deploy --infer_backend vllm --model m", "(of ms-swift)", "anabatic serve --model m"),
    ("swift sft --model m --lora_rank 8", '"swift sft": `anabatic sft` here',
     "anabatic sft --model m --lora.r 8 --tuner lora"),
    ("llamafactory-cli webchat m", "(of LLaMA-Factory)", "anabatic serve m"),
    ("lm_eval --model m --tasks gsm8k --num_fewshot 5", "`anabatic eval` here",
     "anabatic eval --model m --tasks gsm8k --shots 5"),
    ("vllm serve m --max-model-len 4096 --tensor-parallel-size 8", "`anabatic serve` here",
     "anabatic serve m --batching.max-len 4096"),
    ("torchrun --nproc_per_node 8 train.py", "processes are started by the commands themselves",
     "anabatic sft --device.nproc 8"),
    ("eval m --model_args pretrained=x --num_fewshot 5", "(of lm-evaluation-harness): --shots here",
     "anabatic eval m --shots 5"),
    ("eval m --nonsense 1 --rubbish 2", 'unknown option "--nonsense"; "--rubbish"', "see `anabatic eval --help --all`"),
    ("serve m --gpu-memory-utilization 0.9 --max-num-seqs 32", "(of vLLM): --batching.batch here",
     "anabatic serve m --batching.batch 32"),
    ("rl --model m actor_rollout_ref.rollout.n=5 +trainer.total_training_steps=9", "(of verl): --num-samples here",
     "anabatic rl --model m --num-samples 5 --schedule.max-steps 9"),
    ("rl actor_rollout_ref.model.path=m data.max_response_length=64", "(of verl): --model here",
     "anabatic rl --model m --sampling.max-new-tokens 64"),
    ("sft --model m --template qwen", "--chat-template here", "anabatic sft --model m"),
    ("sft --model m --resume_from_checkpoint saves/x/checkpoint-30", "--save.resume here",
     "anabatic sft --model m --out saves/x"),
    ("sft --model m --resume_from_checkpoint saves/x --output_dir y", "--save.resume here",
     "anabatic sft --model m --out y"),
    ("sft --model m --resume_from_checkpoint true", "--save.resume here", "anabatic sft --model m"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "meant"), LINES, ids=[line for line, _, _ in LINES])
def test_the_line_is_said_in_our_words(line: str, message: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint = ends(capsys, line)
    assert message in error
    assert hint.startswith(meant) and ". ;" not in error and '".;' not in error


def test_rows_become_tokens_of_the_models_own_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"max_position_embeddings": 256}')
    _, hint = ends(capsys, "sft --model m --per_device_train_batch_size 4")
    assert hint == "anabatic sft --model m --batch.micro-batch-tokens 1024 --batch.global-batch-tokens 1024"


AXOLOTL = """
base_model: Q/q
load_in_4bit: true
datasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl}]
sequence_len: 512
sample_packing: true
adapter: qlora
micro_batch_size: 2
gradient_accumulation_steps: 4
deepspeed: zero3.json
"""
AXOLOTL_LINE = (
    "anabatic sft --model Q/q --quantize nf4 --data.train a.jsonl b.jsonl --batch.seq-len 512 --batch.packing "
    "--tuner lora --parallel.deepspeed zero3.json --batch.micro-batch-tokens 1024 --batch.global-batch-tokens 4096"
)
VERL = """
data: {train_files: a.parquet, train_batch_size: 64}
actor_rollout_ref:
  model: {path: Q/q}
  actor: {optim: {lr: 1.0e-6}}
  rollout: {name: vllm, n: 5}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 30, n_gpus_per_node: 8}
"""
VERL_LINE = (
    "anabatic rl --data.train a.parquet --examples-per-step 64 --model Q/q --optim.lr 1e-6 --num-samples 5 "
    "--algorithm grpo --schedule.max-steps 30 --device.nproc 8"
)


@pytest.mark.parametrize("given", ["sft a.yaml", "sft -c a.yaml", "a.yaml", "config check a.yaml", "rl -c a.yaml"])
@pytest.mark.parametrize(("text", "title", "meant"), [(AXOLOTL, "axolotl", AXOLOTL_LINE), (VERL, "verl", VERL_LINE)])
def test_files_are_said_in_options(
    given: str,
    text: str,
    title: str,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    error, hint = ends(capsys, given)
    assert f"settings of {title}" in error
    assert hint == meant


def test_config_check_tells_whose_file_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model_name_or_path: Q/q\nstage: sft\nfinetuning_type: lora\ncutoff_len: 64\n")
    error, hint = ends(capsys, "config check a.yaml")
    assert "of LLaMA-Factory" in error and hint.startswith("anabatic config from-llamafactory a.yaml > ")


@pytest.mark.parametrize("peer", ["axolotl", "verl", "lm_eval", "vllm"])
def test_every_row_becomes_a_setting_that_some_command_has(peer: str) -> None:
    """A row that no command can follow would be a promise without a taker."""
    taken = {
        name: set(dict(validation.iter_settings(command_table.get_command(name).import_job_class())))
        for name in ("sft", "dpo", "rl", "eval", "serve")
    }
    for row in peer_tables.load_tables(peer).all_rows():
        fitting = [name for name in row.only or taken if set(row.ours) & taken[name]]
        assert fitting or not row.ours, row.theirs
        for name in fitting[:1]:
            option = foreign_options.PeerOption(row.theirs[0], next(iter(row.values), "1"), f"--{row.theirs[0]}")
            answer = foreign_options.translate_options(name, [option])
            assert [word.original_text for word in answer.words] == [option.original_text], row.theirs


MISTYPED = [
    "chat runs/stf",
    "sft --model runs/stf --data.train a.jsonl",
    "export runs/stf -o x",
    "merge runs/stf --out x",
    "pretrain --model.path runs/stf --data.train a.txt",
]


@pytest.mark.process
@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_model_is_found_out_before_torch_is_loaded(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/sft/final_model").mkdir(parents=True)
    (tmp_path / "runs/sft/final_model/config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "a.txt").write_text("some text\n")
    program = f"import sys; sys.modules['torch'] = None; from anabatic.cli import app; app.main({shlex.split(line)!r})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert 'model folder runs/stf does not exist. Did you mean "runs/sft"?' in ended.stderr
