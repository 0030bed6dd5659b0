"""Bookkeeping of blocks against a plain model of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.infer.block_pool import BlockPool, BlockTable, hash_block


def test_a_digest_names_everything_up_to_its_block():
    first, other = hash_block(b"", [1, 2]), hash_block(b"", [1, 3])
    assert first != other
    assert hash_block(first, [4]) != hash_block(other, [4])
    assert hash_block(first, [4]) == hash_block(hash_block(b"", [1, 2]), [4])
    assert hash_block(b"adapter", [1, 2]) != first


def test_a_request_gets_blocks_side_by_side_and_others_stay_clear_of_it():
    blocks = BlockPool(32)
    one, two = BlockTable(), BlockTable()
    assert blocks.grow_table(one, 2, 10)
    assert blocks.grow_table(two, 1, 10)
    assert blocks.grow_table(one, 10, 10)
    assert blocks.grow_table(two, 10, 10)
    assert one.runs == [[0, 10]]
    assert two.runs == [[10, 10]]


def test_known_blocks_are_shared_and_the_oldest_are_taken_back_from_the_end():
    blocks = BlockPool(4)
    first = BlockTable()
    assert blocks.grow_table(first, 3, 3)
    names = [hash_block(b"", [n]) for n in range(3)]
    for block, name in zip(first.block_ids, names, strict=True):
        blocks.register_hash(block, name)
    ids = list(first.block_ids)
    blocks.release_table(first)
    assert (blocks.num_available, blocks.num_idle) == (4, 3)
    second = BlockTable()
    blocks.share_blocks(second, blocks.find_cached_prefix(names))
    assert second.block_ids == ids
    assert blocks.num_available == 1
    assert not blocks.grow_table(BlockTable(), 2, 2)
    blocks.release_table(second)
    third = BlockTable()
    assert blocks.grow_table(third, 2, 2)
    assert len(blocks.find_cached_prefix(names)) == 2, "the end of the beginning went first"


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
    blocks, tables = BlockPool(12), [BlockTable() for _ in range(4)]
    content: dict[int, bytes] = {}  # what a block that is in use holds
    for what, who, number in story:
        table = tables[who]
        if what == "release":
            blocks.release_table(table)
        elif what == "forget":
            blocks.free_idle_blocks()
        elif what == "begin" and not table.block_ids:
            names = [bytes([number, at]) for at in range(3)]  # requests with an equal number begin alike
            found = blocks.find_cached_prefix(names)
            assert [content[block] for block in found] == names[: len(found)]
            if blocks.has_room_for(found, 3 - len(found)):
                blocks.share_blocks(table, found)
                assert blocks.grow_table(table, 3, 4)
                for block, name in zip(table.block_ids, names, strict=True):
                    assert content.get(block) == name or block not in found
                    content[block] = name
                    blocks.register_hash(block, name)
        elif what == "grow":
            before, room = list(table.block_ids), blocks.num_available
            given_more = blocks.grow_table(table, len(before) + number, len(before) + number + 2)
            assert given_more == (number <= room)
            assert table.block_ids[: len(before)] == before
            for block in table.block_ids[len(before) :]:
                content[block] = b"own"
        used = {block for table in tables for block in table.block_ids}
        assert blocks.num_available == 12 - len(used)
        assert blocks.num_idle <= blocks.num_available
        for table in tables:
            assert len(set(table.block_ids)) == len(table.block_ids)
            assert [b for first, n in table.runs for b in range(first, first + n)] == table.block_ids
