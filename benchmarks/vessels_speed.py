"""How fast are rows classified and learned, beside the way of the "token_for_nj" scripts?

    python benchmarks/vessels_speed.py --data ais_train.csv.gz [--rows 512] [--depth 4] [--rounds 3] [--seconds 10]

All sides run the same backbone (transformers' Qwen3 of `--depth`, fp32, one thread) over the same 30-point segments.
The source's way: its words (`char`, 25 a point) with the space between two words as its own token (its tokenizer
makes 1,499 ids of 750 words), cut to 512, padded to 512, batches of 32 (training: 4, an optimizer step after every
second). The steps from there to ours change one thing each:

    source      512 ids a row: 10 of 30 points are read
    one id      no space tokens: 512 ids are 20 points
    packed      the same ids without padding, our operators
    whole       all 750 ids of a row, packed: every point is read
    compact     ours with position: all points in 6.5 words each, packed
    motion      ours without position: all points in 4 words each, packed

The `tokens` of the table are rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from anabatic.config.pretrain import PretrainModel
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.data.sequence.dataset import SequenceSegment, collate_classification
from anabatic.device.device import select_device
from anabatic.models import classifier, fused_ops, pretrained
from anabatic.models.classifier import ClassifierDescription, ClassLoss, get_class_head
from anabatic.models.model_init import build_meta_qwen3, init_weights
from anabatic.plan.depth_dial import derive_model_sizes
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.vocabulary import build_vocabulary
from anabatic_vessels.words.word_tokenizer import WordEncoder, build_word_tokenizer
from option_types import names_among, positive_int, positive_number
from paired import Turns, alternate, table

LENGTH = 512
SIDES = ("source", "one id", "packed", "whole", "compact", "motion")
WORDS = {"compact": "compact", "motion": "motion"}
MICRO_TOKENS = 4096


def rows_of(data: str, side: str, count: int) -> tuple[list[list[int]], list[int], int]:
    """Return ids and class of every row, and the size of the vocabulary."""
    segments = read_segments([data], TrackSettings(format=WORDS.get(side, "char"), features=False))
    tokenizer = build_word_tokenizer(build_vocabulary(segments.spec))
    words, space = WordEncoder.from_tokenizer(tokenizer), len(tokenizer)
    step = max(1, len(segments.rows) // count)
    ids, labels = [], []
    for row in segments.rows[::step][:count]:
        found = words(row.text).tolist()
        if side == "source":
            found = [one for word in found for one in (word, space)][:-1]
        ids.append(found if side in ("whole", *WORDS) else found[:LENGTH])
        labels.append(row.label)
    return ids, labels, space + 1


def backbone(depth: int, entries: int, classes: int) -> Any:
    """Return the model with a head of `classes`."""
    plan = derive_model_sizes(PretrainModel(depth=depth), entries)
    model = build_meta_qwen3(plan, PretrainModel(depth=depth), entries, 1024)
    classifier.attach_class_head(model, ClassifierDescription(tuple(map(str, range(classes))), "char-v1-r10"))
    model.to_empty(device="cpu")
    init_weights(model, 0)
    get_class_head(model).init_weights(0)
    return model


def work(turns: Turns, data: str, side: str, count: int, depth: int, train: bool) -> None:
    """One side: classify or learn the rows over and over."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids, labels, entries = rows_of(data, side, count)
    model = backbone(depth, entries, max(labels) + 1)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-5)
    model.train(train)
    run = padded if side in ("source", "one id") else packed
    turns.begin()
    with torch.set_grad_enabled(train):
        for rows, loss in run(model, ids, labels, train):
            if train:
                loss.backward()
                if rows < 0:
                    continue  # the first half of an accumulated step
                optimizer.step()
                optimizer.zero_grad()
            turns.step(rows)


def padded(model: Any, ids: list[list[int]], labels: list[int], train: bool) -> Iterator[tuple[int, Any]]:
    """Rows padded to LENGTH, the state of the first token, as the source has it."""
    size = 4 if train else 32
    halves = 0
    while True:
        for at in range(0, len(ids) - size + 1, size):
            rows = torch.zeros(size, LENGTH, dtype=torch.long)
            mask = torch.zeros_like(rows)
            for place, row in enumerate(ids[at : at + size]):
                rows[place, : len(row)] = torch.tensor(row)
                mask[place, : len(row)] = 1
            states = model.model(input_ids=rows, attention_mask=mask).last_hidden_state[:, 0]
            told = get_class_head(model).out(torch.nn.functional.dropout(states, 0.3, train))
            loss = torch.nn.functional.cross_entropy(told, torch.tensor(labels[at : at + size])) if train else None
            halves += 1
            yield (-1 if train and halves % 2 else size * 2 if train else size), loss


def packed(model: Any, ids: list[list[int]], labels: list[int], train: bool) -> Iterator[tuple[int, Any]]:
    """Rows of like length side by side, nothing padded."""
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    model = pretrained.prepare_model(model, device.torch_device)
    fused_ops.apply_fused_setting(model, "auto", device.type)
    description = ClassifierDescription(tuple(map(str, range(max(labels) + 1))), "char-v1-r10")
    loss = ClassLoss(description, device)
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    while True:
        start = 0
        while start < len(order):
            stop, room = start, MICRO_TOKENS
            while stop < len(order) and len(ids[order[stop]]) <= room:
                room -= len(ids[order[stop]])
                stop += 1
            samples = [sample(ids, labels, number) for number in order[start:stop]]
            batch = collate_classification(samples, sum(one.num_inputs for one in samples), 0, 1024)
            rows = loss.pack_batch(batch, device.torch_device)
            told = loss(model, rows) / len(samples) if train else classifier.compute_class_logits(model, rows)
            yield len(samples), told
            start = stop


def sample(ids: list[list[int]], labels: list[int], number: int) -> SequenceSegment:
    """Return a row as the loader makes it."""
    import numpy as np

    return SequenceSegment(np.array(ids[number]), None, None, labels[number], number)


def main() -> None:
    """Compare classifying, then learning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=positive_int, default=512)
    parser.add_argument("--depth", type=positive_int, default=4)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--seconds", type=positive_number, default=10.0)
    parser.add_argument("--only", type=names_among(SIDES), default=list(SIDES), help=f"of {', '.join(SIDES)}")
    job = parser.parse_args()
    for train in (False, True):
        sides = {side: (work, (job.data, side, job.rows, job.depth, train)) for side in job.only}
        print(f"\n{'learning' if train else 'classifying'}, rows a second, depth {job.depth}", flush=True)
        table(alternate(sides, job.rounds, job.seconds, 2.0), "source")


if __name__ == "__main__":
    main()
