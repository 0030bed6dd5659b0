"""A machine without caches and settings of hubs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _clean_hub_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path / "cache"))
    names = "HF_HUB_OFFLINE ANABATIC_HUB USE_MODELSCOPE_HUB MODELSCOPE_DOMAIN MODELSCOPE_API_TOKEN HF_TOKEN"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
