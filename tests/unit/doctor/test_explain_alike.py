"""Lines that tell the same are looked at once: what is found is what reading them one by one finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis, log_scan
from anabatic.doctor.explain import matcher as matcher_module

KNOWN = knowledge_base.load_knowledge()
PARTS = (
    "error code is ", "ret[", "] ", "retCode=0x", "7bc87", "507015", "507899", "-8020", "0xdeadbeef ", "EI000", "EZ",
    " E", "ERR", "[rank", "rankid:", "[default", "]: ", "HCCL function error: x, error code is ", "ValueError: ", ".5 ",
    "x", "3", "99", "1121 ", " ", "[W", "WARNING ", "  File 1", "out of memory", "exitcode: -9 (pid", "Traceback (",
)  # fmt: skip
"""What the search, the rank and the kind of a line are read from."""


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Some lines, each many times with other numbers."""
    shapes = [draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=7)) for _ in range(draw(st.integers(1, 3)))]
    figures = st.sampled_from(
        ("7", "12", "107002", "507015", "507899", "000", "0006", "9999", "8020", "0xab", "0xc0de")
    )
    lines = []
    for _ in range(draw(st.integers(1, 24))):
        words = draw(st.sampled_from(shapes))
        lines.append("".join(word if draw(st.booleans()) else f"{word}{draw(figures)}" for word in words))
    return "\n".join(lines).encode()


def seen(block: bytes) -> dict[tuple[str, str, int | None, str], tuple[int, str, int]]:
    """Return entry, code, rank and role -> the first line, its text, how often."""
    scan = log_scan.scan_text(block.decode(), matcher_module.LogMatcher(KNOWN))
    return {(one.entry.id, one.code, one.rank, one.role): (one.line, one.text, one.count) for one in scan.sightings}


@pytest.mark.process
@given(logs())
def test_lines_that_tell_the_same_are_counted_as_if_each_were_read(block: bytes) -> None:
    fewest = matcher_module.MIN_GROUPED_LINES
    try:
        matcher_module.MIN_GROUPED_LINES = 1 << 30
        expected = seen(block)
        matcher_module.MIN_GROUPED_LINES = 2
        assert seen(block) == expected
    finally:
        matcher_module.MIN_GROUPED_LINES = fewest


def test_numbers_that_tell_something_are_told_apart() -> None:
    lines = [
        f"[rank{rank}]: stream=0x{place:x} id {place}, retCode=0x{code:x}".encode()
        for place, (rank, code) in enumerate([(0, 507015), (1, 507015), (0, 507053), (0, 507015), (1, 507015)], 171)
    ]
    bare = b"[rank]: stream=0x id , retCode=0x"
    assert matcher_module.LineGrouper().group_lines(bare, lines) == [(0, 2), (1, 2), (2, 1)]


@pytest.mark.parametrize(
    "line", [b"[W1121 09:00:00.1 x.cpp:7] error code is 507015", b"2026-11-22 WARN 1", b"x" * 2000]
)
def test_lines_of_which_more_matters_are_read_one_by_one(line: bytes) -> None:
    assert matcher_module.compile_line_pattern(line) is None
    assert matcher_module.LineGrouper().group_lines(b"", [line, line]) == []


def test_lines_with_fewer_numbers_than_the_first_are_read_one_by_one() -> None:
    assert (
        matcher_module.LineGrouper().group_lines(b"error code is , of", [b"error code is 1, of", b"error code is , of"])
        == []
    )


def test_what_is_remembered_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "MAX_REMEMBERED_BYTES", 100_000)
    matcher = matcher_module.LogMatcher(KNOWN)
    for number in range(100):
        letters = f"{number:08b}".translate({48: "a", 49: "b"}) * 500
        _, found = matcher.find_matches(f"error code is 507015 {letters}\n".encode())
        assert [hit.code for one in found for hit in one.matches] == ["507015"]
        assert sum(map(len, matcher.candidates)) < 110_000
        assert sum(map(len, [*matcher.word_stems, *matcher.harmless_words])) < 110_000


def test_a_text_that_may_stand_within_an_address_is_found_there(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text('entries: [{id: poisoned, texts: ["deadbeef"], en: {meaning: m, cause: c, fix: f}}]')
    known = knowledge_base.load_knowledge((own,))
    report = diagnosis.explain_text("at 0xdeadbeef01\nat 0xdeadbeef02\n", known)
    assert [(finding.entry.id, finding.count) for finding in report.findings] == [("poisoned", 2)]


def test_a_text_that_is_a_number_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text('entries: [{id: mine, texts: ["1234 567890"], en: {meaning: m, cause: c, fix: f}}]')
    with pytest.raises(ConfigError, match="is a number"):
        knowledge_base.load_knowledge((own,))
