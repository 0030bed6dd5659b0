"""`anabatic plan` with damaged descriptions of models, of every family that it knows: the whole command."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.cli.plan import plan
from anabatic.config.loading import yaml_reader
from fuzz.engine import Good
from fuzz.reading import Reader

_LAYERS = 4
_FULL_LINEAR = ["full_attention", "linear_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "qwen2.5-7b": {"sliding_window": 131072, "max_window_layers": 28, "layer_types": ["full_attention"] * _LAYERS},
    "qwen3-235b-a22b": {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen3-next-80b-a3b": {"mlp_only_layers": []},
    "qwen3.5-9b": {"layer_types": _FULL_LINEAR * (_LAYERS // 2), "mtp_num_hidden_layers": 1},
    "qwen3.5-35b-a3b": {},
    "deepseek-v2-lite": {"q_lora_rank": None, "moe_layer_freq": 1},
    "deepseek-v3": {"attention_bias": False},
    "deepseek-v3.2": {"max_position_embeddings": 163840},
    "kimi-linear-48b-a3b": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "glm-4.5-air": {"partial_rotary_factor": 0.5},
    "glm-5": {"indexer_types": ["full", "full", "shared", "full"]},
    "gpt-oss-20b": {"layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2)},
}
"""Public models of each family, cut to a few blocks, and keys that its other models have."""
OPTIONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"npus": "8"}, ()),
    ({"npus": "8", "sweep": True}, ("--tuner", "lora", "--quantize", "nf4", "--parallel.strategy", "ddp")),
    ({"npus": "8"}, ("--parallel.context=2", "--parallel.strategy", "zero3", "--recompute", "selective")),
    ({"npus": "8"}, ("--parallel.tensor=2", "--tuner", "freeze", "--freeze.last-layers", "1")),
    ({"scale": "2"}, ("--optim.name", "muon")),
)
_DIVIDING = ("--parallel.context=2", "--parallel.tensor=2")
ODD_VALUES = (0, -1, 1, 10**9, 10**9 + 1, 2**63, 10**40, 1.5, 1e308, True, "7", None, [], {}, [8], {"a": 1})
"""Values put in place of every key, one after another."""


@cache
def _public_models() -> dict[str, Any]:
    file = resources.files("anabatic.plan") / "models.yaml"
    return yaml_reader.read_yaml(str(file)).tree


def get_config(name: str) -> dict[str, Any]:
    """Return a description of a few blocks of a public model."""
    config = {**_public_models()[name], "num_hidden_layers": _LAYERS, **MODELS[name]}
    if "linear_attn_config" in config:
        config["linear_attn_config"] = {**config["linear_attn_config"], "full_attn_layers": [4]}
    return config


def descriptions() -> Sequence[Good]:
    """A folder with a config.json for each family."""
    return [Good(f"{name}/config.json", json.dumps(get_config(name)).encode(), "json") for name in MODELS]


def make_plan(path: Path) -> None:
    """Plan a job on the model as JSON and as a table, with options that follow from the file's content."""
    options, words = OPTIONS[zlib.crc32(path.read_bytes()) % len(OPTIONS)]
    if not _is_divisible(path.parent.name):
        words = tuple(word for word in words if word not in _DIVIDING)
    plan_with(path.parent, options, words)


def _is_divisible(name: str) -> bool:
    """Return whether context and tensor ranks may divide the attention of a family: plain queries, keys and values."""
    return not {"kv_lora_rank", "linear_num_value_heads"} & get_config(name).keys()


def plan_with(folder: Path, options: dict[str, Any], words: Sequence[str]) -> None:
    """Plan `sft` on a model."""
    job = ("sft", "--model", str(folder), "--data", "rows.jsonl", "--batch.seq-len", "1024")
    for as_json in (True, False):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = plan(*job, *words, json=as_json, **options)
        if as_json and (code == 0 or "scale" not in options):  # a job that fits nowhere has no table
            json.loads(out.getvalue(), parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} in the JSON of a plan")


def change_every_key(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the description with one key missing, and with each of `ODD_VALUES` in its place."""
    for key in config:
        yield f"no {key}", {name: value for name, value in config.items() if name != key}
        for value in ODD_VALUES:
            yield f"{key} {value!r:.40}", {**config, key: value}


READERS = [Reader("plans of models", descriptions, make_plan, 120)]
