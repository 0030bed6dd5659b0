"""Commands, words and files of programs that `config from-...` does not read: the answer names what is meant here."""

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


# What is typed, part of the error, and how the hint begins.
LINES = [
    ("rlhf --rlhf_type dpo --model m", "(of ms-swift): anabatic dpo, anabatic reward, anabatic rl here",
     "see `anabatic dpo --help`"),
    ("deploy --infer_backend vllm --model m", "(of ms-swift): anabatic serve here", "see `anabatic serve --help`"),
    ("swift sft --model m --lora_rank 8", '"swift sft" (of ms-swift)',
     "anabatic config from-swift 'swift sft --model m --lora_rank 8' > recipe.yaml"),
    ("llamafactory-cli train --stage dpo --dataset 'a b'", '"llamafactory-cli train" (of LLaMA-Factory)',
     "anabatic config from-llamafactory 'llamafactory-cli train --stage dpo --dataset "),
    ("lm_eval --model m --tasks gsm8k --num_fewshot 5", "`anabatic eval` here", "see `anabatic eval --help`"),
    ("vllm serve m --max-model-len 4096", "`anabatic serve` here", "see `anabatic serve --help`"),
    ("torchrun --nproc_per_node 8 train.py", "processes are started by the commands themselves",
     "anabatic sft --device.nproc 8"),
    ("eval m --model_args pretrained=x --num_fewshot 5", "(of lm-evaluation-harness): --shots here",
     "see `anabatic eval --help --all`"),
    ("eval m --nonsense 1 --rubbish 2", 'unknown option "--nonsense"; "--rubbish"', "see `anabatic eval --help --all`"),
    ("serve m --gpu-memory-utilization 0.9 --max-num-seqs 32", "(of vLLM): --batching.batch here",
     "see `anabatic serve --help --all`"),
    ("rl --model m actor_rollout_ref.rollout.n=5 +trainer.total_training_steps=9",
     "(of verl): --num-samples here; \"+trainer.total_training_steps\" (of verl): --schedule.max-steps here",
     "see `anabatic rl --help --all`"),
    ("sft --model m --resume_from_checkpoint true", "--save.resume here", "see `anabatic sft --help --all`"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "meant"), LINES, ids=[line for line, _, _ in LINES])
def test_the_line_is_said_in_our_words(line: str, message: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint = ends(capsys, line)
    assert message in error
    assert hint.startswith(meant) and ". ;" not in error and '".;' not in error


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
VERL = """
data: {train_files: a.parquet, train_batch_size: 64}
actor_rollout_ref:
  model: {path: Q/q}
  actor: {optim: {lr: 1.0e-6}}
  rollout: {name: vllm, n: 5}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 30, n_gpus_per_node: 8}
"""


@pytest.mark.parametrize("given", ["sft a.yaml", "sft -c a.yaml", "a.yaml", "config check a.yaml", "rl -c a.yaml"])
@pytest.mark.parametrize(("text", "title"), [(AXOLOTL, "axolotl"), (VERL, "verl")])
def test_files_without_a_converter_are_known(
    given: str,
    text: str,
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    error, hint = ends(capsys, given)
    assert f"settings of {title}" in error
    assert hint.startswith("write a recipe: `anabatic config show ")


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
        name: set(dict(validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class())))
        for name in ("sft", "dpo", "rl", "eval", "serve")
    }
    for row in peer_tables.load_tables(peer).all_rows():
        fitting = [name for name in row.only or taken if set(row.ours) & taken[name]]
        assert fitting or not row.ours, row.theirs
        for name in fitting[:1]:
            assert foreign_options.find_option(name, row.theirs[0]) is not None, row.theirs


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
