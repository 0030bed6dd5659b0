"""A mistyped run is looked for here, and no hub is asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.core import paths


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo/sft", "runs/vessels", "models/Qwen3-0.6B", "mine", "Qwen/Qwen3-8B"):
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text("{}")
    for name in ("runs/.cache", "empty", "notes/drafts"):
        Path(name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("runs/vesels", ["runs/vessels"]),
        ("run/vessels", ["runs/vessels"]),
        ("vessels", ["runs/vessels"]),
        ("runs/demo/stf", ["runs/demo/sft"]),
        ("runs/sft", ["runs/demo/sft"]),
        ("mien", ["mine"]),
        ("models/Qwen3-0.6b", ["models/Qwen3-0.6B"]),
        ("entirely/other", []),
    ],
)
def test_the_nearest_runs_are_named(typed: str, meant: list[str]) -> None:
    assert paths.find_nearest_folders(typed)[: len(meant)] == meant
    assert bool(paths.find_nearest_folders(typed)) is bool(meant)
    assert (f'"{meant[0]}"' in paths.suggest_folder(typed)) if meant else paths.suggest_folder(typed) == ""


@pytest.mark.parametrize("name", ["runs/nothing", "outputs/x", "models/y", "run/vessels", "notes/x"])
def test_names_of_folders_here_are_local(name: str) -> None:
    assert paths.is_local_name(name)


@pytest.mark.parametrize("name", ["Qwen2/Qwen3-0.6B", "deepseek-ai/DeepSeek-V3", "acme/tiny"])
def test_names_of_a_hub_are_not(name: str) -> None:
    assert not paths.is_local_name(name)


def test_nothing_hidden_or_empty_is_found() -> None:
    assert sorted(paths.iter_run_folders()) == ["mine", "runs/demo/sft", "runs/vessels"]
    assert "models/Qwen3-0.6B" in paths.iter_run_folders("models/x")
