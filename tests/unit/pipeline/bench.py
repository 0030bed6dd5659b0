"""A pipeline in a folder whose stages run a small program in place of `anabatic`.

The program takes the same arguments, notes that it ran, and behaves as the file `behave` beside it says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings, yaml_reader
from anabatic.config.pipeline import PipelineJob
from anabatic.recipes.pipeline import runner

ALL = ["tok", "base", "sft", "talk"]

PROGRAM = """
import json, pathlib, signal, sys, time
import yaml
here = pathlib.Path(__file__).parent
file = pathlib.Path(sys.argv[-1])
job = yaml.safe_load(file.read_text())
name = file.parent.name
with open(here / "ran", "a") as ran:
    ran.write(name + "\\n")
behaviour = dict(line.split() for line in (here / "behave").read_text().splitlines())
how = behaviour.get(name, "good")
out = pathlib.Path(job.get("out") or file.parent)
out.mkdir(parents=True, exist_ok=True)
if how == "fail":
    sys.exit(3)
if how == "slow":
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    (here / "waiting").touch()
    while not stop:
        time.sleep(0.02)
    time.sleep(0.5)
    (here / "signals").write_text(str([int(number) for number in stop]))
    how = "stop"
if how == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (here / "waiting").touch()
    time.sleep(60)
(out / "checkpoint").write_text("saved")
for made in ("tokenizer.json", "tokenizer_config.json", "eval.json"):
    (out / made).touch()
if sys.argv[1] in ("pretrain", "sft"):
    for model in ("best_model", "final_model"):
        (out / model).mkdir(exist_ok=True)
        (out / model / "config.json").touch()
        (out / model / "tokenizer.json").touch()
    (out / "summary.json").write_text(json.dumps({"finished": how == "good"}))
"""


class Bench:
    """A pipeline in a folder, with the stand-in program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        (root / "program.py").write_text(PROGRAM)
        self.behave()
        self.tree: dict[str, Any] = {
            "out": str(self.out),
            "title": "Bench",
            "vars": {"corpus": "books", "steps": "5"},
            "stages": {
                "tok": {"command": "tokenizer train", "job": {"data": {"train": ["${corpus}"]}}},
                "base": {
                    "command": "pretrain",
                    "job": {
                        "tokenizer": "${tok}",
                        "data": {"train": ["${corpus}/a.txt"]},
                        "schedule": {"max_steps": "${steps}"},
                    },
                },
                "sft": {"command": "sft", "job": {"model": "${base}", "data": {"train": ["c.jsonl"]}}},
                "talk": {"command": "chat", "job": {"model": "${sft}", "prompt": ["costs $$5"]}},
            },
        }

    def job(self) -> PipelineJob:
        built = settings.build_job("run", self.tree, "bench")
        assert isinstance(built, PipelineJob)
        return built

    def behave(self, **stages: str) -> None:
        (self.root / "behave").write_text("".join(f"{name} {how}\n" for name, how in stages.items()))

    def run(self, **options: Any) -> int:
        program = [sys.executable, str(self.root / "program.py")]
        return runner.run(self.job(), program=program, **options)

    def ran(self) -> list[str]:
        """Stages that ran since the last question."""
        path = self.root / "ran"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def read(self, stage: str) -> dict[str, Any]:
        return yaml_reader.read_yaml(self.out / stage / "stage.yaml").tree
