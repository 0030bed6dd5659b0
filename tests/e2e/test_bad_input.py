"""What can be wrong with text, settings and folders: one error with the numbers, a hint, an exit code."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from e2e import command
from e2e.home import Home

GOOD = '{"text": "the wind moves upward"}\n'


def empty(path: Path) -> None:
    path.write_text("")


def missing(path: Path) -> None: ...


def binary(path: Path) -> None:
    path.write_bytes(GOOD.encode() + b"\x7fELF\0\0\0")


def broken_json(path: Path) -> None:
    path.write_text(GOOD * 2 + '{"text": "cut sh\n' + GOOD)


def latin1(path: Path) -> None:
    path.write_bytes(GOOD.encode() + '{"text": "café"}\n'.encode("latin-1"))


def gigabyte_line(path: Path) -> None:
    """1 GiB in a line of 1 MiB on disk: a gzip file may consist of members."""
    member = gzip.compress(b"a" * (16 << 20), compresslevel=9)
    path.write_bytes(gzip.compress(GOOD.encode() + b'{"text": "') + member * 64 + gzip.compress(b'"}\n'))


def other_column(path: Path) -> None:
    parquet.write_table(pyarrow.table({"texts": ["a", "b"], "id": [1, 2]}), path)


CORPORA: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "empty.jsonl": (empty, "the file is empty (0 bytes)", "give a file with text"),
    "missing.jsonl": (missing, "missing.jsonl", ""),
    "binary.jsonl": (binary, "a binary file: NUL byte at byte 38", "UTF-8"),
    "broken.jsonl": (broken_json, "line 3: broken JSON: ", "--data.on-bad-row skip"),
    "latin1.jsonl": (latin1, "line 2: invalid UTF-8 at byte 47 (0xe9)", "iconv"),
    "long.jsonl.gz": (gigabyte_line, "line 2: 1.0 GiB long, more than 64.0 MiB", "split the row"),
    "column.parquet": (other_column, 'no column "text"; the file has "texts", "id"', 'Did you mean "texts"?'),
}


def check(result: command.Result, code: int, *words: str) -> None:
    """The last two lines are the error and its hint, and nothing else looks like one."""
    assert result.code == code, result.err
    error, hint = result.err.splitlines()[-2:]
    assert error.startswith("error: ") and hint.startswith("hint: "), result.err
    assert result.err.count("error: ") == 1
    for word in words:
        assert word in f"{error}\n{hint}", result.err


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_that_cannot_be_read(home: Home, tmp_path: Path, name: str) -> None:
    write, message, hint = CORPORA[name]
    path = tmp_path / name
    write(path)
    out = tmp_path / "out"
    check(home.anabatic("tokenizer", "train", "--data.train", path, "--out", out, code=2), 2, name, message, hint)
    assert not out.exists()


def test_training_names_the_bad_row_too(home: Home, base: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    broken_json(bad)
    result = home.anabatic(*home.sft(tmp_path / "out", base, more={"data.train": bad}), code=2)
    check(result, 2, f"{bad}: line 3: broken JSON", "--data.on-bad-row")


def test_a_vocabulary_that_the_text_does_not_support(home: Home, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("tokenizer", "train", "--data.train", home.text, "--vocab-size", 9000, "--out", out)
    check(home.anabatic(*words, code=2), 2, "vocab_size is 9,000, but", "characters of text support", "or less")
    assert not out.exists()


def test_settings_that_cannot_be(home: Home, tmp_path: Path) -> None:
    out = tmp_path / "out"
    check(
        home.anabatic(*home.pretrain(out, more={"batch.seq-len": 0}), code=2),
        2,
        "--batch.seq-len is 0",
        "use at least 2 tokens",
    )
    one, two = home.together(
        home.pretrain(out, more={"batch.micro-batch-tokens": 384}),
        home.pretrain(tmp_path / "two", 2, {"batch.global-batch-tokens": 768}),
        code=2,
    )
    check(
        one, 2, "batch.global_batch_tokens 512 is not a multiple of 1 ranks x 384", "set batch.global_batch_tokens to"
    )
    check(
        two,
        2,
        "batch.global_batch_tokens 768 is not a multiple of 2 ranks x 256",
        "set batch.global_batch_tokens to 512",
    )
    assert command.checkpoints(out) == []


def test_another_recipe_is_not_continued(home: Home, base: Path) -> None:
    before = (base / "metrics.jsonl").read_bytes()
    kept = command.checkpoints(base)
    result = home.anabatic(*home.pretrain(base, more={"optim.lr": 0.5}), code=2)
    check(
        result,
        2,
        f"checkpoint-{kept[-1]} was saved with optim.lr = nothing (its default), the recipe now says 0.5",
        "--save.resume never",
    )
    assert command.checkpoints(base) == kept and (base / "metrics.jsonl").read_bytes() == before


def test_nothing_that_is_there_is_overwritten(home: Home, base: Path, tmp_path: Path) -> None:
    """A tokenizer, a model, and a finished run whose checkpoints were cleared away."""
    cleared = tmp_path / "cleared"
    shutil.copytree(base, cleared)
    for path in cleared.glob("checkpoint-*"):
        shutil.rmtree(path)
    weights = (cleared / "final_model" / "model.safetensors").read_bytes()
    words = ("tokenizer", "train", "--data.train", home.text, "--vocab-size", 300, "--out")
    same, model, run = home.together(
        (*words, home.tokenizer), (*words, base / "final_model"), home.pretrain(cleared), code=2
    )
    check(same, 2, f"{home.tokenizer} holds tokenizer.json already", "--overwrite")
    check(model, 2, "holds tokenizer.json and config.json already", "choose another --out")
    check(run, 2, "final_model is there from an earlier run, but no whole checkpoint", "--save.resume never")
    assert (cleared / "final_model" / "model.safetensors").read_bytes() == weights

    home.anabatic(*home.pretrain(cleared, more={"save.resume": "never"}))
    (aside,) = cleared.glob("superseded-*")
    assert (aside / "final_model" / "model.safetensors").read_bytes() == weights
    assert (cleared / "final_model" / "model.safetensors").is_file()


def test_a_training_that_diverged_is_a_failure(home: Home, tmp_path: Path) -> None:
    """The first update is finite and destroys the weights; all later ones are refused."""
    late, early = tmp_path / "late", tmp_path / "early"
    hopeless = {"optim.lr": 1e30, "schedule.max-steps": 3}
    without = {**hopeless, "data.valid-fraction": 0}
    one, two = home.together(
        home.pretrain(late, more={**hopeless, "eval.every": 2}), home.pretrain(early, more=without), code=1
    )
    check(one, 1, "the held-out loss after step 2 is nan", "lower optim.lr")
    check(two, 1, "are not finite", "no final model is written")
    assert not list(tmp_path.glob("*/*_model"))


def test_models_that_are_not_whole(home: Home, base: Path, tmp_path: Path) -> None:
    """transformers would fill in random weights, or print a table and continue."""
    sizes, torn, fifo = tmp_path / "sizes", tmp_path / "torn", tmp_path / "pipe.txt"
    shutil.copytree(base / "final_model", sizes)
    config = json.loads((sizes / "config.json").read_text())
    (sizes / "config.json").write_text(json.dumps({**config, "hidden_size": config["hidden_size"] * 2}))
    shutil.copytree(base / "final_model", torn)
    (torn / "chat_template.jinja").write_text("{# torn")
    os.mkfifo(fifo)
    one, two, pipe = home.together(
        ("chat", "-m", sizes, "-p", "hi"),
        ("chat", "-m", torn, "-p", "hi"),
        home.pretrain(tmp_path / "out", more={"data.train": fifo}),
        code=2,
    )
    check(one, 2, "weights do not fit config.json", "copy the folder again")
    check(two, 2, "the chat template is damaged", "chat_template.jinja")
    check(pipe, 2, f"{fifo}: not a regular file", "write it to a file")


def test_folders_without_what_is_needed(home: Home, base: Path, tmp_path: Path) -> None:
    bare, torn, lost = tmp_path / "bare", tmp_path / "torn", tmp_path / "lost"
    bare.mkdir()
    torn.mkdir()
    for path in (base / "final_model").iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])

    evaluated, chat = home.together(
        ("eval", "--model", bare, "--tasks", "task:all#2"), ("chat", "-m", lost, "-p", "hi"), code=2
    )
    check(
        evaluated,
        2,
        f"{bare} holds no config.json or adapter_config.json, and no best_model or final_model either",
        "let the run finish",
    )
    check(chat, 2, f"model folder {lost} does not exist", "give a Hugging Face folder")

    tokenizer, continued = home.together(
        home.pretrain(tmp_path / "a", more={"tokenizer": lost}), home.mid(tmp_path / "b", torn), code=2
    )
    check(tokenizer, 2, str(lost), "")
    check(continued, 2, str(torn), "torn", "copy")


def test_a_recipe_names_its_own_mistakes(home: Home, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"tokenizer": "t", "data": {"train": ["x"]}, "schedule": {"max_steps": 1.5}}))
    check(home.anabatic("pretrain", "-c", recipe, code=2), 2, "recipe.yaml", "schedule.max_steps", "1.5")


def test_a_model_that_is_broken_already_is_told_at_the_first_step(home: Home, base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base / "final_model", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors")
    told = home.anabatic(*home.sft(tmp_path / "out", broken), code=1)
    assert "error: the loss or the gradient of the first step is not finite, before anything was updated" in told.err
    assert not (tmp_path / "out" / "checkpoint-5").exists()
