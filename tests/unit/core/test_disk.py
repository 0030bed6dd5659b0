"""What is written is whole or not there, and a disk that refuses says so in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from anabatic.core import log, paths
from anabatic.core.errors import Failure
from anabatic.core.json_reader import JsonlWriter, read_json_lines

FULL = Path("/dev/full")
"""A Linux device on which every write fails for lack of space."""


def full_file(folder: Path) -> None:
    with open(FULL, "wb", buffering=0) as file:
        file.write(b"x")


def full_tensors(folder: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save_file({"a": numpy.zeros(1 << 16)}, folder / "missing" / "model.safetensors")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in ("one", "two"):
        paths.write_atomic(path, content)
    assert path.read_text() == "two" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with paths.open_atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(ValueError, match="mine"), paths.open_atomic_folder(target) as folder:
        (folder / "a").write_text("new")
        raise ValueError("mine")
    assert (target / "a").read_text() == "old" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(("write", "message"), [(full_file, "no space left"), (full_tensors, "No such file")])
def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path, write, message: str) -> None:
    with pytest.raises(Failure, match=message) as caught, paths.open_atomic_folder(tmp_path / "model") as folder:
        write(folder)
    assert caught.value.hint and list(tmp_path.iterdir()) == []


def test_the_number_in_a_rust_library_s_message_counts() -> None:
    found = paths.find_os_error(
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert found is not None and found.errno == errno.ENOSPC
    older = paths.find_os_error(RuntimeError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })"))
    assert older is not None and older.errno == errno.ENOSPC
    assert paths.find_os_error(RuntimeError("no number")) is None


def test_rows_that_cannot_be_written_name_the_file(tmp_path: Path) -> None:
    os.symlink(FULL, tmp_path / "metrics.jsonl")
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(Failure, match=r"no space left while writing .*metrics\.jsonl"):
        writer.write({"step": 1})
    with pytest.raises(Failure, match="no space left"):
        writer.close()


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"st')
    writer = JsonlWriter(path)
    writer.write({"step": 2, "loss": float("nan")})
    writer.close()
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2, "loss": None}]


def test_a_log_file_on_a_full_disk_is_given_up_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup_logging()
    log.add_log_file(FULL)
    for number in range(3):
        log.info(f"message {number}")
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if not line.startswith("message")] == [
        "warning: /dev/full is not written any more: [Errno 28] No space left on device"
    ]
    assert err.count("message") == 3
