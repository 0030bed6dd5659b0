"""Bits per byte against plain transformers, one document at a time; gzip against the gzip module."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from anabatic.config.sections.common import Data
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.shards import dataset_cache
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.evals.bits_per_byte import measure_bits_per_byte, measure_gzip_size
from anabatic.models.pretrained import load_model

TEXTS = ["The thing in the ring.", "naïve 你好 🙂", "x", "a longer one, which is cut: " + "he sang the anthem " * 12]


@pytest.fixture
def held_out(tmp_path):
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Data(train=[], valid=[str(tmp_path / "valid.jsonl")], cache=str(tmp_path / "cache"))


def build(data, model_folder, **options):
    return dataset_cache.build_dataset(data.valid[0], model_folder, data, "valid", **options)


def reference_nats(model_folder, seq_len):
    """Every document behind <|endoftext|>, in segments of `seq_len` inputs that see nothing before them."""
    tokenizer = tokenizers.load_tokenizer(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
    nats, targets = 0.0, 0
    for text in TEXTS:
        ids = [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 0]
        for start in range(0, len(ids) - 1, seq_len):
            piece = torch.tensor([ids[start : start + seq_len + 1]])
            with torch.no_grad():
                logits = model(piece[:, :-1]).logits[0]
            nats -= logits.log_softmax(-1).gather(1, piece[0, 1:, None]).sum().item()
            targets += piece.shape[1] - 1
    return nats, targets


@pytest.mark.parametrize("seq_len", [16, 256])
def test_bits_per_byte_is_plain_transformers_loss(run_folder, held_out, seq_len):
    folder = run_folder / "final_model"
    device = select_device(DeviceConfig(type="cpu", dtype="fp32", threads=1))
    batches = ValidationBatches([build(held_out, folder)], seq_len, 256, 10**9)
    result = measure_bits_per_byte(
        load_model(folder, device.torch_device), tokenizers.load_tokenizer(folder), batches, device
    )
    nats, targets = reference_nats(folder, seq_len)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (result.num_bytes, result.num_tokens) == (num_bytes, targets)
    assert result.model_bits == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    assert result.loss == pytest.approx(nats / targets, rel=1e-4)
    expected = len(gzip.compress("".join(TEXTS).encode(), 9, mtime=0))
    assert result.gzip9 == pytest.approx(8 * expected / num_bytes)
    assert set(result.as_json()) >= {"model", "gzip9", "bytes", "tokens"}


def test_gzip_gets_the_same_documents_as_the_model_when_tokens_are_limited(run_folder, held_out):
    folder = run_folder / "final_model"
    batches = ValidationBatches([build(held_out, folder)], 256, 256, 20)
    assert 0 < batches.num_bytes < sum(len(text.encode()) for text in TEXTS)
    chosen = [text for text in TEXTS if len(gzip.compress(text.encode(), 9, mtime=0))]
    sizes = {
        len(gzip.compress("".join(part).encode(), 9, mtime=0))
        for part in ([text for bit, text in enumerate(chosen) if mask >> bit & 1] for mask in range(1, 16))
        if sum(len(text.encode()) for text in part) == batches.num_bytes
    }
    assert measure_gzip_size(batches, tokenizers.load_tokenizer(folder)) in sizes


def test_a_conversation_counts_what_the_assistant_says(run_folder, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "the question"}, {"role": "assistant", "content": f"answer {n} é"}]}
        for n in range(3)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(valid=[str(tmp_path / "chat.jsonl")], cache=str(tmp_path / "cache"))
    folder = run_folder / "final_model"
    batches = ValidationBatches([build(data, folder)], 256, 256, 10**9)
    said = "".join(row["messages"][1]["content"] for row in rows).encode()
    assert measure_gzip_size(batches, tokenizers.load_tokenizer(folder)) == len(gzip.compress(said, 9, mtime=0))
