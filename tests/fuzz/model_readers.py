"""Readers of models: descriptions, headings of weights, adapters, tokenizers, chat templates, tokenised data."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

from anabatic.config.sections.common import Data
from anabatic.core.errors import DataError
from anabatic.data.shards import dataset_cache
from anabatic.data.shards.reader import ShardSet
from anabatic.data.tokenizer import hf_folder
from anabatic.models import pretrained, weight_files, weights_reader
from anabatic.models.lora import adapter_config
from anabatic.plan import model_shape
from anabatic.recipes.export import gguf_converter
from fuzz.engine import Good
from fuzz.reading import Reader
from fuzz.rows_readers import ROWS

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": [0, 1], "bos_token_id": 0, "torch_dtype": "bfloat16", "use_cache": True,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "Qwen/Qwen2.5-0.5B", "task_type": "CAUSAL_LM", "modules_to_save": None,
    "rank_pattern": {}, "use_rslora": False, "init_lora_weights": True,
}  # fmt: skip
TENSORS = ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight")


def safetensors(names: tuple[str, ...] = TENSORS) -> bytes:
    """A file of small tensors (github.com/huggingface/safetensors: eight bytes of length, JSON, numbers)."""
    heading: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for at, name in enumerate(names):
        heading[name] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * at, 24 * (at + 1)]}
    text = json.dumps(heading).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"\0" * (24 * len(names))


def gguf_file() -> bytes:
    """A heading with values of every kind, and a tensor (ggml's docs/gguf.md)."""

    def text(word: bytes) -> bytes:
        return struct.pack("<Q", len(word)) + word

    values = [
        (b"general.architecture", struct.pack("<I", 8) + text(b"qwen2")),
        (b"general.alignment", struct.pack("<II", 4, 32)),
        (b"tokens", struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"b") + text(b"c")),
        (b"scores", struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 0, 1, 2)),
        (b"nested", struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)),
    ]
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values))
    data += b"".join(text(name) + value for name, value in values)
    data += text(b"blk.0.weight") + struct.pack("<IQQIQ", 2, 32, 2, 0, 0)
    return data + b"\0" * (-len(data) % 32) + b"\0" * 256


def _weights(path: Path) -> None:
    with weight_files.open_weights(path.parent) as found:
        for name in found.names:
            found.get_shape(name)


def _index() -> list[Good]:
    mapped = {"weight_map": {name: "model-1.safetensors" for name in TENSORS}, "metadata": {"total_size": 72}}
    return [
        Good("model.safetensors.index.json", json.dumps(mapped).encode(), "json"),
        Good("model-1.safetensors", safetensors()),
    ]


def _gguf(path: Path) -> None:
    gguf_converter.find_gguf_fault(path)


def _adapter(path: Path) -> None:
    folder = path.parent.parent / "adapter"
    config = adapter_config.read_adapter_config(folder)
    adapter_config.parse_lora_settings(config, folder)
    adapter_config.list_adapted_layers(folder)
    pretrained.resolve_base_folder(path.parent.parent / "base")


def _adapters() -> list[Good]:
    names = tuple(f"base_model.model.model.layers.0.q_proj.lora_{side}.weight" for side in "AB")
    return [
        Good("adapter/adapter_config.json", json.dumps(ADAPTER).encode(), "json"),
        Good("adapter/adapter_model.safetensors", safetensors(names)),
        Good("base/config.json", json.dumps(CONFIG).encode()),
    ]


def shape(path: Path) -> None:
    """The sizes that `plan` reads."""
    model_shape.get_named_shape(str(path.parent))


def _config(path: Path) -> None:
    pretrained.load_config(path.parent)


@cache
def tokenizer_files() -> list[Good]:
    """A small tokenizer of a few merges, its configuration and its chat template."""
    import tempfile

    from anabatic_testing.random_models import build_byte_tokenizer

    with tempfile.TemporaryDirectory() as name:
        build_byte_tokenizer(Path(name))
        files = {one.name: one.read_bytes() for one in Path(name).iterdir()}
    return [Good(name, data, "json" if name.endswith(".json") else "") for name, data in sorted(files.items())]


def _tokenizer(path: Path) -> None:
    hf_folder.load_fast_tokenizer(path.parent).encode("The quick 12")
    found = hf_folder.load_tokenizer(path.parent)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    hf_folder.render_chat(found, talk, answer=True)
    hf_folder.get_turn_end_id(found)


def _template(path: Path) -> None:
    for row in ROWS[1:]:
        found = hf_folder.load_tokenizer(path.parent)
        turns = row.get("messages")
        if isinstance(turns, list):
            hf_folder.render_chat(found, turns, row.get("tools"))


def _templates() -> list[Good]:
    """The damaged file comes first: only the template is drawn."""
    return [one for one in tokenizer_files() if one.name.endswith(".jinja")] or list(tokenizer_files())


@cache
def shard_files() -> list[Good]:
    """Tokenised texts as `build` writes them."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for one in tokenizer_files():
            (folder / one.name).write_bytes(one.data)
        (folder / "a.jsonl").write_text('{"text": "one two three"}\n' * 20, encoding="utf-8")
        data = Data(train=[str(folder / "a.jsonl")], cache=str(folder / "cache"), valid_fraction=0.1)
        found = dataset_cache.build_dataset(data.train[0], folder, data, "train")
        files = {one.name: one.read_bytes() for one in sorted(found.path.iterdir())}
        found.close()
    return [Good(f"set/{name}", data, "json" if name.endswith(".json") else "") for name, data in files.items()]


def shard_set(path: Path) -> None:
    """Read every entry of tokenised data."""
    found = ShardSet.open(path.parent)
    try:
        for at in range(min(found.num_docs, 30)):
            found.read_entry(at)
            found.count_entry_bytes(at)
        found.read_entry_lengths(0)
    finally:
        found.close()


def _older(path: Path) -> None:
    weights_reader.write_older_names(path.parent)


READERS = [
    Reader("shapes of models", lambda: [Good("m/config.json", json.dumps(CONFIG).encode(), "json")], shape, 300),
    Reader("config.json", lambda: [Good("m/config.json", json.dumps(CONFIG).encode(), "json")], _config, 150),
    Reader("safetensors", lambda: [Good("model.safetensors", safetensors())], _weights, 300),
    Reader("sharded weights", _index, _weights, 200),
    Reader("gguf", lambda: [Good("a.gguf", gguf_file())], _gguf, 500),
    Reader("adapters", _adapters, _adapter, 200),
    Reader("tokenizers", tokenizer_files, _tokenizer, 60),
    Reader("shards", shard_files, shard_set, 250),
]
assert DataError
