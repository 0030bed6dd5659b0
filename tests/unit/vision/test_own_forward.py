"""Models that are not packed: rows, losses and gradients are those of transformers with its own processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import TokenSegment, collate_packed
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.data.vision.model_pictures import make_collate, make_renderer, read_model_pictures
from anabatic.models.forward import choose_packing, compute_summed_loss
from anabatic.models.pretrained import prepare_model
from suite import tiny_own_vision, tiny_vision
from unit.vision.test_packed_pictures import collect_gradients

CPU = torch.device("cpu")
FAMILIES = tuple(tiny_own_vision.FAMILIES)
ROWS: list[tuple[str, str, list[tuple[int, int]]]] = [
    ("<image>Which color is it?", "red", [(96, 64)]),
    ("Say green.", "green", []),
    ("First <image> then <image>, which is larger?", "The 2nd", [(64, 64), (40, 90)]),
]
"""Question, answer, and width and height of its pictures."""


def draw_rows(folder: Path) -> list[tuple[list[dict[str, Any]], tuple[str, ...]]]:
    """Return the turns of each row and its pictures."""
    rows = []
    for number, (question, answer, sizes) in enumerate(ROWS):
        shown = [
            tiny_vision.draw_shape(folder / f"{number}-{index}.png", ("red", "blue")[index], "circle", size)
            for index, size in enumerate(sizes)
        ]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append((turns, tuple(map(str, shown))))
    return rows


def compute_reference(model: PreTrainedModel, family: str, rows: list[Any]) -> tuple[Tensor, list[list[int]]]:
    """Return the summed loss of the answers and the tokens of the rows by transformers' processor and forward pass."""
    processor = tiny_own_vision.build_own_processor(family)
    total, tokens = torch.zeros((), dtype=torch.float64), []
    for turns, pictures in rows:
        parts, shown = [], iter(pictures)
        for index, piece in enumerate(turns[0]["content"].split("<image>")):
            parts += [{"type": "image", "path": next(shown)}] if index else []
            parts += [{"type": "text", "text": piece}] if piece else []
        answer = turns[1]["content"]
        asked = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, return_tensors="pt")
        ids = inputs["input_ids"]
        labels = torch.full_like(ids, -100)
        learned = slice(-len(answer) - 2, -1)  # a token a letter and the end of the turn; a newline follows
        labels[:, learned] = ids[:, learned]
        if family == "gemma3" and not pictures:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        logits = model(**inputs, use_cache=False).logits[0, :-1].double()
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
        tokens.append(ids[0].tolist())
    return total, tokens


@pytest.mark.process  # seconds
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_one_by_one_equal_transformers(tmp_path: Path, family: str) -> None:
    rows = draw_rows(tmp_path)
    plain = tiny_own_vision.build_own_model(family, torch.float64).train()
    expected, tokens = compute_reference(plain, family, rows)
    expected.backward()

    folder = tiny_own_vision.save_own_model(tmp_path / "model", family)
    model = prepare_model(tiny_own_vision.build_own_model(family, torch.float64), CPU).train()
    pictures = read_model_pictures(folder, folder, model.config.to_dict())
    renderer = make_renderer(tiny_own_vision.build_own_tokenizer(family), pictures, 400)
    names = [f"rows:{number}" for number in range(len(rows))]
    turns, shown = zip(*rows, strict=True)
    rendered = renderer.render(turns, shown, names, [None] * len(rows), "assistant")
    assert [one.ids.tolist() for one in rendered] == tokens
    pieces = [TokenSegment(one.ids, one.mask, pictures=one.pictures) for one in rendered]
    capacity = sum(piece.num_inputs for piece in pieces) + 7
    batch = make_collate(pictures, collate_packed)(pieces, capacity, 0, 400, None)
    loss = compute_summed_loss(model, choose_packing(model)(batch, CPU), 1 << 20)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted, found = collect_gradients(plain), collect_gradients(model)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.process  # seconds
def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    folder = tiny_own_vision.save_own_model(tmp_path / "model", "llava")
    model = tiny_own_vision.build_own_model("llava")
    pictures = read_model_pictures(folder, folder, model.config.to_dict())
    tokenizer = tiny_own_vision.build_own_tokenizer("llava")
    shown = (str(tiny_vision.draw_shape(tmp_path / "one.png", "red", "circle")),)
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    with pytest.raises(DataError, match=r"a:1: 1 x <image> in the turns, 0 pictures"):
        make_renderer(tokenizer, pictures, 400).render([turns], [()], ["a:1"], [None], "assistant")
    with pytest.raises(DataError, match=r"a:1: \d+ tokens with those of 1 pictures; at most 20 fit"):
        make_renderer(tokenizer, pictures, 20).render([turns], [shown], ["a:1"], [None], "assistant")
    with pytest.raises(DataError, match="a:1: .*gone.png"):
        make_renderer(tokenizer, pictures, 400).render(
            [turns], [(str(tmp_path / "gone.png"),)], ["a:1"], [None], "assistant"
        )

    (rendered,) = make_renderer(tokenizer, pictures, 400).render([turns], [shown], ["a:1"], [None], "assistant")
    piece = TokenSegment(rendered.ids, rendered.mask, pictures=rendered.pictures)
    batch = make_collate(pictures, collate_packed)([piece], 64, 0, 64, None)
    packed = choose_packing(model)(batch, CPU)
    for layer in model.model.language_model.layers:
        layer.self_attn.is_causal = False  # a text that looks ahead
    with pytest.raises(DataError, match="tokens of a text see those behind them"):
        compute_summed_loss(prepare_model(model, CPU), packed, 1 << 20)

    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoneSuch"}')
    (folder / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    with pytest.raises(DataError, match="the processor cannot be built"):
        read_model_pictures(folder, folder, model.config.to_dict())


def test_a_template_that_the_processor_keeps_is_read(tmp_path: Path) -> None:
    tokenizer = tiny_own_vision.build_own_tokenizer("llava")
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(tmp_path).chat_template == template
    for torn in ("{", "[]", '{"chat_template": 5}'):
        (tmp_path / "chat_template.json").write_text(torn)
        with pytest.raises(DataError, match="chat_template.json cannot be loaded"):
            load_tokenizer(tmp_path)
