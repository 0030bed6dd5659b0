"""A whole pipeline as `make demo` runs it, only smaller: interrupted, continued, skipped, changed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from anabatic.core import json_reader
from e2e import command
from e2e.home import Home

RECIPE = """
title: A tiny demo
out: {out}
vars: {{lr: '0.003', question: 'Who are you?'}}
stages:
  tokenizer:
    command: tokenizer train
    job: {{vocab_size: 320, data: {{train: [{text}]}}}}
  base:
    command: pretrain
    job:
      tokenizer: ${{tokenizer}}
      model: {{depth: 2, width: 64}}
      data: {{train: [{text}]}}
      schedule: {{max_steps: 60}}
      eval: {{sample_prompts: ["the wind"]}}
      {common}
  mid:
    command: pretrain
    job:
      model: {{path: "${{base}}"}}
      data: {{train: ["{text}@0.5", "task:all#400@0.5"]}}
      schedule: {{max_steps: 8}}
      {common}
  eval:
    command: eval
    job:
      model: ${{mid}}
      data: {{train: [{text}]}}
      tasks: ["task:spelling#4", "task:identity#4"]
      max_new_tokens: 8
      device: {{type: {device}, threads: 1}}
  sft:
    command: sft
    job:
      model: ${{mid}}
      data: {{train: ["task:all#400"]}}
      optim: {{lr: "${{lr}}"}}
      schedule: {{max_steps: 8}}
      {common}
  chat:
    command: chat
    job:
      model: ${{sft}}
      prompt: ["${{question}}", "Spell the word wind."]
      sampling: {{temperature: 0.0, max_new_tokens: 8}}
      device: {{type: {device}, threads: 1}}
"""
COMMON = """batch: {seq_len: 128, micro_batch_tokens: 512, global_batch_tokens: 512}
      log: {every: 1}
      device: {type: DEVICE, threads: 1}"""
STAGES = ["tokenizer", "base", "mid", "eval", "sft", "chat"]


def states(out: Path) -> list[tuple[str, str]]:
    """(stage, how it went) of the newest `anabatic run`."""
    rows = list(json_reader.read_json_lines(out / "pipeline.jsonl"))
    first = max(index for index, row in enumerate(rows) if row["event"] == "pipeline_start")
    return [(row["stage"], row["state"]) for row in rows[first:] if row["event"] == "stage" and row["state"] != "run"]


def test_a_pipeline_from_text_to_a_conversation(home: Home, tmp_path: Path) -> None:
    out, recipe = tmp_path / "demo", tmp_path / "demo.yaml"
    recipe.write_text(
        RECIPE.format(out=out, text=home.text, common=COMMON.replace("DEVICE", home.device), device=home.device)
    )

    process = home.start("run", recipe)
    command.wait_for(process, (out / "base" / "metrics.jsonl").exists)
    command.wait_for(process, lambda: max(command.losses(out / "base"), default=0) >= 5)
    process.send_signal(signal.SIGINT)
    stopped = command.end(process, 130)
    assert "waiting for the stage to save" in stopped.err and "run the same command again" in stopped.err
    assert states(out) == [("tokenizer", "done"), ("base", "interrupted")]
    at = command.checkpoints(out / "base")[-1]
    assert 5 <= at < 60

    whole = home.anabatic("run", recipe)
    assert f"checkpoint-{at}: step {at}" in whole.err
    assert states(out) == [("tokenizer", "skip"), *((name, "done") for name in STAGES[1:])]
    assert command.events(out / "base").count("start") == command.events(out / "base").count("resume") == 1
    assert list(command.losses(out / "base")) == list(range(1, 61))
    evaluation = json.loads((out / "eval" / "eval.json").read_text())
    assert set(evaluation) >= {"bits_per_byte", "tasks"} and set(evaluation["tasks"]) == {"spelling", "identity"}
    turns = [row["role"] for row in json_reader.read_json_lines(out / "chat" / "chat.jsonl")]
    assert turns == ["user", "assistant"] * 2
    report = (out / "report.html").read_text()
    assert "A tiny demo" in report and all(name in report for name in STAGES) and "Who are you?" in report

    again = home.anabatic("run", recipe)
    assert states(out) == [(name, "skip") for name in STAGES]
    assert again.err.count("skipped, done and unchanged") == len(STAGES)

    planned = home.anabatic("run", recipe, "--set", "lr=0.001", "--dry-run").err.splitlines()
    assert [line.split()[0] for line in planned] == ["skip", "skip", "skip", "skip", "run", "run"]
    assert "changed: optim.lr" in planned[4] and "stage sft" in planned[5]

    home.anabatic("run", recipe, "--set", "question=Hello")
    assert states(out) == [("chat", "stale"), *((name, "skip") for name in STAGES[:5]), ("chat", "done")]
    assert next(json_reader.read_json_lines(out / "chat" / "chat.jsonl"))["content"] == "Hello"
    assert next(json_reader.read_json_lines(out / "chat.old" / "chat.jsonl"))["content"] == "Who are you?"
