"""Exceptions of Python that no entry knows, and how an explanation is written where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, rendering

KNOWN = knowledge_base.load_knowledge()
WAITED = "2026-11-21 11:10:38,000 ERROR EI0002: the wait execution of the Notify register times out\n"
TRACEBACK = (
    "{0}Traceback (most recent call last):\n"
    '{0}  File "train.py", line 7, in <module>\n'
    "{0}    build(gloop)\n"
    "{0}{1}: the frobnicator has no gloop\n"
)


def test_an_exception_that_no_entry_knows_beats_what_others_suffer(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}.log").write_text(WAITED)
    (tmp_path / "rank-2.log").write_text(
        "2026-11-21 11:12:00,000 INFO x\n" + TRACEBACK.format("[rank2]: ", "my.lib.GloopError")
    )
    report = diagnosis.explain_logs((str(tmp_path),), KNOWN)
    assert report.first_cause is not None and report.silent_ranks == []
    assert (report.first_cause.code, report.first_cause.ranks, report.first_cause.first_sighting.line) == (
        "GloopError",
        [2],
        5,
    )
    assert rendering.format_hint(report, "en") == ""


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (TRACEBACK.format("", "ValueError"), ["ValueError"]),
        (TRACEBACK.format("", "Exception"), ["Exception"]),
        (TRACEBACK.format("", "AssertionError").replace(": the frobnicator has no gloop", ""), ["AssertionError"]),
        (TRACEBACK.format("", "ConnectionResetError") + TRACEBACK.format("", "KeyError"),
         ["KeyError", "ConnectionResetError"]),
        (TRACEBACK.format("", "ValueError") + "error code is 507015\n", ["507015", "ValueError"]),
        (TRACEBACK.format("7: ", "ValueError") + TRACEBACK.format("[0]: ", "KeyError"), ["ValueError", "KeyError"]),
        ("all is well\nValueError: is what int('x') raises\n", []),
        ("    indented\nError: of another program\nuser.ValueErrors: 3\n", []),
    ],
)  # fmt: skip
def test_what_ends_a_traceback_is_found(text: str, codes: list[str]) -> None:
    assert [finding.code for finding in diagnosis.explain_text(text, KNOWN).findings] == codes


def test_our_own_errors_are_told_as_such() -> None:
    report = diagnosis.explain_text(TRACEBACK.format("", "anabatic.core.errors.DataError"), KNOWN)
    assert report.first_cause is not None and report.first_cause.code == "DataError"
    assert report.first_cause.entry.get_explanation("en").meaning == "anabatic ended the job itself."
    assert report.first_cause.entry.get_explanation("zh").fix.endswith("。")


def test_no_line_of_a_file_ends_in_blanks() -> None:
    report = diagnosis.explain_text(TRACEBACK.format("", "ValueError") + WAITED + "error code is 507015\n", KNOWN)
    for language in ("en", "zh"):
        for width in (40, 80, 120):
            console = Console(file=io.StringIO(), width=width, highlight=False)
            rendering.print_report(report, language, console)
            rows = console.file.getvalue().splitlines()
            assert rows and all(row == row.rstrip() for row in rows)
            assert any("507015" in row for row in rows)
