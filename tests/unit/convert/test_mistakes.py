"""What is no command, torn, too large or of another program is one error with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.convert import converter
from anabatic.core.errors import ConfigError


@pytest.mark.parametrize(
    ("peer", "text", "message", "hint"),
    [
        ("swift", "", "nothing to convert", "in quotes"),
        ("swift", "no-such-file.yaml", "no-such-file.yaml does not exist", ""),
        ("swift", "swift sft --model 'M", "the quote ' is never closed", "whole command"),
        ("swift", "python -m scripts.base_train -- --depth=4", "no command of ms-swift", "config from-nanochat"),
        ("nanochat", "swift sft --model M", "no command of nanochat", "config from-swift"),
        ("llamafactory", "echo hello", "no command of LLaMA-Factory", "llamafactory-cli train"),
        ("swift", "swift sample --model M", "no command of ms-swift that has a counterpart", "commands:"),
        ("swift", "swift sft --model M --learning_rate fast", '--learning_rate fast is "fast"', "a number"),
        ("swift", "swift sft --model M --max_length 1e3", "--max_length 1e3 is", "whole number"),
        ("swift", "swift sft --model M --per_device_train_batch_size 0", "0 is less than 1", "from 1"),
        ("swift", "swift rlhf --rlhf_type gpro --model M", 'Did you mean "grpo"?', "known: dpo"),
        ("swift", "swift sft\n--model M", "line 2 begins with --model", "without a space after it"),
        ("swift", "swift sft \\ --model M", '" --model" begins with a space', "remove the space"),
        ("swift", "swift sft \u2013\u2013model M", "long dash", "write --model"),
        ("swift", "swift sft --model \u201cQwen/Qwen2.5-7B\u201d", "quotation mark of print", "in its place"),
        ("swift", "swift sft --model M --system \u201cYou are kind\u201d", "\u201cYou begins with", "in its place"),
        ("swift", "swift sft nope.yaml", "nope.yaml does not exist", ""),
        ("deepspeed", "zero9", "zero9 does not exist", ""),
        ("swift", "swift sft --model", "--model has no value", "after the option"),
        ("swift", "swift sft --model M --learning_rate --dataset D", "--learning_rate has no value", "after"),
        ("swift", "swift sweep --model M", "found: swift sweep", "commands: swift sft"),
        ("nanochat", "python -m scripts.base_tran", "found: scripts.base_tran", "scripts.base_train"),
    ],
)
def test_mistakes(
    peer: str, text: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        converter.convert_command(peer, [text])
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("torn.json", "{torn", "cannot be read as JSON"),
        ("deep.json", '{"a": ' + "[" * 100_000, "cannot be read as JSON"),
        ("list.json", "[1, 2]", "holds a list, not settings"),
        ("torn.yaml", "a: [1", "is not YAML"),
        ("huge.sh", "#" * 300_000, "too much for a recipe"),
        ("binary.sh", "\0\1", "is not text"),
        ("empty.sh", "\n", "no command of ms-swift"),
        ("empty.json", "{}", "holds no settings"),
        ("empty.yaml", "# nothing\n", "holds no settings"),
    ],
)
def test_bad_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        converter.convert_command("swift", [str(tmp_path / name)])


@pytest.mark.parametrize(
    ("words", "fits"),
    [("", True), ("--num_gpus 4", True), ("--num_gpus 8", False), ("--num_gpus 3", False)],
)
def test_rows_of_a_step_and_processes_agree(words: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    )
    command = f"deepspeed {words} train.py --model_name_or_path M --deepspeed {tmp_path / 'ds.json'}"
    if fits:
        made = converter.convert_command("deepspeed", [command])
        assert "global_batch_tokens: 65536" in made.text
        assert any("give device.nproc" in line for line in made.messages) is not bool(words)
        return
    with pytest.raises(ConfigError, match="32 rows a step are 4 rows x 2 micro-batches x 4 processes, not"):
        converter.convert_command("deepspeed", [command])


def test_folders_and_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a folder") as caught:
        converter.convert_command("swift", [str(tmp_path)])
    assert caught.value.hint == f"give {tmp_path / 'args.json'}"
    other = tmp_path / "other.json"
    other.write_text('{"learning_rate": 1}')
    with pytest.raises(ConfigError, match="has no key of DeepSpeed's"):
        converter.convert_command("deepspeed", [str(other)])
