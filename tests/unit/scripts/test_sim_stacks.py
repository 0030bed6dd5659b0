"""The table of operators that other stacks call: what is counted, what each is called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
KINDS = {
    "npu::npu_rms_norm": "formula",
    "npu::npu_dynamic_mx_quant": "refused",
    "npu::npu_hans_encode.out": "refused",
    "npu::npu_two_ways": "formula",
    "npu::npu_two_ways.out": "refused",
    "atb::_npu_paged_attention": "formula",
    "npu::npu_rms_norm_backward": "refused",
}


@pytest.fixture(name="stacks")
def _stacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import sim_stacks

    yield sim_stacks
    for name in ("sim_stacks", "sim_coverage"):
        sys.modules.pop(name, None)


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("npu_rms_norm", "simulated"),
        ("_npu_paged_attention", "simulated"),
        ("npu_two_ways", "simulated"),
        ("npu_hans_encode", "refused"),
        ("npu_rms_norm_backward", "refused"),
        ("npu_dynamic_mx_quant", "block format"),
        ("npu_composite", "simulated"),
        ("npu_gone", "absent"),
    ],
)
def test_status(stacks: Any, name: str, status: str) -> None:
    assert stacks.find_status(name, KINDS, {"npu_composite"}) == status


def test_calls_are_counted_in_committed_python_files(stacks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "verl"
    folder.mkdir()
    _git(folder, "init", "-q")
    (folder / "a.py").write_text(
        "y = torch_npu.npu_rms_norm(x)\nz = torch_npu.npu_rms_norm(x) + torch.ops.npu.npu_swiglu(x)\n"
        "torch.ops.atb._npu_paged_attention(q)\nmy_torch_npu.npu_other(x)\ntorch_npu.profiler.profile()\n"
    )
    (folder / "notes.md").write_text("torch_npu.npu_in_a_text(x)\n")
    _git(folder, "add", ".")
    _git(folder, "commit", "-qm", "first")
    (folder / "a.py").write_text("torch_npu.npu_not_committed(x)\n")
    found = stacks.count_calls(tmp_path, "verl")
    assert found.operators == {"_npu_paged_attention": 1, "npu_rms_norm": 2, "npu_swiglu": 1}
    assert found.commit and found.date.startswith("20")


@pytest.mark.parametrize("made", ["missing", "no checkout", "empty"])
def test_a_folder_without_a_checkout_is_named(stacks: Any, tmp_path: Path, made: str) -> None:
    if made != "missing":
        (tmp_path / "verl").mkdir()
    if made == "empty":
        _git(tmp_path / "verl", "init", "-q")
    with pytest.raises(SystemExit, match=r"verl is no checkout of verl(.|\n)*hint: clone ms-swift"):
        stacks.count_calls(tmp_path, "verl")


def test_calls_that_are_kept_are_those_of_every_stack(stacks: Any) -> None:
    kept = stacks.read_calls()
    assert tuple(stack.name for stack in kept) == stacks.STACKS
    assert all(stack.operators and min(stack.operators.values()) > 0 for stack in kept)
