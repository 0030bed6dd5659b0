"""Rows with pictures in packed batches: losses and gradients are those of plain transformers, one row at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.cpu_speed.fused_layers import install_layers
from anabatic.data.batching.packing import TokenSegment
from anabatic.data.vision.picture_batch import CollatePictures, make_positions, pack_grids
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules, TileRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.device.ops import get_device_ops
from anabatic.models import fused_ops
from anabatic.models.forward import compute_summed_loss
from anabatic.models.pretrained import enable_activation_checkpointing, prepare_model
from anabatic.models.vision.picture_packing import make_picture_packing
from suite import tiny_vision

CPU = torch.device("cpu")
FAMILIES = tuple(tiny_vision.PATCH)
SHAPES = [[(96, 64)], [], [(64, 64), (130, 40)], [(64, 100)]]
"""Pictures of each row, width and height."""


def make_rows(folder: Path, family: str) -> tuple[PictureRules, list[TokenSegment]]:
    """Return rows of text and pictures: two of the pictures stand next to each other, one row has none."""
    model = tiny_vision.make_config(family)
    tiny_vision.save_seeing_model(folder / "model", family)
    rules = read_picture_rules(folder / "model", model.to_dict())
    generator = np.random.default_rng(0)
    rows = []
    for number, sizes in enumerate(SHAPES):
        ids: list[int] = generator.integers(7, 288, 3 + number).tolist()
        pictures = []
        for index, size in enumerate(sizes):
            color = ("red", "green", "blue")[(number + index) % 3]
            path = tiny_vision.draw_shape(folder / f"{number}-{index}.png", color, "circle", size)
            grid = rules.fit_grid(size[1], size[0])
            pictures.append(PictureGrid(str(path), *grid))
            ids += [3, *[5] * rules.count_tokens(grid), 4]
        ids += generator.integers(7, 288, 9).tolist()
        mask = np.zeros(len(ids), np.uint8)
        mask[-6:] = 1
        rows.append(TokenSegment(np.asarray(ids), mask, pictures=pack_grids(pictures) if pictures else b""))
    return rules, rows


def compute_reference(model: PreTrainedModel, rows: list[TokenSegment], rules: PictureRules) -> Tensor:
    """Return the summed loss of transformers' own forward pass over each row alone, with its own processor."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kind = Glm4vImageProcessorPil if rules.counts_frames else Qwen2VLImageProcessorPil
    size = {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
    half = [0.5, 0.5, 0.5]
    processor = kind(size=size, patch_size=rules.patch, image_mean=half, image_std=half)
    if isinstance(rules, TileRules):
        side = {"height": rules.patch, "width": rules.patch}
        processor = GotOcr2ImageProcessorPil(size=side, crop_to_patches=True, max_patches=6)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.from_numpy(row.ids)[None]
        labels = torch.where(torch.from_numpy(row.loss_mask != 0)[None], ids, -100)
        inputs = {"mm_token_type_ids": (ids == rules.image_token).int()}
        if row.pictures:
            images = [load_picture(source) for source, *_ in json.loads(row.pictures)]
            inputs |= processor(images, return_tensors="pt")
        inputs.pop("num_patches", None)
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1].double()
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
    return total


def collect_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.process  # seconds
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_transformers_one_by_one(tmp_path: Path, family: str, recompute: str) -> None:
    rules, rows = make_rows(tmp_path, family)
    plain = tiny_vision.build_model(family, torch.float64).train()
    expected = compute_reference(plain, rows, rules)
    expected.backward()

    model = prepare_model(tiny_vision.build_model(family, torch.float64), CPU).train()
    fused_ops.install_fused_ops(model, get_device_ops("cpu"))
    install_layers(model)
    enable_activation_checkpointing(model, recompute)
    capacity = sum(row.num_inputs for row in rows) + 7
    batch = CollatePictures(rules)(rows, capacity, 0, 64)
    loss = compute_summed_loss(model, make_picture_packing(model)(batch, CPU), 1 << 20)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted, found = collect_gradients(plain), collect_gradients(model)
    assert wanted.keys() == found.keys()
    tolerance = 1e-3 if family.startswith("qwen3_5") else 1e-5  # the delta rule is computed in fp32
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
        assert error < tolerance, f"{name}: {error:.1e}"


def test_positions_are_those_of_transformers(tmp_path: Path) -> None:
    rules, rows = make_rows(tmp_path, "qwen3_vl")
    model = tiny_vision.build_model()
    for row in rows:
        pictures = [PictureGrid(*each) for each in json.loads(row.pictures or b"[]")]
        grids = [one.grid for one in pictures]
        ids = torch.from_numpy(row.ids)[None]
        grid_thw = torch.tensor([(1, *grid) for grid in grids]) if grids else None
        expected, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == rules.image_token).int(), image_grid_thw=grid_thw
        )
        np.testing.assert_array_equal(make_positions(row.ids, pictures, rules), expected[:, 0].numpy())
