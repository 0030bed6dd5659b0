"""Texts that look like numbers."""

from __future__ import annotations

import pytest

from anabatic.core.formatting import parse_whole
from anabatic.launch.schedulers import env_variables
from anabatic.monitor import device_filter


@pytest.mark.parametrize(
    "text", ["", "²", "1²", "١٢", "１２", "-1", "+1", " 1", "1.0", "1_000", "0x1", "9" * 19, "9" * 5000]
)
def test_what_is_no_number(text: str) -> None:
    assert parse_whole(text) is None


def test_numbers() -> None:
    assert [parse_whole(text) for text in ("0", "007", "9" * 18, b"12")] == [0, 7, 10**18 - 1, 12]
    assert parse_whole(None) is None and parse_whole("123", max_digits=2) is None


@pytest.mark.parametrize("text", ["²", "١", "9" * 5000])
def test_readers_of_variables_and_options_refuse_them(text: str) -> None:
    for given in (lambda: device_filter.parse_address(text), lambda: device_filter.parse_device_numbers([text])):
        with pytest.raises(device_filter.ConfigError):
            given()
    variables = {"JOB_COMPLETION_INDEX": text, "PET_NPROC_PER_NODE": text, "VC_TASK_INDEX": text}
    assert not any(text in (value or "") for value in env_variables.read_launch_variables(variables).values())
