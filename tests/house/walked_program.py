"""Do once what the walks of the architecture page describe, and record the calls of their steps.

usage: python tests/house/walked_program.py FOLDER     reads FOLDER/steps.json, writes FOLDER/*.calls
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import anabatic
from anabatic.cli.app import main
from anabatic.config.sections.common import LogSettings
from anabatic.core.paths import RunFolder
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.device.device import Device
from anabatic.device.table import DEVICES
from anabatic.infer.engine import Engine
from anabatic.parallel.world import World
from anabatic.sandbox import sandbox_runner
from anabatic.train.metrics.device_stats import watch_devices
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic_testing.random_models import build_random_model
from anabatic_testing.tiny_models import save_tiny_chat_model
from house.call_recorder import recording
from unit.infer.server.running import catalogue_of, serving
from unit.monitor import fake

FOLDER = Path(sys.argv[1])
SOURCE = os.path.dirname(anabatic.__file__)
STEPS = json.loads((FOLDER / "steps.json").read_text())


def run_command(name: str, words: list[str]) -> None:
    with recording(FOLDER / f"{name}.calls", SOURCE, STEPS), suppress(SystemExit):
        main(words)


def train_and_resume(model: str) -> None:
    rows = FOLDER / "rows.jsonl"
    turns = [
        [{"role": "user", "content": f"say {at}"}, {"role": "assistant", "content": f"{at} it is"}] for at in range(64)
    ]
    rows.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    settings = {"batch.seq-len": 64, "batch.micro-batch-tokens": 128, "batch.global-batch-tokens": 128}
    settings |= {"schedule.max-steps": 4, "save.every": 2, "log.every": 1, "device.type": "cpu", "tuner": "lora"}
    settings |= {"model": model, "data": rows, "out": FOLDER / "run", "config": FOLDER / "recipe.yaml"}
    (FOLDER / "recipe.yaml").write_text("batch: {packing: true}\n")
    words = ["sft", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]
    run_command("training", words)
    for name in ("checkpoint-4", "best_model", "final_model"):
        shutil.rmtree(FOLDER / "run" / name)
    run_command("resume", words)


def watch_npus() -> None:
    """The live view of a fake npu-smi, then what a training records of the same devices."""
    os.environ["PATH"] = fake.on_path(fake.printing(FOLDER / "bin", fake.table(2)))
    run_command("monitor", ["monitor", "--once"])
    device = Device("cuda", 0, "watched only", torch.float32, DEVICES["cuda"], None, 1)
    log = LogSettings(device_every=0.05)
    (FOLDER / "watched").mkdir()
    with (
        recording(FOLDER / "device_stats.calls", SOURCE, STEPS),
        watch_devices(log, device, World()) as window,
        MetricsRecorder(RunFolder(FOLDER / "watched"), log, {}) as metrics,
    ):
        assert window is not None
        while not (figures := window.take_figures(1.0, 1.0)):
            time.sleep(0.01)
        metrics.log_train_step(1, figures)


def request_answer(model: str) -> None:
    tokenizer = load_tokenizer(Path(model))
    network = build_random_model(len(tokenizer), seed=0)
    body = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    body["response_format"] = {"type": "json_object"}
    models = {"one": (Engine(network, tokenizer, max_batch=2, max_len=128), network)}
    with recording(FOLDER / "request.calls", SOURCE, STEPS), serving(catalogue_of(models)) as server:
        answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text


def check_hostile_program() -> None:
    calls = FOLDER / "zygote-"
    start = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import call_recorder, os, json, pathlib; "
        f"steps = json.loads(pathlib.Path({str(FOLDER / 'steps.json')!r}).read_text()); del sys.path[0]; "
        f"file = pathlib.Path({str(calls)!r} + str(os.getpid()) + '.calls'); "
        f"call_recorder.CallRecorder(file, {SOURCE!r}, steps).start(); "
    )
    sandbox_runner._ZYGOTE_CODE = start + sandbox_runner._ZYGOTE_CODE
    with recording(FOLDER / "program.calls", SOURCE, STEPS), sandbox_runner.Sandbox() as sandbox:
        (FOLDER / "mode.txt").write_text(sandbox.protections.mode)
        outcome = sandbox.check_program(
            "import sys\ndef add(a, b):\n    sys._getframe()\n    return a + b\n", "assert add(1, 2) == 3\n"
        )
    assert outcome.status == "ok", outcome


if __name__ == "__main__":
    model_folder = save_tiny_chat_model(FOLDER)
    watch_npus()
    train_and_resume(model_folder)
    request_answer(model_folder)
    check_hostile_program()
