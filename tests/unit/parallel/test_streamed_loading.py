"""Two ranks read their halves of a model; none ever holds much more."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from anabatic.config.sections.common import DeviceSettings, Parallel
from anabatic.device.device import select_device
from anabatic.models import weights_reader
from anabatic.models.lora import merging
from anabatic.models.model_init import materialize_model
from anabatic.models.pretrained import build_meta_causal_lm, load_folder_weights
from anabatic.parallel.sharded_tensors import gather_full_tensor, to_local
from anabatic.parallel.sharding import resolve_sharding
from anabatic.parallel.world import World, init_world, leave_world
from anabatic_testing.multiprocess import spawn_ranks

pytestmark = pytest.mark.process


MIB = 2**20
ADAPTED = "model.layers.1.self_attn.q_proj.weight"


def status(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def sharded(folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, World]:
    device = select_device(DeviceSettings(type="cpu", threads=1))
    world = init_world(device)
    model = build_meta_causal_lm(folder, dtype)
    materialize_model(model, resolve_sharding(Parallel(strategy="zero3"), world, device), device, world)
    return model, world


def read_half(folder: Path, out: Path) -> None:
    model, world = sharded(folder, torch.bfloat16)
    own = sum(to_local(parameter).nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again (proc(5))
    before = status("VmRSS")
    load_folder_weights(model, folder)  # type: ignore[arg-type]
    grown = status("VmHWM") - before
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps([own, largest, grown]))
    leave_world(world)


def test_no_rank_holds_much_more_than_its_part(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="30MB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    spawn_ranks(read_half, 2, tmp_path / "model", tmp_path)
    for rank in range(2):
        own, largest, grown = json.loads((tmp_path / f"{rank}.json").read_text())
        assert own > 50 * MIB
        assert grown < 1.35 * own + largest, f"{grown / MIB:.0f} MiB for a part of {own / MIB:.0f}"


def read_all(folder: Path, out: Path) -> None:
    model, world = sharded(folder, torch.float32)
    load_folder_weights(model, folder)  # type: ignore[arg-type]
    found = {name: gather_full_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    weights_reader.save_weights(model, out / "again" if world.is_main_process else None)  # type: ignore[arg-type]
    assert merging.merge_adapters(model, [merging.WeightedAdapter(out / "adapter", 0.5)]) == 1  # type: ignore[arg-type]
    found["merged"] = gather_full_tensor(dict(model.named_parameters())[ADAPTED].detach())
    if world.is_main_process:
        save_file(found, out / "found.safetensors")
    leave_world(world)


def adapted(folder: Path, weight: float) -> torch.Tensor:
    """Write an adapter of rank 2, scaled by 3 / 2, for one weight; return what it adds."""
    folder.mkdir()
    a, b = torch.randn(2, 20), torch.randn(20, 2)
    name = f"base_model.model.{ADAPTED.removesuffix('.weight')}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return weight * 1.5 * b @ a


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_arrives_and_is_written_again_as_it_was_published(tmp_path: Path, tied: bool) -> None:
    """Experts are stored one by one and held in one tensor; sizes do not divide by the ranks."""
    config = MixtralConfig(
        vocab_size=33,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=7,
        num_local_experts=3,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "again").mkdir()
    change = adapted(tmp_path / "adapter", 0.5)
    spawn_ranks(read_all, 2, tmp_path / "model", tmp_path)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "found.safetensors")
    expected = dict(model.named_parameters())
    torch.testing.assert_close(found.pop("merged"), expected[ADAPTED] + change)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    published, again = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "again"))
    assert published.keys() == again.keys() and any("experts.0." in name for name in again)
    assert all(torch.equal(again[name], value) for name, value in published.items())
