"""`batch.seq_len` where a recipe leaves it open: what is common, and no more than the model can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import settings
from anabatic.config.sections.common import BatchSettings
from anabatic.core.errors import ConfigError
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
        ({"hidden_size": 8}, None),
    ],
)
def test_the_model_decides(tmp_path: Path, sizes: dict[str, Any], wanted: int | None) -> None:
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
    assert resolve_here(sft(str(adapter))).batch.seq_len is None  # a circle


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
