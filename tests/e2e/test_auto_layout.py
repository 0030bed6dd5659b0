"""`--auto` on two processes that cannot divide a batch: they share it, and train as one process does."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from e2e import command
from e2e.home import Home, Options
from e2e.test_context import require_equal

WHOLE: Options = {"batch.micro-batch-tokens": 512, "batch.global-batch-tokens": 512}
"""One micro-batch a step."""


def test_a_batch_is_shared(home: Home, base: Path, tmp_path: Path) -> None:
    """Stopped, and continued with what was chosen."""
    one, two = tmp_path / "one", tmp_path / "two"
    shared = {**WHOLE, "auto": True}
    told = command.interrupt(home.start(*home.sft(two, base, 2, more=shared)), two, 7, signal.SIGTERM, 143)
    assert "auto: " in told.err and "context parallelism: 2 processes share the tokens of a batch" in told.err
    chosen = json.loads((two / "auto.json").read_text())["way"]
    home.together(home.sft(one, base, more=WHOLE), home.sft(two, base, 2, more=shared))
    assert json.loads((two / "auto.json").read_text())["way"] == chosen
    require_equal(one, two, "model.safetensors")


def test_without_auto_the_batch_is_refused(home: Home, base: Path, tmp_path: Path) -> None:
    told = home.anabatic(*home.sft(tmp_path / "run", base, 2, more=WHOLE), code=2)
    assert "batch.global_batch_tokens 512 is not a multiple of 2 ranks x 512 micro-batch tokens" in told.err


def test_stages_are_rehearsed(home: Home, base: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stages: Options = {"parallel.pipeline": 2, "auto": True}
    told = home.together(home.sft(one, base), home.sft(two, base, 2, more=stages))[1]
    assert "auto: two steps with micro-batches of 256 tokens x 2" in told.err
    require_equal(one, two, "model.safetensors")
