"""Two processes that share the layers train as one does; a run continues with all layers on one, and divided again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from e2e import command
from e2e.home import Home, Options
from e2e.test_context import require_equal, rows

STAGES: Options = {"parallel.pipeline": 2}
ZERO3: Options = {"parallel.strategy": "zero3"}
LORA: Options = {"tuner": "lora", "lora.r": 4, "optim.lr": 0.01}


def test_a_pretraining_is_divided_and_put_together_twice(home: Home, base: Path, tmp_path: Path) -> None:
    """Two stages, stopped; then one process; then two stages again."""
    out = tmp_path / "run"
    told = command.interrupt(home.start(*home.pretrain(out, 2, more=STAGES)), out, 7, signal.SIGTERM, 143)
    assert "pipeline parallelism: 2 stages of" in told.err
    command.interrupt(home.start(*home.pretrain(out)), out, 17, signal.SIGKILL, -9)
    home.anabatic(*home.pretrain(out, 2, more=STAGES))
    assert command.events(out).count("resume") == 2
    require_equal(base, out, "model.safetensors")
    losses = [row["loss"] for row in rows(out, "train")]
    assert losses[-1] < losses[0]


def test_an_adapter_is_trained_in_stages(home: Home, base: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    home.together(home.sft(one, base, more=LORA), home.sft(two, base, 2, more={**LORA, **STAGES}))
    require_equal(one, two, "adapter_model.safetensors")
    losses = list(command.losses(two).values())
    assert losses[-1] < losses[0]


def test_stages_have_two_chunks_each(home: Home, tmp_path: Path) -> None:
    """Interleaved, stopped, continued with one chunk; then an adapter of the result."""
    one, two, alone, adapted = (tmp_path / name for name in ("one", "two", "alone", "adapted"))
    deep: Options = {"model.depth": 4}
    chunks: Options = {**STAGES, "parallel.pipeline-chunks": 2}
    told = command.interrupt(home.start(*home.pretrain(two, 2, more={**deep, **chunks})), two, 7, signal.SIGTERM, 143)
    assert "2 stages of 1 and 1 + 1 and 1 layers, interleaved 1F1B" in told.err
    home.together(home.pretrain(one, more=deep), home.pretrain(two, 2, more={**deep, **STAGES}))
    require_equal(one, two, "model.safetensors")
    home.together(home.sft(alone, one, more=LORA), home.sft(adapted, one, 2, more={**LORA, **chunks}))
    require_equal(alone, adapted, "adapter_model.safetensors")


def test_processes_share_a_stage(home: Home, base: Path, tmp_path: Path) -> None:
    """Tokens and weights are divided among the processes of a stage, continued with matrices divided instead."""
    out = tmp_path / "run"
    shared: Options = {**STAGES, "parallel.context": 2, **ZERO3}
    command.interrupt(home.start(*home.pretrain(out, 4, more=shared)), out, 7, signal.SIGTERM, 143)
    home.anabatic(*home.pretrain(out, 4, more={**STAGES, "parallel.tensor": 2}))
    assert command.events(out).count("resume") == 1
    require_equal(base, out, "model.safetensors")


@pytest.mark.parametrize(
    ("more", "message", "hint"),
    [
        ({**ZERO3, "parallel.offload": "cpu"}, "parallel.pipeline is 2, and parallel.offload is cpu", "offload none"),
        (
            {"parallel.pipeline-chunks": 2},
            "parallel.pipeline 2 x parallel.pipeline_chunks 2 = 4, the model has 2 layers",
            "leave --parallel.pipeline-chunks out",
        ),
        ({"eval.sample-prompts": ["a"]}, "eval.sample_prompts needs the whole model on one process", "leave them out"),
    ],
)
def test_other_trainings_are_refused(home: Home, tmp_path: Path, more: Options, message: str, hint: str) -> None:
    told = home.anabatic(*home.pretrain(tmp_path / "run", 2, more={**STAGES, **more}), code=2)
    assert message in told.err and hint in told.err
    assert not (tmp_path / "run" / "checkpoint-1").exists()
