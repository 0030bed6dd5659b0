"""Shards: what goes in comes out, once; nothing half-built is ever seen; what is dropped is reported."""

import json
import os
import threading
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.readers import holdout
from anabatic.data.readers.document import Document, is_held_out
from anabatic.data.readers.holdout import select_split
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.encoders import TextEncoder
from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.writer import (
    DocumentCounts,
    EncodedEntry,
    ShardWriter,
    TextChunk,
    chunk_documents,
    split_long_text,
    write_shards,
)
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import (
    EOT_ID,
    write_byte_tokenizer,
    write_chat_shards,
    write_shard_set,
    write_text_shards,
)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def data(tmp_path):
    def make(**options):
        return Data(cache=str(tmp_path / "cache"), **options)

    return make


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def conversation(n, answer="Yes."):
    return {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": answer}]}


def text_of(made, tok):
    """The whole text of a set, documents joined by a vertical bar."""
    backend = hf_folder.load_fast_tokenizer(tok)
    ids = [token for i in range(made.num_docs) for token in made.read_entry(i)[0].tolist()]
    # Of a continued document the last token of one entry is the first of the next.
    return "|".join(backend.decode(run) for run in runs(ids))


def runs(ids):
    found = []
    for token in ids:
        if token == EOT_ID:
            found.append([])
        else:
            found[-1].append(token)
    return found


@given(st.text(st.sampled_from("ab \n\t中"), max_size=400), st.integers(1, 60))
def test_split_text_joins_to_the_text(text, part_chars):
    pieces = list(split_long_text(text, part_chars))
    assert "".join(pieces) == text
    assert all(len(piece) <= part_chars for piece in pieces)
    assert all(pieces[:-1])


def test_cuts_do_not_change_the_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = "".join(f"def f{n}(x):\n    return x + {n}\n\n\nclass A{n}:\n\n    y = '中文'\n" for n in range(300))
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator([text], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    pieces = list(split_long_text(text, 1000))
    assert len(pieces) > 10
    joined = [token for piece in pieces for token in trained.encode(piece).ids]
    assert joined == trained.encode(text).ids


@given(st.lists(st.lists(st.integers(1, 70_000), min_size=1, max_size=30), max_size=20), st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_round_trip_over_several_shards(tmp_path_factory, documents, shard_bytes):
    folder = tmp_path_factory.mktemp("set")
    made = write_text_shards(folder / "t", documents, dtype="uint32", shard_bytes=shard_bytes)
    assert [made.read_entry(i)[0].tolist() for i in range(made.num_docs)] == [[EOT_ID, *ids] for ids in documents]
    assert [made.locate_entry(i).num_inputs for i in range(made.num_docs)] == [len(ids) + 1 for ids in documents]
    assert made.num_tokens == sum(len(ids) + 1 for ids in documents)
    assert [made.count_entry_bytes(i) for i in range(made.num_docs)] == [len(ids) for ids in documents]
    chats = [([EOT_ID, *ids], [0, *(n % 2 for n in ids)]) for ids in documents]
    made = write_chat_shards(folder / "c", chats, dtype="uint32", shard_bytes=shard_bytes)
    for i, (ids, mask) in enumerate(chats):
        assert made.read_entry(i)[0].tolist() == ids
        assert made.read_entry(i)[1].tolist() == mask
        assert made.locate_entry(i).num_inputs == len(ids) - 1
    with pytest.raises(IndexError):
        made.read_entry(made.num_docs)


_ENTRIES = st.lists(st.tuples(st.lists(st.integers(1, 70_000), min_size=1, max_size=30), st.booleans()), max_size=12)


@given(st.lists(_ENTRIES, max_size=6), st.integers(1, 200), st.sampled_from(["text", "chat"]))
@settings(max_examples=60, deadline=None)
def test_whole_shards_are_appended_as_their_entries_would_be(tmp_path_factory, parts, shard_bytes, kind):
    folder = tmp_path_factory.mktemp("parts")
    entries = [
        [
            EncodedEntry(ids, bytes(len(ids)) if kind == "chat" else None, len(ids), starts or number == 0)
            for number, (ids, starts) in enumerate(part)
        ]
        for part in parts
    ]
    write_shard_set(folder / "one", kind, chain(*entries), dtype="uint32", shard_bytes=shard_bytes)
    for number, part in enumerate(entries):
        write_shard_set(folder / str(number), kind, part, dtype="uint32", shard_bytes=2**40, marks_starts=True)
    (folder / "joined").mkdir()
    writer = ShardWriter(folder / "joined", kind, "uint32", EOT_ID, shard_bytes)
    for number, part in enumerate(entries):
        if part:
            writer.append_shard(folder / str(number))
    meta = json.loads((folder / "one" / "meta.json").read_text())
    counts = DocumentCounts(**meta["counts"])
    writer.write_meta(
        {name: meta[name] for name in ("key", "source", "split", "seq_len", "part_chars", "formats")}, counts
    )
    files = [{file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in ("one", "joined")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["00000.bin", "00000.idx", "00000.len"])
def test_a_file_cut_short_is_named_with_its_numbers(tmp_path, name):
    made = write_text_shards(tmp_path / "s", [[1, 2, 3]] * 5)
    file = made.path / name
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(DataError, match=rf"{name}: {size - 1} bytes, meta.json says {size}"):
        ShardSet.open(made.path)
    file.unlink()
    with pytest.raises(DataError, match=rf"{name}: 0 bytes"):
        ShardSet.open(made.path)


def test_damaged_meta_and_wrong_dtype(tmp_path):
    made = write_text_shards(tmp_path / "s", [[1, 2, 3]])
    meta = json.loads((made.path / "meta.json").read_text())
    for change, words in (
        ({"dtype": "int8"}, "dtype 'int8', expected one of uint16, uint32"),
        ({"dtype": "uint32"}, r"10 bytes, meta.json says 20 \(dtype uint32\)"),
        ({"format": 0}, "another format"),
    ):
        (made.path / "meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(DataError, match=words):
            ShardSet.open(made.path)
    (made.path / "meta.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        ShardSet.open(made.path)
    with pytest.raises(DataError, match="no tokenised data here"):
        ShardSet.open(tmp_path)


def test_build_text(tmp_path, tok, data, caplog):
    rows = [{"text": f"line {n} 中 <|endoftext|>"} for n in range(50)] + [{"text": " \n"}]
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level("INFO", logger="anabatic"):
        made = dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    assert made.num_docs == made.counts["documents"] == 50
    assert text_of(made, tok) == "|".join(row["text"] for row in rows[:50])
    assert made.num_bytes == sum(len(row["text"].encode()) for row in rows[:50])
    assert made.num_tokens == made.num_bytes + 50
    assert made.dtype == np.uint16
    assert "1 empty documents skipped (2.0%)" in caplog.text
    assert not list(made.path.parent.glob(".*"))


def test_build_reuses_the_cache_until_something_changes(tmp_path, tok, data):
    spec = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    whole = data(valid=["x"])
    made = dataset_cache.build_dataset(spec, tok, whole, "train")
    stamp = (made.path / "meta.json").stat().st_mtime_ns
    again = dataset_cache.build_dataset(spec, tok, whole, "train", seq_len=512)
    assert (again.path / "meta.json").stat().st_mtime_ns == stamp
    assert dataset_cache.get_cache_path(spec, tok, whole, "train") == made.path
    assert dataset_cache.build_dataset(spec + "#1", tok, whole, "train").num_docs == 1
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert dataset_cache.get_cache_path(spec, tok, whole, "train") != made.path
    other = write_byte_tokenizer(tmp_path / "tok2")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    assert dataset_cache.get_cache_path(spec, other, whole, "train") != dataset_cache.get_cache_path(
        spec, tok, whole, "train"
    )


def test_a_damaged_cache_is_built_again(tmp_path, tok, data, caplog):
    spec = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    made = dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    os.truncate(made.path / "00000.bin", 1)
    again = dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    assert text_of(again, tok) == "one"
    assert "building it again" in caplog.text


def test_build_conversations(tmp_path, tok, data, caplog):
    rows = [conversation(n, "Yes " * (1 + 40 * (n == 3))) for n in range(20)]
    rows[5] = conversation("long " * 40)
    spec = jsonl(tmp_path / "a.jsonl", rows)
    made = dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train", seq_len=60)
    assert made.is_chat
    assert made.num_docs == 19
    assert made.counts["truncated"] == 1
    assert made.counts["too_long"] == 1  # cut before the assistant speaks
    assert "1 conversations too long and cut (5.0%); 1 conversations too long and left out (5.0%)" in caplog.text
    ids, mask = made.read_entry(3)
    assert len(ids) == 61
    backend = hf_folder.load_fast_tokenizer(tok)
    learned = backend.decode([t for t, m in zip(ids.tolist(), mask.tolist(), strict=True) if m])
    assert made.count_entry_bytes(3) == len(learned)
    assert ("Yes " * 41).startswith(learned)
    assert made.count_entry_bytes(0) == len("Yes ")
    every = dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train", seq_len=60, learning=LossPolicy("all"))
    assert every.num_docs == 20
    assert every.read_entry(0)[1].all()
    assert every.num_bytes > made.num_bytes


def test_malformed_conversations_fail_or_are_counted(tmp_path, tok, data, caplog):
    rows = [conversation(n) for n in range(5)] + [{"messages": [{"role": "user", "content": "alone"}]}]
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="a.jsonl: line 6: 1 messages, none of them by the assistant"):
        dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    made = dataset_cache.build_dataset(spec, tok, data(valid=["x"], on_bad_row="skip"), "train")
    assert (made.num_docs, made.counts["bad"]) == (5, 1)
    assert "1 malformed conversations skipped (16.7%)" in caplog.text


def test_texts_and_conversations_do_not_mix(tmp_path, tok, data):
    spec = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, conversation(1)])
    with pytest.raises(DataError, match=r"a.jsonl: line 2: a conversation among texts"):
        dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    spec = jsonl(tmp_path / "b.jsonl", [conversation(1), {"text": "one"}])
    with pytest.raises(DataError, match=r"b.jsonl: line 2: a text among conversations"):
        dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")


def test_an_interrupted_build_leaves_nothing(tmp_path, tok, data):
    rows = [{"text": "fine"}] * 3000 + [{"other": 1}]
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError):
        dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")
    path = dataset_cache.get_cache_path(spec, tok, data(valid=["x"]), "train")
    assert not path.exists()
    assert not list(path.parent.iterdir())


def test_two_builds_at_once_agree(tmp_path, tok, data):
    spec = jsonl(tmp_path / "a.jsonl", [{"text": f"line {n}"} for n in range(2000)])
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(dataset_cache.build_dataset(spec, tok, data(valid=["x"]), "train")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.num_docs for each in made] == [2000] * 4
    assert len({each.path for each in made}) == 1
    assert [path.name for path in made[0].path.parent.iterdir()] == [made[0].path.name]


@pytest.mark.parametrize("number", [2, 30, 199, 200, 1000])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_train_and_valid_part_the_documents(number, kind):
    documents = [
        Document(f"text {n}\n" * 100, None, f"a:{n}") if kind == "text" else Document(None, [{}], f"a:{n}")
        for n in range(number)
    ]
    train, valid = (list(select_split(lambda: documents, 0.05, split)) for split in ("train", "valid"))
    assert train and valid
    if kind == "text" and number * 0.05 < 1:
        assert ["".join(pair) for pair in zip([d.text for d in train], [d.text for d in valid], strict=True)] == [
            document.text for document in documents
        ]
        return
    assert sorted(d.id for d in train + valid) == sorted(d.id for d in documents)
    if number >= 200:
        assert all(is_held_out(d.id, 0.05) for d in valid)
    else:
        assert len(valid) == max(1, round(number * 0.05))


@pytest.mark.parametrize("number", [1, 2, 3, 49])
def test_a_few_short_rows_leave_something_held_out(number):
    documents = [Document(f"row {n} is short", None, f"a:{n}") for n in range(number)]
    train, valid = (list(select_split(lambda: documents, 0.02, split)) for split in ("train", "valid"))
    assert len(train) == max(1, number - 1)
    assert number == 1 or len(valid) == 1  # one short row alone cannot be split


@pytest.mark.parametrize("number", [3, 30, 250])
def test_documents_too_large_to_keep_are_parted_likewise(number, monkeypatch):
    documents = [Document(f"text {n}\n" * 100, None, f"a:{n}") for n in range(number)]
    kept = [list(select_split(lambda: documents, 0.05, split)) for split in ("train", "valid")]
    monkeypatch.setattr(holdout, "_HEAD_CHARS", 1000)
    assert [list(select_split(lambda: documents, 0.05, split)) for split in ("train", "valid")] == kept


def test_one_long_text_holds_out_its_end(tmp_path, tok, data):
    text = "".join(f"line {n}\n" for n in range(20_000))
    (tmp_path / "book.txt").write_text(text)
    train = dataset_cache.build_dataset(str(tmp_path / "book.txt"), tok, data(valid_fraction=0.1), "train")
    valid = dataset_cache.build_dataset(str(tmp_path / "book.txt"), tok, data(valid_fraction=0.1), "valid")
    assert train.num_docs > 3
    assert train.num_bytes + valid.num_bytes == len(text)
    assert valid.num_bytes == pytest.approx(0.1 * len(text), rel=0.01)
    with pytest.raises(ConfigError, match="valid_fraction is 0"):
        dataset_cache.build_dataset(str(tmp_path / "book.txt"), tok, data(valid_fraction=0.0), "valid")


def test_build_all_pairs_sources_with_weights(tmp_path, tok, data):
    one = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    two = jsonl(tmp_path / "b.jsonl", [conversation(1)])
    made = dataset_cache.build_datasets([one, f"{two}@0.25"], tok, data(valid=["x"]), "train", seq_len=64)
    assert [(each.is_chat, weight) for each, weight in made] == [(False, None), (True, 0.25)]


def test_memory_is_bounded_by_batches_not_by_the_corpus(tmp_path):
    """Of an endless supply only a few batches are read ahead of the writer."""
    read, written, ahead = [0], [0], []

    def documents():
        for n in range(40_000):
            read[0] += 1
            yield Document("word " * 10, None, str(n))

    def encode(batch):
        for part in batch:
            written[0] += 1
            ahead.append(read[0] - written[0])
            yield EncodedEntry([1] * 10, None, 50, part.is_document_start)

    counts = DocumentCounts()
    writer = ShardWriter(tmp_path, "text", "uint16", EOT_ID, shard_bytes=100_000)
    meta = {"key": "k", "source": "s", "split": "train", "seq_len": None, "part_chars": 100}
    texts = chunk_documents(documents(), counts, 100)
    write_shards(texts, lambda part: len(part.text), partial(map, encode), writer, counts, meta)
    made = ShardSet.open(tmp_path)
    assert made.num_docs == counts.documents == 40_000
    assert len(made.meta["shards"]) == 9
    assert max(ahead) <= 7 * 1024


def test_special_tokens_in_a_text_are_plain_text(tok):
    backend = hf_folder.load_fast_tokenizer(tok)
    made = list(TextEncoder(backend)([TextChunk("a<|endoftext|>", True)]))
    assert EOT_ID not in made[0].ids
    assert len(made[0].ids) == made[0].num_bytes == 14
