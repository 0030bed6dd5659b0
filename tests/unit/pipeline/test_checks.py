"""Every stage is looked at before the first one runs, and all that is wrong is told together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from anabatic.core.errors import UserError
from unit.pipeline.bench import ALL, Bench

Job = dict[str, Any]
ROW = {"query": "a", "response": "b"}


def stage(command: str, **job: Any) -> dict[str, Any]:
    return {"command": command, "job": job}


def rows(*some: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in some)


@pytest.fixture
def files(bench: Bench) -> Path:
    """Files of every kind, and a model of 64 positions without a tokenizer."""
    for name, text in {
        "pairs.jsonl": rows({"prompt": "a", "chosen": "b", "rejected": "c"}),
        "asks.jsonl": rows({"prompt": "2 + 2?"}),
        "sums.jsonl": rows(*[{"prompt": "2 + 2?", "answer": "4"}] * 8),
        "long.jsonl": rows(*[{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "word " * 9000, "answer": "4"}] * 4),
        "one.jsonl": rows({"prompt": "2 + 2?", "answer": "4"}, {"prompt": "word " * 9000, "answer": "4"}),
        "broken.jsonl": rows(ROW) + "{broken\n",
        "other.jsonl": rows({"x": 1}),
        "empty.jsonl": "",
        "notes.pdf": "x",
    }.items():
        (bench.root / name).write_text(text)
    (bench.root / "small").mkdir()
    (bench.root / "small" / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 300}))
    (bench.root / "plain").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bench.root / "plain" / name).write_text("{}")
    return bench.root


def complaints(bench: Bench, name: str, one: dict[str, Any]) -> list[tuple[str, str]]:
    """Add a stage and return the messages and hints of what stops the pipeline."""
    bench.tree["stages"][name] = one
    with pytest.raises(UserError) as caught:
        bench.run()
    assert bench.ran() == [] and not bench.out.exists()
    errors = getattr(caught.value, "errors", [caught.value])
    return [(str(error), error.hint) for error in errors]


class Broken(NamedTuple):
    """A stage and what must be said of it."""

    stage: dict[str, Any]
    message: str
    hint: str = ""


DATA: dict[str, Any] = {"data": {"train": "c.jsonl"}}
BROKEN = [
    Broken(stage("sft", model="${base}", data={"train": "chats.jsonl"}), "chats.jsonl: no such file", "Did you mean"),
    Broken(stage("sft", model="${base}", data={"train": "notes.pdf"}), 'unknown extension ".pdf"', "files are read by"),
    Broken(stage("sft", model="${base}", data={"train": "empty.jsonl"}), "the file is empty"),
    Broken(stage("sft", model="${base}", data={"train": "broken.jsonl"}), "line 2: broken JSON", "on_bad_row"),
    Broken(stage("sft", model="${base}", data={"train": "other.jsonl"}), 'the row has "x"'),
    Broken(stage("sft", model="${base}", data={"train": ["c.jsonl@0.7", "c.jsonl@0.7"]}), "add up to 1.4"),
    Broken(stage("sft", model="${base}", data={"train": "task:speling"}), 'no task "speling"', "spelling"),
    Broken(stage("dpo", model="${base}", **DATA), "line 1: one answer, where a pair has two", "rejected"),
    Broken(stage("dpo", model="${base}", loss_type="kto", **DATA), "line 1: one answer without a label"),
    Broken(stage("reward", model="${base}", data={"train": "books/a.txt"}), "a.txt is plain text, not pairs"),
    Broken(stage("rl", model="${base}", data={"train": "asks.jsonl"}), "the row has no answer, and the reward is"),
    Broken(stage("rl", model="${base}", data={"train": "other.jsonl"}), "nothing is asked"),
    Broken(
        stage("rl", model="${base}", data={"train": "long.jsonl"}),
        "4 of 8 rows (50.00%) are longer than 1,023 tokens",
        "stages.extra.job.data.long_share: 0.5",
    ),
    Broken(stage("infer", model="${base}", inputs=["none.jsonl"], out="a.jsonl"), "none.jsonl does not exist"),
    Broken(stage("infer", model="${base}", inputs=["other.jsonl"], out="a.jsonl"), "nothing is asked"),
    Broken(stage("classify train", data={"train": "tracks.csv"}), "tracks.csv: there is no such file"),
    Broken(stage("eval", model="${tok}", tasks=["arc_easy"]), "`tokenizer train` makes no model", "base, sft"),
    Broken(stage("eval", model="${base}/best", tasks=["arc_easy"]), "writes nothing of that name", "best_model"),
    Broken(stage("eval", model="out/bas", tasks=["arc_easy"]), "model folder out/bas does not exist", '"base"'),
    Broken(stage("eval", model="books", tasks=["arc_easy"]), "books holds no config.json"),
    Broken(stage("pretrain", tokenizer="${talk}", **DATA), "`chat` makes no tokenizer"),
    Broken(stage("pretrain", tokenizer="books", **DATA), "no tokenizer in books"),
    Broken(stage("pretrain", tokenizer="${tok}", model={"path": "small"}, **DATA), "has 32768 entries, the model 300"),
    Broken(
        stage("sft", model="${base}", batch={"seq_len": 2048}, **DATA),
        "batch.seq_len is 2048, the model was made by stage base for 1024 positions",
        "use stages.extra.job.batch.seq_len: 1024 or less",
    ),
    Broken(
        stage("sft", model="small", batch={"seq_len": 128}, **DATA),
        "batch.seq_len is 128, the model was made for 64 positions",
        "batch.seq_len: 64",
    ),
    Broken(stage("eval", model="${base}", tasks=["task:speling"]), "speling"),
    Broken(stage("eval", model="${base}", tasks=["arc_eazy"]), "arc_eazy", "arc_easy"),
    Broken(stage("eval", model="${base}", tasks=["core"], tasks_from="nowhere"), "tasks_from is nowhere"),
    Broken(stage("rl", model="${base}", rewards=["mine.py:f=2"], data={"train": "sums.jsonl"}), "mine.py: no such"),
    Broken(stage("rl", model="${base}", rewards=["answr"], data={"train": "sums.jsonl"}), 'no reward "answr"'),
    Broken(stage("dpo", model="plain", data={"train": "pairs.jsonl"}), "plain has no chat template"),
    Broken(stage("eval", model="small", tasks=["gsm8k"], max_new_tokens=64), "leaves no room for a question"),
    Broken(stage("sft", model="${base}", chat_template="nosuch", **DATA), "there is no file nosuch", "qwen3"),
    Broken(stage("rl", model="${sft}", chat_template="nosuch", data={"train": "sums.jsonl"}), "no file nosuch"),
    Broken(stage("sft", model="${base}", adapter=["runs/nope@0.5"], **DATA), "runs/nope does not exist"),
    Broken(stage("sft", model="${base}", adapter=["small"], **DATA), "small is a whole model, no adapter"),
    Broken(stage("sft", model="${base}", adapter=["${tok}"], **DATA), "`tokenizer train` makes no adapter"),
    Broken(stage("sft", model="${base}", adapter=["${sft}"], **DATA), "is a whole model, no adapter"),
    Broken(
        stage("sft", model="${base}", tuner="lora", lora={"target_modules": ["foo_proj"]}, **DATA),
        'no linear layer is called "foo_proj"', "layers of this model: down_proj",
    ),
    Broken(
        stage("sft", model="${sft}", tuner="freeze", freeze={"last_layers": 50}, **DATA),
        "freeze.last_layers is 50, the model has 12 blocks", "use at most 12, or stages.extra.job.tuner:",
    ),
    Broken(
        stage("sft", model="${base}", batch={"seq_len": 99, "micro_batch_tokens": 300, "global_batch_tokens": 1000},
              **DATA),
        "batch.global_batch_tokens 1000 is not a multiple of 1 ranks x 300",
    ),
    Broken(stage("export", model="${base}", out="x", format="gguf"), "there is no convert_hf_to_gguf.py on PATH"),
    Broken(stage("sft", model="${base}", out="c.jsonl", **DATA), "out is c.jsonl, which is a file"),
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.stage['command']}-{broken.message[:30]}")
def test_a_broken_stage_stops_the_pipeline_before_the_first(bench: Bench, files: Path, broken: Broken) -> None:
    ((message, hint),) = complaints(bench, "extra", broken.stage)
    assert message.startswith("stages.extra.job: ") and broken.message in message
    assert broken.hint in hint


GOOD: list[dict[str, Any]] = [
    stage("sft", model="${base}", data={"train": "c.jsonl", "valid": ["task:spelling"]}, batch={"seq_len": 1024}),
    stage("sft", model="some-owner/some-model", **DATA),
    stage("sft", model="small", **DATA),
    stage("sft", model="${base}", data={"train": "broken.jsonl", "on_bad_row": "skip"}),
    stage("sft", model="${sft}/final_model", data={"train": "chat:stdlib"}),
    stage("dpo", model="${sft}", data={"train": "pairs.jsonl"}),
    stage("rl", model="${sft}", data={"train": "sums.jsonl"}),
    stage("rl", model="${sft}", data={"train": "one.jsonl"}),  # a single row is skipped, whatever the share
    stage("rl", model="${sft}", data={"train": "long.jsonl", "long_share": 0.5}),
    stage("rl", model="${sft}", data={"train": "asks.jsonl"}, rewards=["length"]),
    stage("infer", model="${sft}", inputs=["sums.jsonl"], out="a.jsonl"),
    stage("eval", model="${base}", data={"train": "${corpus}"}),
    stage("sft", model="${base}", chat_template="qwen", **DATA),
    stage("sft", model="${base}", chat_template="${sft}/best_model/chat_template.jinja", **DATA),
    stage("sft", model="${base}", adapter=["some-owner/some-adapter@0.5"], **DATA),
    stage("sft", model="some-owner/some-model", tuner="lora", lora={"target_modules": ["foo_proj"]}, **DATA),
    stage("sft", model="small", tuner="lora", lora={"target_modules": ["foo_proj"]}, **DATA),  # of no known family
    stage("sft", model="${base}", tuner="lora", lora={"target_modules": ["self_attn.q_proj", "up_proj"]}, **DATA),
    stage("sft", model="${sft}", lora={"target_modules": ["foo_proj"]}, **DATA),  # not used: all is trained
    stage("sft", model="${base}", tuner="freeze", freeze={"last_layers": 2}, **DATA),
]  # fmt: skip


@pytest.mark.parametrize("good", GOOD, ids=lambda good: f"{good['command']}-{list(good['job'].values())[1]}"[:60])
def test_a_good_stage_is_let_through(
    bench: Bench, files: Path, good: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    bench.tree["stages"]["extra"] = good
    assert bench.run(dry_run=True) == 0
    assert capsys.readouterr().err.count("; checked") == len(ALL) + 1


def test_all_problems_are_told_together_and_by_the_dry_run(
    bench: Bench, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = bench.tree["stages"]
    stages["sft"]["job"]["data"]["train"] = ["nowhere.jsonl", "empty.jsonl"]
    stages["base"]["job"]["sed"] = 1
    stages["late"] = stage("evla", model="${sft}")
    stages["last"] = stage("rl", model="${late}", data={"train": "asks.jsonl"})
    for dry in (False, True):
        with pytest.raises(UserError) as caught:
            bench.run(dry_run=dry)
        shown = caught.value.render()
        errors = [line for line in shown.splitlines() if line.startswith("error: ")]
        assert [line.split(":")[1].strip().rstrip(".job") for line in errors] == [
            "stages.base",
            "stages.sft",
            "stages.sft",
            "stages.late.command",
            "stages.last",
        ]
        assert shown.count("hint: ") == len(errors) and caught.value.exit_code == 2
        assert bench.ran() == []
    said = capsys.readouterr().err
    assert "tokenizer train -> " in said and "; checked" in said and "; 2 problems" in said


@pytest.mark.process
def test_stages_that_do_not_run_are_not_looked_at(bench: Bench) -> None:
    assert bench.run() == 0
    shutil.rmtree(bench.root / "books")
    (bench.root / "books").mkdir()
    (bench.root / "books" / "a.txt").write_text("text")
    (bench.root / "c.jsonl").unlink()
    assert bench.run(only=["tok"]) == 0
    with pytest.raises(UserError, match=r"stages.sft.job: .*c.jsonl"):
        bench.run(only=["sft"])


@pytest.mark.process
def test_a_full_disk_is_warned_of_before_the_first_stage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))
    bench.run()
    assert re.search("the stages write about .* has .* free", caplog.text)


@pytest.mark.process
def test_nothing_heavy_is_imported(bench: Bench, files: Path) -> None:
    """Paths, columns and settings are told before torch, which takes seconds."""
    code = (
        "import sys; from anabatic.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    sys.exit(f'loaded: {loaded}' if loaded else end.code)"
    )
    for command in (
        ["sft", "--model", "small", "--data", "nowhere.jsonl"],
        ["dpo", "--model", "small", "--data", "c.jsonl"],
        ["infer", "-m", "small", "other.jsonl", "-o", "a.jsonl"],
        ["pretrain", "--tokenizer", "nowhere", "--data", "stdlib:"],
        ["rl", "--model", "small", "--data", "sums.jsonl", "--batch.seq-len", "128"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ") and "\nhint: " in done.stderr
