"""The version matrix: how versions are read, and pairs that the vendors publish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.doctor.checks import version_matrix


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("8.1.RC1", (8, 1, 0, 1)),
        ("24.1.rc3.b999", (24, 1, 0, 3)),
        ("25.2.0", (25, 2, 1, 0)),
        ("26.0.rc1", (26, 0, 0, 1)),
        ("9.2.0-beta.2", (9, 2, 1, 0)),
        ("v2.13.0+cpu", (2, 13, 1, 0)),
        ("26.1.0.b083", (26, 1, 1, 0)),
        ("", None),
        ("latest", None),
    ],
)
def test_key(text: str, key: version_matrix.VersionKey | None) -> None:
    assert version_matrix.parse_version(text) == key


def test_order() -> None:
    told = ["23.0.3", "24.1.RC1", "24.1.RC3", "24.1.0", "25.0.RC1", "25.2.0", "26.0.RC1", "26.1.1"]
    assert sorted(reversed(told), key=version_matrix.parse_version) == told


@pytest.mark.parametrize(
    ("wheel", "cann", "match"),
    [
        ("2.7.1.post11", "9.2.0", "matched"),
        ("2.7.1.post10", "9.1.0", "matched"),  # on the index, not in the table: the release before it
        ("2.13.0rc1", "9.2.0", "matched"),
        ("2.7.1", "8.3.RC1", "matched"),
        ("2.7.1.post2", "8.5.0", "matched"),
        ("2.14.0", "8.5.2", "compatible"),
        ("2.6.0", "8.1.RC1", "compatible"),
        ("2.7.1.post2", "8.3.RC1", "broken"),
        ("2.6.0.post3", "8.5.0", "broken"),
        ("2.13.0", "7.0.0", "broken"),
        ("2.1.0", "7.0.0", "matched"),
        ("2.1.0.post17", "8.3.RC1", "matched"),
        ("2.13.0", "10.0.0", "unknown"),
        ("3.0.0", "9.2.0", "unknown"),
    ],
)
def test_torch_npu_with_cann(wheel: str, cann: str, match: str) -> None:
    assert version_matrix.match_torch_npu_with_cann(wheel, cann) == match


@pytest.mark.parametrize(
    ("cann", "driver", "match"),
    [
        ("9.1.1", "26.1.1", "matched"),
        ("9.1.0", "26.0.rc1", "matched"),
        ("9.1.0", "25.0.RC1", "broken"),
        ("9.0.1", "25.5.2", "matched"),
        ("8.5.0", "25.2.0", "compatible"),
        ("8.2.RC1", "25.2.0", "matched"),
        ("8.2.RC1", "24.1.rc2", "compatible"),
        ("8.2.RC1", "23.0.3", "broken"),
        ("8.0.0", "23.0.7", "compatible"),
        ("8.1.RC1", "27.0.0", "unknown"),
        ("6.3.0", "22.0.0", "unknown"),
        ("9.1.0", "?", "unknown"),
    ],
)
def test_cann_with_driver(cann: str, driver: str, match: str) -> None:
    assert version_matrix.match_cann_with_driver(cann, driver) == match


def test_wheels_of_a_cann() -> None:
    assert version_matrix.list_wheels("9.1.0")[:2] == ["2.12.0", "2.11.0"]
    assert version_matrix.list_wheels("9.1.0", "2.7.1+cpu") == ["2.7.1.post8"]
    assert version_matrix.list_wheels("?") == []


def test_a_pair_that_is_proposed_is_one_that_is_supported() -> None:
    assert version_matrix.list_supported_wheels("9.1.0")[0] == "2.12.0"
    assert version_matrix.list_supported_wheels("8.3.RC1")[0] == "2.8.0"
    assert version_matrix.list_supported_wheels("8.2.RC1")[0] == "2.7.1"  # its own wheels are too old
    assert version_matrix.list_supported_wheels("?") == []


def test_the_tables_agree_with_each_other() -> None:
    for release in version_matrix.TORCH_NPU_RELEASES:
        for wheel in release.wheels:
            assert version_matrix.find_release(wheel) == release
            assert version_matrix.match_torch_npu_with_cann(wheel, release.cann) == "matched"
            line = ".".join(version_matrix.get_base_version(wheel).split(".")[:2])
            assert line in version_matrix.PYTHON_RANGES or line in ("1.11", "2.0")
    for row in version_matrix.DRIVER_TABLE:
        for driver in (*row.matched, *row.compatible):
            assert version_matrix.match_cann_with_driver(row.cann, driver) != "broken"


@given(st.text(), st.text())
def test_any_text_is_judged(left: str, right: str) -> None:
    assert version_matrix.match_torch_npu_with_cann(left, right) in ("matched", "compatible", "broken", "unknown")
    assert version_matrix.match_cann_with_driver(left, right) in ("matched", "compatible", "broken", "unknown")
