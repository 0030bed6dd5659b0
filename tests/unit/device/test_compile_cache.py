"""torch.compile: what it needs, and where it keeps what it has compiled."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from anabatic.core import cpu_info
from anabatic.device import compile_cache


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def add_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_a_compiler_is_said_with_what_was_tried(programs: Path) -> None:
    assert compile_cache.find_missing_compiler("cpu") == "there is no compiler here (g++, or the variable CXX)"
    assert "gcc, clang, cc" in (compile_cache.find_missing_compiler("cuda") or "")
    add_program(programs, "clang")
    assert compile_cache.find_missing_compiler("cuda") is None
    assert compile_cache.find_missing_compiler("cpu") is not None
    add_program(programs, "g++")
    assert compile_cache.find_missing_compiler("cpu") is None
    assert compile_cache.find_missing_compiler("mps") is None


def test_compiling_for_an_npu_needs_triton_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert compile_cache.find_missing_compiler("npu") == "triton-ascend is not installed"
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert compile_cache.find_missing_compiler("npu") is None


def test_a_compiler_that_is_named_counts(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_program(programs, "g++")
    monkeypatch.setenv("CXX", "c++-99")
    assert compile_cache.find_missing_compiler("cpu") == "CXX is c++-99, which is no program here"
    add_program(programs, "c++-99")
    assert compile_cache.find_missing_compiler("cpu") is None


def test_compiled_code_lies_in_our_cache_by_torch_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path))
    folders = []
    for flags in ("avx2", "avx2 avx512f"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(cpu_info, "read_cpuinfo", lambda flags=flags: {"flags": flags})
        code = compile_cache.use_cached_code()
        assert code is not None and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(code.work)
        folders.append(code.store)
    assert len(set(folders)) == 2
    assert all(folder.parent == tmp_path / "compiled" and torch.__version__ in folder.name for folder in folders)
    assert compile_cache.use_cached_code() is code
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_someone"))
    assert compile_cache.use_cached_code() is code, "what torch has set itself is not the user's choice"


def test_a_folder_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    assert compile_cache.use_cached_code() is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"


def test_damaged_files_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("anabatic"), "propagate", True)
    compile_cache.use_cached_code()
    compile_cache.use_cached_code()
    theirs = logging.getLogger("torch._inductor.codecache")
    for _ in range(3):
        try:
            pickle.loads(b"torn")
        except pickle.UnpicklingError:
            theirs.warning("unable to load", exc_info=True)
    theirs.warning("something else")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2 and str(tmp_path) in said[0] and "UnpicklingError" in said[0] and said[1] == "something else"
