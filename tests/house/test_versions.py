"""What the pages, pyproject.toml, the doctor and the other environments say of versions is the same."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from anabatic.doctor.checks import version_matrix
from house import tree

UNTRIED = {"en": "not tried", "zh": "未测试"}
ABOVE = {"en": "as above", "zh": "同上"}


def rows(code: str) -> list[list[str]]:
    """The rows of the install guide's table of versions."""
    page = (tree.ROOT / "docs" / code / "guides" / "install.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if re.match(r"\| \d+\.\d+\.\d+ \|", line)]
    assert len(lines) > 4
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def bounds() -> dict[str, Any]:
    """The script that says what other environments hold."""
    return runpy.run_path(str(tree.ROOT / "scripts" / "bounds.py"))


def test_the_oldest_torch_is_said_once() -> None:
    project = (tree.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={version_matrix.OLDEST_TORCH}"' in project
    assert f"torch=={version_matrix.OLDEST_TORCH}" in bounds()["oldest"](project)


def test_what_is_tried_is_what_the_targets_install() -> None:
    pinned = re.search(r"^torch==(.*)$", (tree.ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert pinned
    assert set(version_matrix.TESTED_TORCH) == {pinned.group(1), version_matrix.OLDEST_TORCH, bounds()["NEWEST"]}
    newest = max(
        (version_matrix.parse_version(version_matrix.get_base_version(wheel)), wheel)
        for row in version_matrix.TORCH_NPU_RELEASES
        for wheel in row.wheels
    )
    assert newest[1] == bounds()["NEWEST"]
    makefile = (tree.ROOT / "Makefile").read_text(encoding="utf-8")
    nightly = (tree.ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    for target in ("test-oldest", "test-newest", "test-wheel"):
        assert f"\n{target}:" in makefile and f"target: {target}" in nightly


@pytest.mark.parametrize("code", UNTRIED)
def test_a_row_has_a_run_behind_it_or_says_that_it_has_none(code: str) -> None:
    table = rows(code)
    assert {row[0] for row in table} >= set(version_matrix.TESTED_TORCH)
    for torch, wheel, cann, driver, said in table:
        assert (said == UNTRIED[code]) == (torch not in version_matrix.TESTED_TORCH), torch
        assert version_matrix.get_base_version(wheel) == torch
        assert version_matrix.match_torch_npu_with_cann(wheel, cann) in (
            ("compatible",) if said == ABOVE[code] else ("matched", "compatible")
        )
        assert all(
            version_matrix.match_cann_with_driver(cann, one) in ("matched", "compatible")
            for one in re.split(r"[,、] ?", driver)
        )


def test_both_languages_have_the_same_rows() -> None:
    (left, right) = ([row[:3] for row in rows(code)] for code in UNTRIED)
    assert left == right


def test_every_lower_bound_is_one_that_the_oldest_environment_installs() -> None:
    project = (tree.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    assert block
    names = {re.split(r"[<>=; ]", line)[0] for line in re.findall(r'"([^"]+)"', block.group(1))}
    pinned = {line.split("==")[0] for line in bounds()["oldest"](project)}
    assert not names - pinned
