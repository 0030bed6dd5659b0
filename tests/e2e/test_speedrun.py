"""The NanoChat speedrun, tiny, with real questions of GSM8K and HumanEval: every stage, from text to a conversation.

One process runs by default; ANABATIC_TEST_SPEEDRUN=all runs two as well, and `tests/npu_sim/again` two simulated NPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anabatic.core import json_reader
from e2e.home import Home

CORE = """icl_tasks:
- {label: winds, dataset_uri: winds.jsonl, num_fewshot: [1], icl_task_type: multiple_choice}
- {label: last, dataset_uri: last.jsonl, num_fewshot: [0], icl_task_type: language_modeling}
"""
CHANCE = "Eval Task,Task Category,Random baseline\nwinds,x,50\nlast,x,0\n"
ROWS = {
    "winds": [{"query": f"Is {n} warm?", "choices": ["it is", "it can"], "gold": n % 2} for n in range(8)],
    "last": [{"context": f"one two three {n}", "continuation": "four"} for n in range(8)],
}
SMALL = """
out: {out}
stages:
  base: {{job: {{schedule: {{max_steps: 6}}, eval: {{every: 6}}}}}}
  mid: {{job: {{schedule: {{max_steps: 4}}}}}}
  sft: {{job: {{schedule: {{max_steps: 4}}}}}}
"""
ALL = os.environ.get("ANABATIC_TEST_SPEEDRUN") == "all"


def evaluations(root: Path, data: Path) -> Path:
    """A folder with a bundle as CORE's and the files of the data sets."""
    folder = root / "evals"
    (folder / "eval_bundle" / "eval_data").mkdir(parents=True)
    (folder / "eval_bundle" / "core.yaml").write_text(CORE)
    (folder / "eval_bundle" / "eval_meta_data.csv").write_text(CHANCE)
    for name, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval_bundle" / "eval_data" / f"{name}.jsonl").write_text(lines)
    for name in ("gsm8k_test.jsonl", "HumanEval.jsonl.gz"):
        (folder / name).symlink_to(data / "eval" / name)
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_every_stage_of_the_speedrun(home: Home, shared_data: Path, tmp_path: Path, processes: int) -> None:
    if not ALL and processes != 1:
        pytest.skip("ANABATIC_TEST_SPEEDRUN=all runs it")
    out, small = tmp_path / "run", tmp_path / "small.yaml"
    small.write_text(SMALL.format(out=out))
    given = {
        "text": shared_data / "text" / "wiki_demo.txt",
        "chats": "task:identity#400",
        "nproc": processes,
        "maths": f"{shared_data / 'eval' / 'gsm8k_train.jsonl'}#200",
        "evals": evaluations(tmp_path, shared_data),
        "core": "core",
        "chatcore": "gsm8k_chat#4,humaneval_chat#4",
    }
    words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    recipes = ["speedrun", "overlays/tiny", small]
    told = home.anabatic("run", *[word for path in recipes for word in ("-c", path)][1:], *words)
    print("\n".join(told.err.splitlines()[-12:]))  # the seconds of each stage
    ended = {
        row["stage"]: row["state"]
        for row in json_reader.read_json_lines(out / "pipeline.jsonl")
        if row["event"] == "stage"
    }
    names = ["tokenizer", "base", "base_eval", "mid", "sft", "sft_eval", "rl", "eval", "chat"]
    assert ended == dict.fromkeys(names, "done")
    base = json.loads((out / "base_eval" / "eval.json").read_text())
    assert base["bits_per_byte"]["tokens"] > 1000 and set(base["tasks"]) == {"winds", "last"}
    for stage in ("sft_eval", "eval"):
        tasks = json.loads((out / stage / "eval.json").read_text())["tasks"]
        assert {name: task["n"] for name, task in tasks.items()} == {"gsm8k_chat": 4, "humaneval_chat": 4}
    rewards = [
        row["reward"] for row in json_reader.read_json_lines(out / "rl" / "metrics.jsonl") if row["kind"] == "train"
    ]
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    report = (out / "report.html").read_text()
    assert all(name in report for name in names)
