"""A model with layers of the gated delta rule through the commands: trained in two processes, killed, merged, asked."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import transformers

from anabatic.data.tokenizer import hf_folder
from anabatic.models.pretrained import save_model
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS
from e2e import command
from e2e.home import SHORT, Home, Options
from e2e.test_context import require_equal


@pytest.fixture(scope="module")
def model(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-Next with experts; every second layer is linear."""
    tokenizer = hf_folder.load_tokenizer(home.tokenizer)
    sizes = {**COMMON_CONFIG, **FAMILY_CONFIGS["Qwen3Next"], "vocab_size": len(tokenizer)}
    transformers.set_seed(0)
    folder = tmp_path_factory.mktemp("linear") / "model"
    built = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig(**sizes))
    save_model(built, folder, tokenizer)
    return folder


def test_an_adapter_is_killed_continued_and_merged(home: Home, model: Path, tmp_path: Path) -> None:
    more = {"tuner": "lora", "lora.r": 4}
    whole, killed, alone, merged = (tmp_path / name for name in ("whole", "killed", "alone", "merged"))
    home.anabatic(*home.sft(whole, model, 2, more=more))
    command.interrupt(home.start(*home.sft(killed, model, 2, more=more)), killed, 7, signal.SIGKILL, -9)
    home.anabatic(*home.sft(killed, model, 2, more=more))
    assert len(command.losses(whole)) == SHORT and command.losses(killed) == command.losses(whole)
    home.anabatic(*home.sft(alone, model, more=more))
    assert command.losses(alone) == pytest.approx(command.losses(whole), rel=1e-4)
    home.anabatic("merge", "--model", whole, "--out", merged)
    answers = home.together(
        *(("chat", "-m", one, "-p", "Spell the word wind.", "--sampling.temperature", 0) for one in (whole, merged))
    )
    assert answers[0].out == answers[1].out != ""


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_two_processes_share_the_tokens_of_a_batch(home: Home, model: Path, tmp_path: Path, method: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more: Options = {"parallel.context": 2, "parallel.context-method": method, "parallel.strategy": "zero3"}
    home.together(home.sft(one, model), home.sft(two, model, 2, more=more))
    require_equal(one, two, "model.safetensors")


def test_two_processes_divide_the_heads(home: Home, model: Path, tmp_path: Path) -> None:
    """Killed, continued, and saved in the layout of one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = home.sft(two, model, 2, more={"parallel.tensor": 2})
    command.interrupt(home.start(*words), two, 7, signal.SIGKILL, -9)
    home.together(home.sft(one, model), words)
    require_equal(one, two, "model.safetensors")


def test_two_processes_that_divide_the_heads_pretrain_and_generate(home: Home, model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    sampled: Options = {"eval.sample-prompts": "The"}
    told = home.together(
        home.mid(one, model, more=sampled), home.mid(two, model, 2, more={**sampled, "parallel.tensor": 2})
    )
    require_equal(one, two, "model.safetensors")
    samples = [[line for line in run.err.splitlines() if "sample: The" in line] for run in told]
    assert samples[0] == samples[1] != []


def test_heads_that_processes_do_not_divide_are_named(home: Home, model: Path, tmp_path: Path) -> None:
    more: Options = {"parallel.context": 3, "parallel.context-method": "ring"}
    shared = home.anabatic(*home.sft(tmp_path / "shared", model, 3, more=more), code=2)
    assert "parallel.context is 3, which does not divide the model's 4 value heads" in shared.err
    assert "hint: use 1 or 2 or 4" in shared.err
