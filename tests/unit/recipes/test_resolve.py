"""What a job becomes before it runs: defaults filled in, rules asked, for trainings and plans alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabatic.cli.app import main
from anabatic.config.loading import settings
from anabatic.config.sections.common import BatchSettings, Parallel
from anabatic.core.errors import ConfigError, MultipleErrors
from anabatic.device.table import Chip
from anabatic.recipes.resolve import Machine, resolve


def model(folder: Path, **sizes: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    return str(folder)


def sft(name: str, **batch: Any) -> Any:
    return settings.build_job("sft", {"model": name, "data": {"train": "rows.jsonl"}, "batch": batch}, "")


def resolve_here(job: Any, nproc: int = 1) -> Any:
    return resolve(job, Machine(None, nproc, is_planned=False)).job


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 32768}, 1024),
        ({"n_positions": 512}, 512),
        ({"text_config": {"max_position_embeddings": 128}}, 128),
        ({"hidden_size": 8}, 1024),
    ],
)
def test_the_model_decides(tmp_path: Path, sizes: dict[str, Any], wanted: int) -> None:
    assert resolve_here(sft(model(tmp_path / "m", **sizes))).batch.seq_len == wanted


def test_what_is_given_stays(tmp_path: Path) -> None:
    name = model(tmp_path / "m", max_position_embeddings=256)
    assert resolve_here(sft(name, seq_len=200)).batch.seq_len == 200
    assert resolve_here(sft(name, micro_batch_tokens=100)).batch.seq_len == 100


def test_runs_and_adapters_lead_to_their_model(tmp_path: Path) -> None:
    model(tmp_path / "run" / "final_model", max_position_embeddings=64)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "run")}))
    assert resolve_here(sft(str(adapter))).batch.seq_len == 64
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(adapter)}))
    assert resolve_here(sft(str(adapter))).batch.seq_len == 1024  # a circle


def test_a_new_model_takes_what_is_common() -> None:
    job = settings.build_job("pretrain", {"tokenizer": "tok", "data": {"train": ["stdlib:"]}}, "")
    assert resolve_here(job).batch.seq_len == BatchSettings().resolved_seq_len == 1024
    with pytest.raises(ConfigError, match="micro_batch_tokens is 100, less than batch.seq_len 200"):
        BatchSettings(seq_len=200, micro_batch_tokens=100)


def test_one_source_is_as_good_as_a_list() -> None:
    assert sft("m").data.train == ["rows.jsonl"]
    several = settings.build_job(
        "sft", {"model": "m", "data": {"train": ["a.jsonl", "b.jsonl"], "valid": "c.jsonl"}}, ""
    )
    assert (several.data.train, several.data.valid) == (["a.jsonl", "b.jsonl"], ["c.jsonl"])


CHIP = Chip("Ascend910B3", 313.0, 64, 1600)


def test_a_deepspeed_file_counts_rows_in_the_model_s_positions(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "x": 1}))
    job = sft(model(tmp_path / "m", max_position_embeddings=256))
    job.parallel.deepspeed = str(file)
    found = resolve(job, Machine(None, 4, 2, is_planned=False))
    assert (found.job.batch.micro_batch_tokens, found.job.parallel.strategy, found.mesh.data_size) == (512, "zero3", 8)
    assert found.origins["batch.seq_len"] == "model: 256 positions"
    assert found.origins["batch.micro_batch_tokens"] == f"recipe: {file}"
    assert [line.split(" ")[0] for line in found.notes] == ["batch.seq_len", f"{file}:"]
    assert "not used: x" in found.warnings[0]
    assert job.batch.seq_len is None and job.parallel.strategy == "auto", "the given job was changed"


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    job = sft(model(tmp_path / "m", max_position_embeddings=64), seq_len=128)
    job.parallel.strategy, job.quantize = "single", "nf4"
    with pytest.raises(MultipleErrors) as caught:
        resolve(job, Machine(None, 2, is_planned=False))
    said = [str(error) for error in caught.value.errors]
    assert len(said) == 3 and all(error.hint for error in caught.value.errors)
    assert "64 positions" in said[0] and "single, and 2 ranks" in said[1] and "itself is trained" in said[2]


def test_plans_and_trainings_refuse_the_same(tmp_path: Path) -> None:
    """What a mesh cannot do does not depend on who asks; a batch that cannot be divided is rounded by a plan."""
    rl = settings.build_job("rl", {"model": "Qwen/Qwen3-8B", "data": {"train": "r.jsonl"}, "rewards": ["exact"]}, "")
    rl.parallel.strategy = "zero3"
    uneven = sft("Qwen/Qwen3-8B", seq_len=100, micro_batch_tokens=300, global_batch_tokens=1000)
    for planned in (True, False):
        with pytest.raises(ConfigError, match="answers are drawn from whole ones"):
            resolve(rl, Machine(CHIP, 8, is_planned=planned))
        with pytest.raises(ConfigError, match="does not divide 3 ") as caught:
            resolve(replace(sft("Qwen/Qwen3-8B"), parallel=Parallel(tensor=2)), Machine(CHIP, 3, is_planned=planned))
        assert ("--device.nproc" in (caught.value.hint or "")) == (not planned)
    assert resolve(uneven, Machine(CHIP, 1)).job.batch.micro_batch_tokens == 300
    with pytest.raises(ConfigError, match="1000 is not a multiple of 1 ranks x 300"):
        resolve(uneven, Machine(CHIP, 1, is_planned=False))


def test_a_depth_that_is_not_chosen_yet_is_no_reason() -> None:
    """A training chooses it by the checkpoint or the devices; a plan by the chip."""
    tree = {"tokenizer": "tok", "data": {"train": ["stdlib:"]}, "schedule": {"minutes": 1}, "parallel": {"pipeline": 8}}
    job = settings.build_job("pretrain", tree, "")
    training = resolve(job, Machine(None, 8, is_planned=False))
    assert training.job.model.depth is None and training.model.find_shape() is None
    with pytest.raises(ConfigError, match=r"parallel.pipeline is 8, the model has \d layers"):
        resolve(job, Machine(Chip("slow", 0.001, 8, 10), 8))


def test_where_values_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {model(tmp_path / 'm', max_position_embeddings=256)}\nlora:\n  r: 8\n")
    words = ["config", "show", "--resolved", "--chip", "910B3", "--npus", "8", "--"]
    words += ["sft", "-c", str(recipe), "--data", "rows.jsonl", "--tuner", "lora"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert not caught.value.code
    text = capsys.readouterr().out
    remarks = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in text.splitlines() if "  # " in line}
    assert remarks == {
        "train": "given: --data",
        "strategy": "machine: 8 x the same weights",
        "seq_len": "model: 256 positions",
        "type": "machine: Ascend910B3",
        "dtype": "machine: npu",
        "model": f"recipe: {recipe}:1",
        "tuner": "given: --tuner",
        "r": f"recipe: {recipe}:3",
    }
    again = settings.parse_job("sft", text, "resolved")
    assert (again.batch.seq_len, again.parallel.strategy, again.lora.r) == (256, "ddp", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resolved", "chat"], "chat is not a command that trains"),
        (["sft", "--chip", "910B3"], "--chip, --npus and --nodes go with --resolved"),
        (["--resolved", "--chip", "310P3", "--", "sft", "--model", "Qwen/Qwen3-8B", "--data", "x"], "for inference"),
        (["--resolved", "--", "sft", "--model", "nowhere/at/all", "--data", "x"], "nowhere/at/all"),
        (["--resolved", "--npus", "0", "--", "sft", "--model", "Qwen/Qwen3-8B", "--data", "x"], "--npus is 0"),
        (["--resolved", "--chip", "910X", "--", "sft", "--model", "Qwen/Qwen3-8B", "--data", "x"], "no chip '910X'"),
        (["--resolved", "--", "sft", "--model", "m"], "data.train"),
    ],
)
def test_what_cannot_be_resolved(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", "show", *words])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and message in said and "hint: " in said and "Traceback" not in said
