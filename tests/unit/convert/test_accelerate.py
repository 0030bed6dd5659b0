"""Files of `accelerate config`, alone and behind `accelerate launch --config_file`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import settings, yaml_reader
from anabatic.convert import converter

PLAIN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_NPU",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "use_cpu": False,
}
LAUNCH = "accelerate launch --config_file acc.yaml"
SCRIPT = "train.py --model_name_or_path M --per_device_train_batch_size 2"


def convert(folder: Path, config: dict[str, Any], typed: str = "") -> tuple[str, Any, list[str]]:
    """Return the first line, the job and the notes; without a command the file alone is converted."""
    file = folder / "acc.yaml"
    file.write_text(yaml_reader.dump_yaml(config), encoding="utf-8")
    script = folder / "run.sh"
    script.write_text(typed + "\n", encoding="utf-8")
    made = converter.convert_command("deepspeed", [str(script if typed else file)])
    tree = yaml_reader.parse_yaml(made.text, "printed").tree
    return made.text.splitlines()[0], settings.build_job("sft", tree, "printed"), made.messages


@pytest.mark.parametrize("typed", ["", f"{LAUNCH} {SCRIPT}"])
def test_one_machine(typed: str, tmp_path: Path) -> None:
    first, job, notes = convert(tmp_path, PLAIN, typed)
    assert first == "# anabatic sft -c FILE"
    assert (job.device.nproc, job.device.dtype, job.parallel.strategy) == (8, "bf16", "auto")
    assert not [note for note in notes if note.startswith(("not known", "left out"))]


def test_several_machines(tmp_path: Path) -> None:
    more = {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    first, _, _ = convert(tmp_path, {**PLAIN, **more, "machine_rank": 1})
    launch = "--nnodes 2 --node-rank 1 --nproc 8 --master-addr 10.0.0.1 --master-port 29500"
    assert first == f"# anabatic launch {launch} -- sft -c FILE"


def test_deepspeed(tmp_path: Path) -> None:
    block = {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero_stage": 3,
    }
    config = {**PLAIN, "distributed_type": "DEEPSPEED", "deepspeed_config": block}
    _, job, notes = convert(tmp_path, config, f"{LAUNCH} {SCRIPT}")
    assert (job.parallel.strategy, job.parallel.offload) == ("zero3", "cpu")
    assert job.batch.global_batch_tokens == 2 * 4 * 8 * job.batch.seq_len
    assert not [note for note in notes if note.startswith("not known")]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    config["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    _, job, _ = convert(tmp_path, config)
    assert (job.parallel.strategy, job.optim.max_grad_norm) == ("zero2", 0.5)


@pytest.mark.parametrize(
    ("block", "strategy", "replicate"),
    [
        ({}, "zero3", 1),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "zero3", 1),
        ({"fsdp_sharding_strategy": 2}, "zero2", 1),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "ddp", 1),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "zero3", 2),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, "zero3", 1),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, "zero2", 1),
    ],
)
def test_fsdp(block: dict[str, Any], strategy: str, replicate: int, tmp_path: Path) -> None:
    config = {**PLAIN, "num_machines": 2, "num_processes": 16, "distributed_type": "FSDP", "fsdp_config": block}
    _, job, notes = convert(tmp_path, config)
    assert (job.parallel.strategy, job.parallel.replicate) == (strategy, replicate)
    assert not [note for note in notes if note.startswith(("not known", "left out"))]


def test_offload_and_recomputation_of_fsdp(tmp_path: Path) -> None:
    block = {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True, "fsdp_odd": 1}
    _, job, notes = convert(tmp_path, {**PLAIN, "distributed_type": "FSDP", "fsdp_config": block})
    assert (job.parallel.offload, job.recompute) == ("cpu", "full")
    assert [note for note in notes if note.startswith("not known")] == ["not known: fsdp_odd: 1"]


def test_other_dimensions_and_distributions(tmp_path: Path) -> None:
    dimensions = {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1}
    _, job, _ = convert(tmp_path, {**PLAIN, "parallelism_config": dimensions})
    assert (job.parallel.tensor, job.parallel.context) == (2, 1)
    _, _, notes = convert(tmp_path, {**PLAIN, "distributed_type": "XLA", "gpu_ids": "0,1"})
    assert any(note.startswith("left out: distributed_type: XLA: no such distribution") for note in notes)
    assert any("ASCEND_RT_VISIBLE_DEVICES" in note for note in notes)


def test_options_count_more_than_the_file(tmp_path: Path) -> None:
    _, job, notes = convert(tmp_path, PLAIN, f"{LAUNCH} --num_processes 4 --mixed_precision fp16 {SCRIPT}")
    assert (job.device.nproc, job.device.dtype) == (4, "fp16")
    assert not any("config_file" in note for note in notes)


def test_a_file_that_is_not_here_is_reported(tmp_path: Path) -> None:
    _, job, notes = convert(tmp_path, PLAIN, f"accelerate launch --config_file other.yaml --use_fsdp {SCRIPT}")
    assert job.parallel.strategy == "zero3"
    told = [note for note in notes if "--config_file other.yaml" in note]
    assert len(told) == 1
    assert "set parallel.strategy and device.nproc" in told[0]


@pytest.mark.parametrize(
    ("word", "strategy", "offload"),
    [
        ("full_shard", "zero3", "none"),
        ("'full_shard auto_wrap offload'", "zero3", "cpu"),
        ("'shard_grad_op auto_wrap'", "zero2", "none"),
        ("hybrid_shard", "zero3", "none"),
        ("no_shard", "ddp", "none"),
    ],
)
def test_words_of_the_trainer(word: str, strategy: str, offload: str, tmp_path: Path) -> None:
    _, job, _ = convert(tmp_path, PLAIN, f"torchrun --nproc_per_node 8 {SCRIPT} --fsdp {word}")
    assert (job.parallel.strategy, job.parallel.offload) == (strategy, offload)
