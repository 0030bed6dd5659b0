"""What is shown as learned is what is learned, and no text steers the terminal."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.sections.common import Data
from anabatic.core import log
from anabatic.data.chat import loss_preview, rendering
from anabatic.data.chat.loss_mask import LossPolicy, LossTurns
from anabatic.data.chat.loss_preview import (
    MAX_PREVIEW_CHARS,
    MAX_PREVIEW_LINES,
    MaskedSpan,
    format_preview,
    split_by_loss_mask,
)
from anabatic.data.shards import dataset_cache
from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüß dich 👋,\nwie geht's?"},
    {"role": "assistant", "content": "Gut 🙂\n\tund dir?"},
    {"role": "user", "content": "Auch."},
    {"role": "assistant", "content": "中文也行。"},
]


@pytest.fixture(scope="module", params=["marked", "bare"])
def tok(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer whose template marks what the assistant says, and one whose template does not."""
    tok = hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    if request.param == "bare":
        tok.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tok.chat_template)
    return tok


def read_back(text: str) -> str:
    """Undo what makes characters visible."""
    return text.replace("\u21b5\n", "\n").replace("\\t", "\t")


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ("assistant", ["Gut 🙂\n\tund dir?<|im_end|>", "中文也行。<|im_end|>"]),
        ("last", ["中文也行。<|im_end|>"]),
    ],
)
def test_between_the_marks_stands_exactly_what_is_learned(tok: Any, turns: LossTurns, wanted: list[str]) -> None:
    one = rendering.render_conversations([TALK], tok, turns=turns)[0]
    text = read_back(format_preview(split_by_loss_mask(one.ids, one.mask, tok), colour=False))
    assert re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL) == wanted
    assert text.replace("[[", "").replace("]]", "") == one.text
    coloured = read_back(
        re.sub(r"\x1b\[0m\n\x1b\[\d+m", "\n", format_preview(split_by_loss_mask(one.ids, one.mask, tok), colour=True))
    )
    assert re.findall(r"\x1b\[32m(.*?)\x1b\[0m", coloured, re.DOTALL) == wanted
    assert re.sub(r"\x1b\[\d*m", "", coloured) == one.text


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(max_size=80), st.booleans()), max_size=60))
def test_any_text_is_short_and_harmless(parts: list[tuple[str, bool]]) -> None:
    text = format_preview([MaskedSpan(*part) for part in parts], colour=False)
    assert all(one.isprintable() or one == "\n" for one in text)
    assert text.count("\n") <= MAX_PREVIEW_LINES + 2


@pytest.mark.parametrize("text", ["x" * 5000, "x\n" * 300, "long line " * 30 + "\n" * 100 + "y" * 3000])
def test_the_middle_is_left_out_with_a_note(text: str) -> None:
    told = format_preview([MaskedSpan(text[:100], False), MaskedSpan(text[100:], True)], colour=False)
    plain = told.replace("[[", "").replace("]]", "")
    (note,) = re.findall(r"\n\.\.\. ([\d,]+) characters left out \.\.\.\n", plain)
    head, tail = re.split(r"\n\.\.\. [\d,]+ characters left out \.\.\.\n", plain)
    head, tail = read_back(head), read_back(tail)
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + len(tail) + int(note.replace(",", "")) == len(text)
    assert len(head) + len(tail) <= MAX_PREVIEW_CHARS and (head + tail).count("\n") <= MAX_PREVIEW_LINES
    assert min(len(head), len(tail)) > 10


def test_the_first_token_is_no_target(tok: Any) -> None:
    ids = np.asarray(tok.encode("abc"))
    assert split_by_loss_mask(ids, np.ones(3), tok) == [MaskedSpan("a", False), MaskedSpan("bc", True)]


def test_every_source_in_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("plain")
    for name, rows in (("a", 2), ("b", 1)):
        pairs = [{"query": f"{name}{n}?", "response": f"{name}{n}!"} for n in range(rows)]
        (tmp_path / f"{name}.json").write_text(json.dumps(pairs))
    specs = [str(tmp_path / name) for name in ("text.txt", "a.json", "b.json")]
    built = dataset_cache.build_datasets(specs, folder, Data(valid_fraction=0.0), "train", learning=LossPolicy())
    made = [part for part, _ in built]
    tok = hf_folder.load_tokenizer(folder)
    found = [tok.decode(ids[mask == 1].tolist()) for _, ids, mask in loss_preview.iter_conversations(made, 9)]
    assert found == ["a0!<|im_end|>", "b0!<|im_end|>", "a1!<|im_end|>"]
    with caplog.at_level(logging.INFO, "anabatic"):
        loss_preview.log_conversations(made, tok, 0)
        assert not caplog.records
        loss_preview.log_conversations(made, tok, 1)
    (record,) = caplog.records
    assert "tokens, 4 of them targets, marked [[so]]\n" in record.getMessage()
    assert "[[a0!<|im_end|>]]" in record.getMessage()


@pytest.mark.parametrize(("colour", "wanted"), [(True, "\x1b[32mgreen\x1b[0m\n"), (False, "[[green]]\n")])
def test_a_terminal_without_colours_gets_the_plain_line(colour: bool, wanted: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log._LineFormatter(colour))
    log.LOGGER.addHandler(handler)
    log.LOGGER.setLevel(logging.INFO)
    log.info("[[green]]", "\x1b[32mgreen\x1b[0m")
    assert stream.getvalue() == wanted
