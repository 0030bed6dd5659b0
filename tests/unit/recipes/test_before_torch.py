"""What is wrong with a command is told before torch is imported: no line of information comes before the error."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.cli import app

PROGRAM = """
import contextlib, io, json, shlex, sys
for heavy in ("torch", "transformers"):
    sys.modules[heavy] = None
from anabatic.cli import app
answers = {}
for line in json.load(sys.stdin):
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app.main(shlex.split(line))
        except SystemExit as end:
            code = end.code
    answers[line] = [code, said.getvalue()]
print(json.dumps(answers))
"""
"""Many commands in one process: each is refused, so none changes anything."""
QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 300,
}  # fmt: skip
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TUNE = "--model m --data a.jsonl"

ALL = [
    *((f"{command} --chat-template nosuch", "chat_template: there is no file nosuch", 2)
      for command in (f"sft {TUNE}", "dpo --model m --data pairs.jsonl", "rl --model m --data sums.jsonl",
                      "reward --model m --data pairs.jsonl", "chat m", "infer m --data a.jsonl -o b.jsonl",
                      "eval m --tasks arc_easy", "serve m")),
    *((f"{command} --adapter nope", "adapter: the folder nope does not exist", 2)
      for command in (f"sft {TUNE}", "rl --model m --data sums.jsonl", "chat m", "infer m --data a.jsonl -o b.jsonl",
                      "eval m --tasks arc_easy", "export m -o x", "merge m --out x")),
    *((line, "hollow holds no config.json or adapter_config.json", 2)
      for line in ("sft --model hollow --data a.jsonl", "pretrain --model.path hollow --data a.txt", "chat hollow",
                   "infer hollow --data a.jsonl -o b.jsonl", "eval hollow --tasks arc_easy", "export hollow -o x",
                   "serve hollow", "serve a=m b=hollow", "serve m --adapter a=hollow", "serve --classifier a=hollow",
                   "classify predict tracks.csv -m hollow",
                   "merge hollow --out x", f"sft {TUNE} --adapter hollow")),
    *((f"{command} --out a.jsonl", "out is a.jsonl, which is a file", 2)
      for command in (f"sft {TUNE}", "pretrain --model.path m --data a.txt", "rl --model m --data sums.jsonl", "chat m",
                      "eval m --tasks arc_easy", "classify train --data tracks.csv")),
    *((f"{command} {option} a.jsonl/x", "cannot write a.jsonl/x: Not a directory", 1)
      for command, option in ((f"sft {TUNE}", "--out"), ("export m", "-o"), ("merge adapted", "--out"),
                              ("infer m --data a.jsonl", "-o"), ("tokenizer train --data a.txt", "--out"))),
    *((f"classify {verb} --data one.csv", "a classifier needs two classes: all rows are of Whaler", 2)
      for verb in ("train", "pretrain")),
    (f"sft {TUNE} --out /proc/run", "cannot write /proc/run: No such file or directory", 1),
    (f"sft {TUNE} --adapter m", "m is a whole model, no adapter", 2),
    (f"sft {TUNE} --adapter adapted@x", "is no weight", 2),
    (f"sft {TUNE} --chat-template empty.jinja", "chat_template: empty.jinja is empty", 2),
    *((f"{command} --tuner lora --lora.target-modules q_proj foo_proj",
       'lora.target_modules: no linear layer is called "foo_proj"', 2)
      for command in (f"sft {TUNE}", "dpo --model m --data pairs.jsonl", "rl --model m --data sums.jsonl")),
    (f"sft {TUNE} --tuner lora --lora.target-modules lm_head", 'no linear layer is called "lm_head"', 2),
    (f"sft {TUNE} --tuner freeze --freeze.last-layers 50", "freeze.last_layers is 50, the model has 3 blocks", 2),
    (f"sft {TUNE} --tuner freeze --freeze.train '['", 'freeze.train: "[" is no regular expression', 2),
    ("sft --model adapted --data a.jsonl --tuner full", "adapted is an adapter, and tuner is full", 2),
    *((f"{command} --batch.seq-len 50 --batch.micro-batch-tokens 300 --batch.global-batch-tokens 1000",
       "batch.global_batch_tokens 1000 is not a multiple of 1 ranks x 300 micro-batch tokens = 300", 2)
      for command in (f"sft {TUNE}", "pretrain --model.path m --data a.txt", "classify train --data tracks.csv")),
    (f"sft {TUNE} --nproc 4 --batch.micro-batch-tokens 64 --batch.global-batch-tokens 640",
     "640 is not a multiple of 4 ranks x 64 micro-batch tokens = 256", 2),
    (f"sft {TUNE} --nproc 4 --parallel.tensor 2 --batch.micro-batch-tokens 64 --batch.global-batch-tokens 192",
     "192 is not a multiple of 2 ranks x 64", 2),
    ("rl --model m --data sums.jsonl --examples-per-step 4 --num-samples 4 --device-batch-size 4 --nproc 3",
     "an update has 16 answers, not a multiple of 3 ranks x device_batch_size 4 = 12", 2),
    (f"sft {TUNE} --parallel.deepspeed none.json", 'parallel.deepspeed is "none.json", which is no file', 2),
    *((f"export m -o x {option}", "GGUF files are written by llama.cpp, and there is no convert_hf_to_gguf.py", 2)
      for option in ("--format gguf", "--format ollama", "--gguf q8_0")),
    ("export m -o x --gguf f16 --llama-cpp hollow", "llama_cpp is hollow, and there is no", 2),
    ("export m -o hollow", "hollow exists already", 2),
    ("export m -o hollow --overwrite", "hollow is no folder of a model", 2),
    ("merge adapted --out hollow", "hollow exists already", 2),
]  # fmt: skip
"""What is typed, what is said, and the exit code."""


def model(folder: Path) -> None:
    folder.mkdir()
    for name, content in (("config.json", QWEN), ("tokenizer.json", {}), ("tokenizer_config.json", {})):
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an adapter for it, and rows of every kind."""
    root = tmp_path_factory.mktemp("place")
    model(root / "m")
    (root / "adapted").mkdir()
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(root / "m")}
    (root / "adapted" / "adapter_config.json").write_text(json.dumps(adapter))
    (root / "hollow").mkdir()
    (root / "hollow" / "notes.txt").write_text("nothing")
    (root / "empty.jinja").write_text("\n")
    (root / "a.txt").write_text("some text\n")
    (root / "a.jsonl").write_text(json.dumps(TALK) + "\n")
    (root / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (root / "sums.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"}) + "\n")
    (root / "tracks.csv").write_text("mmsi,timestamp,lat,lon,sog,cog,vessel_type\n")
    point = "2{at},2020-01-01T00:0{at}:00Z,24.6,-84.1,18.8,292.4,291,Whaler\n"
    head = "mmsi,timestamp,lat,lon,sog,cog,heading,vessel_type\n"
    (root / "one.csv").write_text(head + "".join(point.format(at=at) for at in range(5)))
    return root


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of every line, none of which could import torch."""
    lines = json.dumps([line for line, _, _ in ALL])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=place, input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.process
@pytest.mark.parametrize(("line", "message", "code"), ALL, ids=[line for line, _, _ in ALL])
def test_it_is_told_at_once_and_before_anything_else(
    line: str, message: str, code: int, answers: dict[str, tuple[int, str]]
) -> None:
    ended, said = answers[line]
    assert message in said and ended == code
    assert said.startswith("error: "), said


@pytest.mark.process
def test_nothing_is_left_of_the_looks(place: Path, answers: dict[str, tuple[int, str]]) -> None:
    assert {path.name for path in place.iterdir()} == {
        "m",
        "adapted",
        "hollow",
        "empty.jinja",
        "a.txt",
        "a.jsonl",
        "pairs.jsonl",
        "sums.jsonl",
        "tracks.csv",
        "one.csv",
    }


PLANNED = [
    ("img.jsonl", "", 2, 'error: img.jsonl: line 1: column "images" holds pictures, video or sound'),
    ("other.jsonl", "", 2, 'the row has "x"'),
    ("a.jsonl", "--chat-template nosuch", 2, "error: chat_template: there is no file nosuch"),
    ("a.jsonl", "--tuner lora --lora.target-modules foo_proj", 2, "error: lora.target_modules: no linear layer"),
    ("a.jsonl", "--tuner freeze --freeze.last-layers 9", 2, "error: freeze.last_layers is 9, the model has 3 blocks"),
    ("a.jsonl", "--adapter m", 2, "error: adapter: m is a whole model"),
    ("a.jsonl", "--adapter runs/later", 0, "warning: runs/later: no such adapter (the plan is made without it"),
    ("a.jsnl", "", 0, 'warning: a.jsnl: no such file or folder. Did you mean "a.jsonl"? (the plan is made without it'),
    ("b*.jsonl", "", 0, "warning: b*.jsonl: no such files (the plan is made without it"),
    ("a.jsonl", "", 0, ""),
]
"""Rows, options, exit code, and what is said beside the plan."""


@pytest.mark.parametrize("line", ["plan -- sft", "plan --scale 4 -- sft", "sft --dry-run"])
@pytest.mark.parametrize(("data", "options", "code", "said"), PLANNED, ids=[f"{row[0]} {row[1]}" for row in PLANNED])
def test_a_plan_refuses_what_the_job_would_refuse(
    line: str,
    data: str,
    options: str,
    code: int,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    (place / "img.jsonl").write_text(json.dumps({**TALK, "images": ["a.png"]}) + "\n")
    (place / "other.jsonl").write_text('{"x": 1}\n')
    given = f"{line} --model m --data {data} --batch.seq-len 64 --device.type cpu {options}"
    with pytest.raises(SystemExit) as caught:
        app.main(shlex.split(given))
    out, err = capsys.readouterr()
    assert (caught.value.code, bool(out)) == (code, not code)
    assert said in err and (not code or err.startswith("error: "))
    assert ("warning: " in err) == said.startswith("warning: ")
