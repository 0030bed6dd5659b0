"""A job that Slurm starts again and again without a new checkpoint comes to an end, on all machines alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.core.errors import Failure
from anabatic.launch.schedulers.requeue import RESTARTS_FILE, require_progress


def start(out: Path, count: int, most: int = 3, first: bool = True, job: str = "7") -> None:
    given = {"SLURM_JOB_ID": job, **({"SLURM_RESTART_COUNT": str(count)} if count else {})}
    require_progress(out, most, first, given)


def test_three_starts_in_vain_are_the_last(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for count in range(3):
        start(out, count)
    for first in (True, False):  # every machine, whichever comes first
        with pytest.raises(Failure, match="job 7 3 times in a row, and none has come to save .* a first checkpoint"):
            start(out, 3, first=first)
    start(out, 3, most=4)
    start(out, 3, most=0)
    start(out, 0, job="8")
    assert json.loads((out / RESTARTS_FILE).read_text()) == {"job": "8", "steps": {"0": 0}}
    start(out, 3, job="8")  # machines of other starts have not noted theirs


def test_a_new_checkpoint_counts_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for count in range(9):
        if count % 3 == 0:
            (out / f"checkpoint-{count + 1}").mkdir(parents=True)
            (out / f".checkpoint-{count + 90}.tmp").mkdir()
        start(out, count)
    with pytest.raises(Failure, match="after step 7"):
        start(out, 9)


def test_what_is_no_job_of_slurm_is_not_counted(tmp_path: Path) -> None:
    for _ in range(5):
        require_progress(tmp_path / "run", 1, True, {})
        start(tmp_path / "run", 0, most=1)  # typed again in an allocation
    require_progress(tmp_path / "other", 1, True, {})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"job": "7"}', b'{"job": "7", "steps": 3}', b'{"job": "7", "steps": {"0": 0, "']
    + [b'{"job": "7", "steps": {"\xc2\xb2": 0, "1": "x"}}', b"[" * 5000],
)
def test_a_damaged_record_counts_anew(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "run"
    for count in range(3):
        start(out, count)
    (out / RESTARTS_FILE).write_bytes(content)
    start(out, 3)
    assert json.loads((out / RESTARTS_FILE).read_text()) == {"job": "7", "steps": {"3": 0}}
    require_progress(out, 3, True, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "²"})
