"""A random chat model in a folder, and the settings of a run that takes a second."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.rl import HeldoutEvaluate, RlJob
from anabatic.config.sections.common import BatchSettings, Data, DeviceSettings, Save, Schedule
from anabatic.models.pretrained import save_model
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model

MINE = """
def vowels(text, row):
    return sum(letter in "aeiou" for letter in text) / 8
def often(text, row):
    return len(text) - len(set(text)) + 0.0
"""
Make = Callable[..., RlJob]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that says anything, and a file of rewards beside it."""
    folder = tmp_path_factory.mktemp("rl")
    tokenizer = build_byte_tokenizer(folder / "tokenizer")
    save_model(build_random_model(len(tokenizer)), folder / "model", tokenizer)
    (folder / "mine.py").write_text(MINE)
    return folder / "model"


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def make(chat_model: Path, tmp_path: Path) -> Make:
    """Settings of a small run; what is given overrides them."""
    return make_in(chat_model, tmp_path)


def make_in(chat_model: Path, folder: Path) -> Make:
    """Return what makes the settings of a small run in a folder."""

    def settings(**given: Any) -> RlJob:
        steps = given.pop("steps", 4)
        first: dict[str, Any] = {
            "model": str(chat_model),
            "out": str(folder / given.pop("name", "run")),
            "data": Data(train=["task:spelling#20"]),
            "rewards": [f"{chat_model.parent / 'mine.py'}:vowels"],
            "batch": BatchSettings(seq_len=64),
            "eval": HeldoutEvaluate(rows=4, every=2),
            "device": DeviceSettings(type="cpu", threads=1),
            "schedule": Schedule(max_steps=steps),
            "save": Save(every=1, keep_last=20),
            "examples_per_step": 4,
            "num_samples": 4,
            "device_batch_size": 8,
        }
        job = RlJob(**{**first, **given})
        job.sampling.max_new_tokens = 8
        job.device.dtype = "fp32"
        return job

    return settings
