"""JSON lines that are followed while somebody writes them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from anabatic.core import json_reader
from anabatic.core.json_reader import JsonlFollower

LINES = st.lists(
    st.one_of(
        st.builds(lambda step: json.dumps({"step": step, "text": "é"}), st.integers(0, 9)),
        st.sampled_from(["", "[]", "{", '{"step": 1', "3", "\x00"]),
    ),
    max_size=8,
)


@given(LINES, st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 64))
def test_pieces_give_the_objects_of_the_whole(lines, cuts, most):
    content = "".join(f"{line}\n" for line in lines).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        follower = JsonlFollower(path, max_bytes=most)
        assert follower.read_new_rows() == (False, [])
        found, at = [], 0
        for cut in cuts:
            with open(path, "ab") as file:
                file.write(content[at : at + cut])
            at += cut
            found += follower.read_new_rows()[1]
        with open(path, "ab") as file:
            file.write(content[at:])
        new = follower.read_new_rows()[1]
        while new or follower.bytes_behind:
            found, new = found + new, follower.read_new_rows()[1]
        assert found == list(json_reader.read_json_lines(path))
        assert follower.num_unreadable == len(lines) - len(found)


def test_numbers_are_finite():
    values = (1, 2.5, 10**400, float("nan"), float("inf"), True, None, "3")
    assert [json_reader.to_finite_number(value) for value in values] == [1.0, 2.5, None, None, None, None, None, None]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n', encoding="utf-8")
    follower = JsonlFollower(path)
    assert follower.read_new_rows() == (True, [{"a": 1}, {"a": 2}])
    with open(path, "a", encoding="utf-8") as file:
        file.write("[" * 100_000 + "\n")
    assert (follower.read_new_rows(), follower.num_unreadable) == ((False, []), 1)
    other = tmp_path / "other"
    other.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n', encoding="utf-8")
    other.replace(path)
    assert follower.read_new_rows() == (True, [{"a": 1}, {"a": 3}, {"a": 4}])
    path.write_text("", encoding="utf-8")
    assert follower.read_new_rows() == (True, [])


def test_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"a": {a}}}\n' for a in range(100)), encoding="utf-8")
    assert JsonlFollower(path, tail=20).read_new_rows()[1] == [{"a": 98}, {"a": 99}]


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * (6 << 20))
    follower = JsonlFollower(path, max_bytes=8 << 20)
    assert follower.read_new_rows() == (True, [])
    with open(path, "ab") as file:
        file.write(b'"}\n{"a": 2}\n')
    assert follower.read_new_rows() == (False, [{"a": 2}])
    assert follower.num_unreadable == 1
