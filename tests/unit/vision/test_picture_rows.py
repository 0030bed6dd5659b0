"""Rows with pictures: how they are written, what is refused, and their tokens."""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from anabatic.config.sections.common import Data
from anabatic.config.sections.train_jobs import PictureData, Vision
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.chat.preference_pairs import split_pair_segment
from anabatic.data.chat.rendering import render_conversations
from anabatic.data.readers.document import ColumnMapping, RowIssue
from anabatic.data.readers.row_parsing import row_to_document
from anabatic.data.shards.dataset_cache import build_dataset
from anabatic.data.shards.reader import ShardSet
from anabatic.data.shards.writer import DocumentCounts, EncodedEntry, ShardWriter
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.data.vision.picture_encoder import PictureRenderer
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.row_pictures import place_pictures
from anabatic.data.vision.rule_files import read_picture_rules
from suite import tiny_vision

START, END, PICTURE = 3, 4, 5


def write_header(path: Path, width: int, height: int) -> None:
    """Write a PNG file that says how large it is, and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", 0))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, its processor's file, and good and bad pictures."""
    folder = tmp_path_factory.mktemp("rows")
    tiny_vision.save_seeing_model(folder / "model", depth=1)
    tiny_vision.draw_shape(folder / "a.png", "red", "square")
    Image.open(folder / "a.png").save(folder / "b.jpg")
    (folder / "torn.jpg").write_bytes((folder / "b.jpg").read_bytes()[:300])
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:90])
    (folder / "text.png").write_text("no picture")
    (folder / "drawn.svg").write_text("<svg/>")
    write_header(folder / "bomb.png", 20_000, 20_000)
    write_header(folder / "large.png", 9000, 8000)
    Image.new("L", (3000, 4)).save(folder / "thin.png")
    Image.new("I;16", (64, 64)).save(folder / "deep.png")
    return folder


@pytest.fixture(scope="module")
def rules(place: Path) -> PictureRules:
    return read_picture_rules(place / "model", tiny_vision.make_config().to_dict())


