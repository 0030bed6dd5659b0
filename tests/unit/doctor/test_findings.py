"""Every verdict of the doctor, on machines made for it."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from rich.cells import cell_len

from anabatic.core.language import LocalizedText
from anabatic.doctor import check_report
from anabatic.doctor.check_runner import get_exit_code, run_checks
from anabatic.doctor.checks.variable_rules import VARIABLE_RULES
from anabatic.doctor.findings.catalog import FINDING_TYPES, REPORT_GROUPS
from anabatic.doctor.target_machine import open_root
from unit.doctor import roots
from unit.doctor.states import STATES
from unit.doctor.test_variables import CASES

ELSEWHERE = {"time.stopped", "time.cut", "npu-smi.denied", "import.loads"}
"""Verdicts of test_machine.py."""


@pytest.mark.parametrize("name", STATES)
def test_state(name: str, tmp_path: Path) -> None:
    base, change, expected = STATES[name]
    found = roots.lines(base().but(**change), tmp_path)
    assert roots.ids(found, "WARN", "FAIL") == expected
    states = {FINDING_TYPES[one].status for one in expected}
    assert get_exit_code(found) == (1 if "FAIL" in states else 0)
    assert get_exit_code(found, strict=True) == (1 if "FAIL" in states else 2 if states else 0)
    for language in ("en", "zh"):
        for line in found:
            assert line.describe_result(language)
            assert bool(line.describe_fix(language)) == (line.finding_type.fix_text is not None)


@pytest.mark.process
def test_every_verdict_is_seen(tmp_path: Path) -> None:
    seen = set(ELSEWHERE)
    for number, (base, change, _) in enumerate([*STATES.values(), *CASES.values()]):
        seen |= roots.ids(roots.lines(base().but(**change), tmp_path / str(number)))
    assert seen == set(FINDING_TYPES)


def test_verdicts_say_the_same_in_both_languages() -> None:
    def names(text: LocalizedText | None, language: str) -> set[str | None]:
        return {field for _, field, _, _ in string.Formatter().parse(getattr(text, language))} if text else set()

    shown = [check for _, checks in REPORT_GROUPS for check in checks]
    for verdict in FINDING_TYPES.values():
        assert names(verdict.result_text, "en") | {None} == names(verdict.result_text, "zh") | {None}, verdict.id
        assert names(verdict.fix_text, "en") | {None} == names(verdict.fix_text, "zh") | {None}, verdict.id
        assert shown.count(verdict.check_name) == 1, verdict.id
        assert verdict.fix_text or verdict.status in ("OK", "n/a"), f"{verdict.id} says no remedy"


def test_variables_are_there_once() -> None:
    names = [row.name for row in VARIABLE_RULES]
    assert len(names) == len(set(names))


def test_report_of_a_broken_machine(tmp_path: Path) -> None:
    base, change, _ = STATES["container without devices"]
    found = roots.lines(base().but(**change), tmp_path)
    for width in (40, 80, 120):
        for language in ("en", "zh"):
            shown = check_report.render_report(found, language, width, colour=False).splitlines()
            assert max(map(cell_len, shown)) <= width
    assert "\x1b" not in check_report.render_report(found, "en", 80, colour=False)
    assert "\x1b[31mFAIL" in check_report.render_report(found, "en", 80, colour=True)


def test_a_link_of_the_root_stays_in_the_root(tmp_path: Path) -> None:
    made = roots.a3().but(gone=("/usr/local/Ascend/ascend-toolkit",))
    root = made.but(env={"ASCEND_HOME_PATH": roots.OLD}).write(tmp_path)
    (root / "usr/local/Ascend/ascend-toolkit").mkdir()
    (root / "usr/local/Ascend/ascend-toolkit/latest").symlink_to("/usr/local/Ascend/cann-9.1.0")
    (root / "usr/local/Ascend/loop").symlink_to("/usr/local/Ascend/loop")
    assert roots.ids(run_checks(open_root(root)), "WARN", "FAIL") == set()
    assert open_root(root).files.read_text("/usr/local/Ascend/loop") is None
    assert open_root(root).files.read_text("/../../../../etc/passwd") is None
