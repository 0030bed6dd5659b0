"""Bookkeeping of blocks against a plain model of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.infer.blocks import Blocks, Table, digest


def test_a_digest_names_everything_up_to_its_block():
    first, other = digest(b"", [1, 2]), digest(b"", [1, 3])
    assert first != other
    assert digest(first, [4]) != digest(other, [4])
    assert digest(first, [4]) == digest(digest(b"", [1, 2]), [4])
    assert digest(b"adapter", [1, 2]) != first


def test_a_request_gets_blocks_side_by_side_and_others_stay_clear_of_it():
    blocks = Blocks(32)
    one, two = Table(), Table()
    assert blocks.grow(one, 2, 10)
    assert blocks.grow(two, 1, 10)
    assert blocks.grow(one, 10, 10)
    assert blocks.grow(two, 10, 10)
    assert one.runs == [[0, 10]]
    assert two.runs == [[10, 10]]


def test_known_blocks_are_shared_and_the_oldest_are_taken_back_from_the_end():
    blocks = Blocks(4)
    first = Table()
    assert blocks.grow(first, 3, 3)
    names = [digest(b"", [n]) for n in range(3)]
    for block, name in zip(first.ids, names, strict=True):
        blocks.name(block, name)
    ids = list(first.ids)
    blocks.release(first)
    assert (blocks.available, blocks.idle) == (4, 3)
    second = Table()
    blocks.share(second, blocks.known(names))
    assert second.ids == ids
    assert blocks.available == 1
    assert not blocks.grow(Table(), 2, 2)
    blocks.release(second)
    third = Table()
    assert blocks.grow(third, 2, 2)
    assert len(blocks.known(names)) == 2, "the end of the beginning went first"


@st.composite
def stories(draw):
    """Requests come, grow, share and go."""
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("grow"), st.integers(0, 3), st.integers(0, 7)),
                st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
                st.tuples(st.just("begin"), st.integers(0, 3), st.integers(0, 3)),
                st.tuples(st.just("forget"), st.just(0), st.just(0)),
            ),
            max_size=40,
        )
    )


@given(stories())
@settings(max_examples=150, deadline=None)
def test_no_block_is_lost_or_given_twice(story):
    blocks, tables = Blocks(12), [Table() for _ in range(4)]
    content: dict[int, bytes] = {}  # what a block that is in use holds
    for what, who, number in story:
        table = tables[who]
        if what == "release":
            blocks.release(table)
        elif what == "forget":
            blocks.forget()
        elif what == "begin" and not table.ids:
            names = [bytes([number, at]) for at in range(3)]  # requests with an equal number begin alike
            found = blocks.known(names)
            assert [content[block] for block in found] == names[: len(found)]
            if blocks.room_for(found, 3 - len(found)):
                blocks.share(table, found)
                assert blocks.grow(table, 3, 4)
                for block, name in zip(table.ids, names, strict=True):
                    assert content.get(block) == name or block not in found
                    content[block] = name
                    blocks.name(block, name)
        elif what == "grow":
            before, room = list(table.ids), blocks.available
            given_more = blocks.grow(table, len(before) + number, len(before) + number + 2)
            assert given_more == (number <= room)
            assert table.ids[: len(before)] == before
            for block in table.ids[len(before) :]:
                content[block] = b"own"
        used = {block for table in tables for block in table.ids}
        assert blocks.available == 12 - len(used)
        assert blocks.idle <= blocks.available
        for table in tables:
            assert len(set(table.ids)) == len(table.ids)
            assert [b for first, n in table.runs for b in range(first, first + n)] == table.ids