def make_row(images: Any, text: str = "<image>Which?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}], "images": images}


def build(place: Path, rules: PictureRules, rows: list[dict[str, Any]], **options: Any) -> ShardSet:
    """Tokenise rows that stand next to the pictures."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"valid_fraction": 0.0, "cache": str(place / "cache")} | options.pop("data", {})
    return build_dataset(
        str(place / "rows.jsonl"), place / "model", PictureData(**settings), "train", pictures=rules,
        **{"seq_len": 200, **options},
    )  # fmt: skip


def read_uri(place: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode((place / 'a.png').read_bytes()).decode()}"


def test_all_spellings_give_the_same_tokens(place: Path, rules: PictureRules) -> None:
    uri = read_uri(place)
    part = {"type": "image_url", "image_url": {"url": uri}}
    turns = make_row([])["messages"]
    said = {"from": "gpt", "value": "red"}
    rows = [
        make_row(["a.png"]),
        make_row([str(place / "a.png")]),
        make_row(f"file://{place / 'a.png'}"),
        make_row([uri]),
        make_row('["a.png"]'),
        make_row(["a.png"], "Which?"),
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}, turns[1]]},
        {"conversations": [{"from": "human", "value": "<image>Which?"}, said], "image": "a.png"},
        {"query": "<image>Which?", "response": "red", "images": [{"path": "a.png"}]},
    ]
    shards = build(place, rules, rows)
    entries = [shards.read_entry(number) for number in range(len(rows))]
    ids, mask = entries[0]
    assert all(np.array_equal(ids, other) for other, _ in entries)
    first = ids.tolist().index(START)
    assert ids[first : first + 6].tolist() == [START, *[PICTURE] * 4, END]
    assert mask is not None and mask.sum() == 4 and not mask[ids == PICTURE].any()


def test_several_pictures_and_none(place: Path, rules: PictureRules) -> None:
    rows = [make_row(["a.png", "b.jpg"], "<image> and <image>?"), make_row([], "Which?")]
    shards = build(place, rules, rows, learning=LossPolicy(turns="all"))
    pieces = [shards.read_segment(entry := shards.locate_entry(number), 0, entry.num_inputs) for number in (0, 1)]
    assert [Path(name).name for name, _, _ in json.loads(pieces[0].pictures)] == ["a.png", "b.jpg"]
    assert not pieces[1].pictures
    ids, mask = pieces[0].ids, pieces[0].loss_mask
    assert mask is not None and (ids == PICTURE).sum() == 8
    assert mask[ids != PICTURE].all() and not mask[ids == PICTURE].any()


def test_tiles_have_the_tokens_of_their_processor(place: Path) -> None:
    folder = tiny_vision.save_seeing_model(place / "tiled", "internvl", depth=1)
    Image.new("RGB", (96, 64), (9, 99, 200)).save(place / "wide.png")
    tokenizer = load_tokenizer(folder)
    rules = read_picture_rules(folder, tiny_vision.make_config("internvl").to_dict())
    renderer = PictureRenderer(tokenizer, rules, 90)
    turns = make_row([], "<image> and <image>?")["messages"]
    files = (str(place / "wide.png"), str(place / "a.png"))
    (rendered,) = renderer.render([turns], [files], ["row"], [None], "all")
    processor = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=6)
    tiles = processor([load_picture(file) for file in files], crop_to_patches=True)
    names = dict(start_image_token="<|vision_start|>", image_token="<|image_pad|>", end_image_token="<|vision_end|>")
    parts = SimpleNamespace(image_seq_length=4, **names)  # the whole processor needs torchvision
    text = render_conversations([place_pictures(turns, files, "row", ["{}\n"] * 2)[0]], tokenizer)[0].text
    text = text.format(*(InternVLProcessor.replace_image_token(parts, tiles, index) for index in (0, 1)))
    expected = tokenizer([text], add_special_tokens=False)
    assert rendered.ids.tolist() == expected["input_ids"][0] and rendered.is_picture is not None
    assert rendered.is_picture.sum() == 4 * 12 and not rendered.mask[np.isin(rendered.ids, (START, PICTURE, END))].any()
    with pytest.raises(DataError, match="28 \\+ 20 of them of pictures"):
        PictureRenderer(tokenizer, rules, 70).render([turns], [files], ["row"], [None], "all")
    with pytest.raises(DataError, match="lacks tokens of pictures"):
        PictureRenderer(tiny_vision.build_tokenizer(), rules, None)


BAD = {
    "missing": (make_row(["no.png"]), "no.png: No such file"),
    "torn jpeg": (make_row(["torn.jpg"]), "torn.jpg: the picture is torn"),
    "torn png": (make_row(["torn.png"]), "torn.png: the picture is torn"),
    "no picture": (make_row(["text.png"]), "text.png: not a picture"),
    "svg": (make_row(["drawn.svg"]), "drawn.svg: not a picture"),
    "bomb": (make_row(["bomb.png"]), "bomb.png: .* pixels are more than 67,108,864"),
    "large": (make_row(["large.png"]), "large.png: 9,000 x 8,000 pixels are more than"),
    "thin": (make_row(["thin.png"]), "thin.png: one side is more than 200 times the other"),
    "deep": (make_row(["deep.png"]), "deep.png: I;16 has more than 8 bits"),
    "folder": (make_row(["."]), "not a regular file"),
    "base64": (make_row(["data:image/png;base64,@@"]), "broken base64"),
    "address": (make_row(["https://a.example/b.png"]), "is an address in a network, and nothing is fetched"),
    "more tags": (make_row(["a.png"], "<image><image>?"), "2 x <image> in the turns, 1 pictures"),
    "no pictures": (make_row([], "<image>?"), "1 x <image> in the turns, 0 pictures"),
    "own token": (make_row(["a.png"], "<image><|image_pad|>"), "2 tokens of pictures in the text, 1 pictures"),
    "number": (make_row([3]), "a picture is a number"),
    "sound": (make_row(["a.png"]) | {"audios": ["a.wav"]}, 'column "audios" holds sound'),
}


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="pipe.png: not a regular file"):
        load_picture(str(tmp_path / "pipe.png"))


def test_pairs_are_about_the_same_pictures(place: Path, rules: PictureRules) -> None:
    picture = [{"type": "image"}, {"type": "text", "text": "What?"}]
    turn = [{"role": "user", "content": picture}]
    answers = {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}
    both = {key: [*turn, *value] for key, value in answers.items()}
    rows = [{"prompt": turn, **answers, "images": ["a.png"]}, {**both, "images": ["a.png"]}]
    pairs = LossPolicy(pairs=True)
    shards = build(place, rules, rows, learning=pairs)
    for number in (0, 1):
        entry = shards.locate_entry(number)
        sides = split_pair_segment(shards.read_segment(entry, 0, entry.num_inputs))
        assert [(side.ids == PICTURE).sum() for side in sides] == [4, 4] and sides[0].pictures == sides[1].pictures
    with pytest.raises(DataError, match="line 1: 1 x <image> with the better answer, 0 with the other"):
        build(
            place, rules, [{"prompt": "q", "chosen": "a <image>", "rejected": "b", "images": ["a.png"]}], learning=pairs
        )


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_an_error_or_counted(place: Path, rules: PictureRules, case: str) -> None:
    row, what = BAD[case]
    rows = [make_row(["a.png"]), row, make_row(["b.jpg"])]
    with pytest.raises(DataError, match=f"rows.jsonl: line 2: .*{what}"):
        build(place, rules, rows)
    shards = build(place, rules, rows, data={"on_bad_row": "skip"})
    assert shards.num_docs == 2 and shards.counts["bad"] + shards.counts["unread"] == 1
    assert [bool(shards.read_segment(shards.locate_entry(n), 0, 5).pictures) for n in (0, 1)] == [True, True]


def test_a_row_that_does_not_fit_names_its_tokens(place: Path, rules: PictureRules) -> None:
    rows = [make_row([], "long " * 20), make_row(["a.png", "a.png"], "<image><image>?")]
    with pytest.raises(DataError, match=r"line 2: \d+ tokens, 4 \+ 4 of them of pictures; at most 25 fit"):
        build(place, rules, rows, seq_len=24)


def test_pictures_lie_in_their_own_folder(place: Path, rules: PictureRules, tmp_path: Path) -> None:
    tiny_vision.draw_shape(tmp_path / "far.png", "blue", "circle")
    with pytest.raises(DataError, match="far.png: No such file"):
        build(place, rules, [make_row(["far.png"])])
    assert build(place, rules, [make_row(["far.png"])], data={"media": str(tmp_path)}).num_docs == 1


def test_models_of_text_refuse_pictures(place: Path) -> None:
    row = make_row(["a.png"])
    assert isinstance(row_to_document(row, "id", "here", ColumnMapping()), RowIssue)
    (place / "rows.jsonl").write_text(json.dumps(row))
    for kind in (Data, PictureData):
        with pytest.raises(DataError, match='column "images" holds pictures'):
            build_dataset(str(place / "rows.jsonl"), place / "model", kind(valid_fraction=0.0), "train")


def test_parts_of_a_source_keep_their_pictures(tmp_path: Path) -> None:
    """Shards that several machines wrote are joined, with entries that have pictures and some that have none."""
    entries = [
        EncodedEntry([7] * (4 + n), bytes([1] * (4 + n)), 1, True, b'[["%d",2,2]]' % n * (n % 3 > 0)) for n in range(9)
    ]
    whole = _write(tmp_path / "whole", [entries])
    joined = _write(tmp_path / "joined", [entries[:4], entries[4:]])
    for number, entry in enumerate(entries):
        for shards in (whole, joined):
            place = shards.locate_entry(number)
            assert shards.read_segment(place, 0, place.num_inputs).pictures == entry.pictures


def _write(folder: Path, parts: list[list[EncodedEntry]]) -> ShardSet:
    meta = {"key": "k", "source": "s", "split": "train", "seq_len": 99, "part_chars": 9, "formats": {}}
    folder.mkdir()
    target = ShardWriter(folder, "chat", "uint16", 0, shard_bytes=40, has_pictures=True)
    for number, part in enumerate(parts):
        made = folder / f"part{number}"
        made.mkdir()
        writer = (
            target if len(parts) == 1 else ShardWriter(made, "chat", "uint16", 0, marks_starts=True, has_pictures=True)
        )
        for entry in part:
            writer.append_entry(entry)
        if writer is not target:
            writer.write_meta(meta, DocumentCounts())
            target.append_shard(made)
    target.write_meta(meta, DocumentCounts())
    return ShardSet.open(folder)


def make_job(**vision: Any) -> SftJob:
    return SftJob(model="m", data=PictureData(train=["rows.jsonl"]), vision=Vision(**vision))


def test_settings() -> None:
    assert make_job(train=["language,projector", "tower"]).vision.train == ["language", "projector", "tower"]
    with pytest.raises(ConfigError, match='vision.train names "eyes"'):
        make_job(train=["eyes"])
    with pytest.raises(ConfigError, match="vision.min_pixels is 9"):
        make_job(min_pixels=9, max_pixels=8)
    with pytest.raises(ConfigError, match="vision.max_pixels is 0"):
        make_job(max_pixels=0)


def make_object_row(said: str, objects: Any, asked: str = "<image>Where?") -> dict[str, Any]:
    row = make_row(["wide.png"], asked)
    row["messages"][1]["content"] = said
    return row | {"objects": objects}


BOXES = {"ref": ["a dog", "a {cat}"], "bbox": [[10, 20, 95.5, 60], [100, 50]]}
FORMS = {
    "qwen3_vl": "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(50,200),(478,600)<|box_end|>",
    "qwen2_5_vl": "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(10,17),(94,50)<|box_end|>",
    "qwen3_5": "a dog[50, 200, 478, 600]",
    "glm4v": "a dog<|begin_of_box|>[[50,200,478,600]]<|end_of_box|>",
    "internvl": "<ref>a dog</ref><box>[[50, 200, 478, 600]]</box>",
}


@pytest.mark.parametrize("family", FORMS)
def test_objects_are_written_as_the_model_wants_them(tmp_path: Path, family: str) -> None:
    """The picture of 200 x 100 pixels becomes one of 196 x 84 for Qwen2.5-VL."""
    Image.new("RGB", (200, 100)).save(tmp_path / "wide.png")
    folder = tiny_vision.save_seeing_model(tmp_path / "model", family, depth=1)
    boxes = {"boxes": "plain"} if family == "qwen3_5" else {}
    rules = read_picture_rules(folder, tiny_vision.make_config(family).to_dict(), max_pixels=20_000, **boxes)
    norm = {**BOXES, "bbox": [[0.05, 0.2, 0.4775, 0.6], [0.5, 0.5]], "bbox_type": "norm1", "image_id": [0, 0]}
    said = "<ref-object><bbox> and <ref-object> at <bbox>"
    rows = [make_object_row(said, each) for each in (BOXES, json.dumps(BOXES), norm)]
    shards = build(tmp_path, rules, rows, seq_len=400)
    tokenizer = tiny_vision.build_tokenizer()
    texts = [tokenizer.decode(shards.read_entry(number)[0]) for number in range(3)]
    assert texts[0] == texts[1] == texts[2] and f"{FORMS[family]} and " in texts[0] and "a {cat}" in texts[0]


BAD_OBJECTS = {
    "more boxes": ("<ref-object>", BOXES, '1 x <ref-object> in the turns, 2 entries in "ref" of "objects"'),
    "fewer boxes": ("<bbox>", {"ref": [], "bbox": []}, '1 x <bbox> in the turns, 0 entries in "bbox"'),
    "outside": ("<bbox>", {"bbox": [[10, 10, 201, 50]]}, "outside of its picture of 200 x 100 pixels"),
    "backwards": ("<bbox>", {"bbox": [[100, 10, 50, 50]]}, "bbox has .100, 10, 50, 50., not .x1, y1, x2, y2."),
    "three": ("<bbox>", {"bbox": [[1, 2, 3]]}, "bbox has .1, 2, 3., not"),
    "no number": ("<bbox>", {"bbox": [["a", 2]]}, "bbox has .'a', 2., not"),
    "norm": ("<bbox>", {"bbox": [[0.5, 1.5]], "bbox_type": "norm1"}, "not .* as bbox_type norm1 has them"),
    "type": ("<bbox>", {"bbox": [[1, 2]], "bbox_type": "norm"}, "bbox_type is 'norm'"),
    "picture": ("<bbox>", {"bbox": [[1, 2]], "image_id": [1]}, "image_id is 1, and the row has 1 pictures"),
    "nothing": ("<bbox>", {"bbox": [[1, 2]], "image_id": [None]}, "image_id is None"),
    "pictures": ("<bbox>", {"bbox": [[1, 2]], "image_id": [0, 0]}, "2 x image_id, 1 boxes"),
    "names": ("<ref-object>", {"ref": [3]}, "ref is not a list of texts"),
    "list": ("<ref-object>", {"ref": "dog"}, '"ref" of "objects" is text, not a list'),
    "kind": ("<ref-object>", [1], '"objects" is a list, not an object'),
    "json": ("<ref-object>", "{", '"objects" is not JSON'),
}


@pytest.mark.parametrize("case", BAD_OBJECTS)
def test_bad_objects_are_an_error_or_counted(place: Path, rules: PictureRules, case: str) -> None:
    said, objects, what = BAD_OBJECTS[case]
    Image.new("RGB", (200, 100)).save(place / "wide.png")
    rows = [make_row(["a.png"]), make_object_row(said, objects)]
    with pytest.raises(DataError, match=f"rows.jsonl: line 2: .*{what}"):
        build(place, rules, rows)
    assert build(place, rules, rows, data={"on_bad_row": "skip"}).num_docs == 1
