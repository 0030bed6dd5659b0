"""What Python's reader says in its own words is said in ours."""

from __future__ import annotations

import pytest

from anabatic.core import json_reader


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": ' + "1" * 5000 + "}", "an integer of more than 4,300 digits"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 150 + "]" * 150, "nested more than 100 deep"),
        (b"\xff", "invalid start byte"),
        ("{", "Expecting property name"),
    ],
)
def test_what_cannot_be_read_is_a_value_error(text: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        json_reader.loads(text)
    assert "set_int_max_str_digits" not in str(caught.value) and "recursion" not in str(caught.value)
