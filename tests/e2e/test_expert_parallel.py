"""Two processes that share the experts of each layer train as one does; runs continue with all experts on one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from anabatic.data.tokenizer import hf_folder
from anabatic.models.pretrained import save_model
from anabatic_testing.tiny_models import COMMON_CONFIG, FAMILY_CONFIGS
from e2e import command
from e2e.home import Home, Options
from e2e.test_context import require_equal, rows

SHARED: Options = {"parallel.expert": 2}
LORA: Options = {"tuner": "lora", "lora.r": 4, "lora.target-modules": ["o_proj", "all-experts"], "optim.lr": 0.01}
# case: (settings of all runs, those of the last, its processes, file of the result)
CASES: dict[str, tuple[Options, Options, int, str]] = {
    "full": ({"optim.router-aux-loss": 0.01}, {**SHARED, "parallel.strategy": "zero3"}, 2, "model.safetensors"),
    "adapters": (LORA, {}, 1, "adapter_model.safetensors"),
}


@pytest.fixture(scope="module")
def mixture(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts with transformers' random weights and the tokenizer of `home`."""
    sizes = {**COMMON_CONFIG, **FAMILY_CONFIGS["Qwen3Moe"], "vocab_size": 320, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    folder = tmp_path_factory.mktemp("mixture")
    save_model(model, folder, hf_folder.load_tokenizer(home.tokenizer))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_experts_are_divided_put_together_and_divided_again(
    home: Home, mixture: Path, tmp_path: Path, case: str
) -> None:
    given, last, processes, file = CASES[case]
    more: Options = {**given, "schedule.max-steps": 12}
    one, two = tmp_path / "one", tmp_path / "two"
    told = command.interrupt(home.start(*home.sft(two, mixture, 2, {**more, **SHARED})), two, 6, signal.SIGKILL, -9)
    assert "expert parallelism: 2 processes share the experts of 2 layers" in told.err
    if processes == 2:
        command.interrupt(home.start(*home.sft(two, mixture, more=more)), two, 8, signal.SIGTERM, 143)
    home.together(home.sft(two, mixture, processes, {**more, **last}), home.sft(one, mixture, more=more))
    assert command.events(two).count("resume") == processes
    require_equal(one, two, file)
    for row, other in zip(rows(one, "train"), rows(two, "train"), strict=True):
        routing = {key: value for key, value in row.items() if "expert" in key or "router" in key}
        assert len(routing) == (4 if case == "full" else 3)
        assert {key: other[key] for key in routing} == pytest.approx(routing, rel=2e-2)
    if case == "full":
        names = []
        for path in (mixture, two / "final_model"):
            with safe_open(path / file, "pt") as opened:
                names.append(set(opened.keys()))
        assert names[0] == names[1]
