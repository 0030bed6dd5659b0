"""Fetching and compiling: what is torn is made again, what fails says why."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from anabatic.core.errors import Failure, UserError
from anabatic_sim.libraries import build_layout, compilation, native_build, stub_libraries, torch_npu_wheel

TORCH = torch_npu_wheel.TorchInstallation("2.13.0+cpu", Path("/nowhere"))


def _unpacked(root: Path) -> Path:
    folder = root / f"torch_npu-2.13.0-{torch_npu_wheel.PYTHON_TAG}"
    for part in torch_npu_wheel._REQUIRED_FILES:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_bytes(b"")
    return folder


def test_a_torn_wheel_does_not_count(tmp_path: Path) -> None:
    folder = _unpacked(tmp_path)
    assert torch_npu_wheel.find_unpacked_wheel(tmp_path, TORCH) == torch_npu_wheel.TorchNpuWheel(
        "2.13.0", folder, "9.2.0"
    )
    (folder / torch_npu_wheel._REQUIRED_FILES[1]).unlink()
    assert torch_npu_wheel.find_unpacked_wheel(tmp_path, TORCH) is None


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")
def test_an_index_that_does_not_answer_is_no_missing_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Failure, match="pip's index does not answer"):
        torch_npu_wheel.fetch_wheel(tmp_path / "a", TORCH)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="pip's index has no torch_npu at all for Python"):
        torch_npu_wheel.fetch_wheel(tmp_path / "b", TORCH)
    assert not [*tmp_path.rglob("*.tmp")]


def test_an_empty_folder_is_no_build(tmp_path: Path) -> None:
    made = build_layout.SimulatorBuild(
        TORCH, torch_npu_wheel.TorchNpuWheel("2.13.0", tmp_path, "9.2.0"), tmp_path / "made"
    )
    assert not made.is_complete
    for folder in (made.library_folder, made.program_folder, made.cann_folder):
        folder.mkdir(parents=True)
    assert not made.is_complete


def test_what_a_killed_first_use_left_is_swept(tmp_path: Path) -> None:
    torn = [tmp_path / "builds" / ".2.13.0-1.a.tmp", tmp_path / "wheels" / ".download.b.tmp"]
    whole = [tmp_path / "builds" / "2.13.0-1", _unpacked(tmp_path / "wheels")]
    for folder in (*torn, *whole):
        (folder / "lib").mkdir(parents=True, exist_ok=True)
    native_build._remove_unfinished(tmp_path)
    assert not any(folder.exists() for folder in torn)
    assert all(folder.exists() for folder in whole)


@pytest.mark.process
def test_a_compiler_that_was_killed_is_named() -> None:
    with pytest.raises(Failure, match=r"\(ops/copy.cpp\): sh was ended by SIGKILL"):
        compilation._run_compiler(["sh", "-c", "kill -9 $$"], "ops/copy.cpp")


def test_no_binutils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="nm is not on the PATH"):
        stub_libraries.generate_stub_source([Path(sys.executable)], [])
