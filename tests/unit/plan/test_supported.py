"""Models that are no decoders of text are refused by the structure of their config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import DataError
from anabatic.plan.model_shape import (
    get_named_shape,
    require_supported_folder,
    require_supported_job,
    require_text_decoder,
)

_TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99, "intermediate_size": 9}
# As published: architectures, model_type and the names of what reads pictures or sound.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen2-VL": (
        {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 32}},
        "vision_config",
    ),
    "Qwen2.5-Omni": (
        {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": {"text_config": _TEXT}},
        "thinker_config",
    ),
    "Qwen2-Audio": (
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {"d_model": 1280}, "text_config": {}},
        "audio_config",
    ),
    "Qwen-VL": ({"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "visual": {"width": 1664}}, "visual"),
    "Llava 1.0": ({"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "openai/clip"}, "mm_vision_tower"),
    "InternVL": (
        {"architectures": ["InternVLChatModel"], "vision_config": {"a": 1}, "llm_config": _TEXT},
        "vision_config",
    ),
    "Florence-2": (
        {
            "architectures": ["BartForConditionalGeneration"], "vision_config": {"a": 1},
            "text_config": {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True},
        },
        "encoder with a decoder",
    ),
    "Phi-3-vision": ({"architectures": ["Phi3VForCausalLM"], "img_processor": {"name": "clip"}}, "img_processor"),
    "T5": ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder with a decoder"),
    "BERT": ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "is an encoder"),
    "ModernBERT": ({"architectures": ["ModernBertModel"], "model_type": "modernbert"}, "is an encoder"),
    "a new encoder": ({"architectures": ["NewForMaskedLM"], "model_type": "new"}, "is an encoder"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_in_a_folder_and_below_an_adapter(case: str, tmp_path: Path) -> None:
    config, told = REFUSED[case]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    for refuse in (
        lambda: require_supported_folder(base),
        lambda: require_supported_folder(adapter),
        lambda: require_supported_job({"model": str(base)}),
        lambda: require_supported_job({"model": {"path": str(base)}}),
        lambda: get_named_shape(str(base)),
    ):
        with pytest.raises(DataError, match=told) as error:
            refuse()
        assert "not supported" in str(error.value) and config["architectures"][0] in str(error.value)
        assert "ForCausalLM" in error.value.hint


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"architectures": ["Qwen2ForCausalLM"], "vision_start_token_id": 151652, "image_token_id": 151655},
        {
            "image_token_id": 7,
            "downsample_ratio": 0.5,
            "vision_config": {"image_size": [448, 448]},
            "text_config": _TEXT,
        },
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"a": 1}, "text_config": _TEXT},
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vision_config": None},
        {"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": True},
        {"architectures": ["LlamaModel"], "model_type": "llama", "is_encoder_decoder": False},
        {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"},
        {"model_type": "llama", "architectures": None},
        {},
    ],
)
def test_decoders_of_text_pass(config: dict[str, Any]) -> None:
    before = dict(config)
    require_text_decoder(config, "config.json")
    assert config == before, "checking changed the description"


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"])
@pytest.mark.parametrize("size", [0, -1, 10**30])
def test_sizes_that_are_none_are_refused(key: str, size: int) -> None:
    with pytest.raises(DataError, match=f"config.json: {key} is "):
        require_text_decoder({"model_type": "qwen3", "hidden_size": 64, "head_dim": None, key: size}, "config.json")


def test_what_cannot_be_read_is_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    require_supported_folder(tmp_path)
    require_supported_job({"model": "owner/name"})
    require_supported_job({"model": None})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(DataError, match="an encoder"):  # the same folder, once it can be read
        require_supported_folder(tmp_path)


COMMANDS = (
    *(f"{name} --data.train x.jsonl" for name in ("sft", "dpo", "rl", "plan -- sft")),
    *("eval --tasks task:all", "infer --inputs x.jsonl", "serve", "chat"),
)


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED["InternVL"][0]))
    words = [*command.split(), "--model", str(tmp_path)]
    if command != "serve" and command != "chat":
        words += ["--out", str(tmp_path / "out")]
    code = (
        "import sys\nfrom anabatic.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "InternVLChatModel reads pictures, video or sound (vision_config)" in done.stderr
    assert done.stdout.strip() == "False"


def test_no_training_is_planned_on_a_chip_for_inference_and_both_sizes_of_the_910b4_are_known() -> None:
    from anabatic.config.sections.common import Data
    from anabatic.config.sft import SftJob
    from anabatic.core.errors import ConfigError
    from anabatic.recipes import plan_command

    job = SftJob(model="Qwen/Qwen3-0.6B", data=Data(train=["rows.jsonl"]))
    with pytest.raises(ConfigError, match="Ascend310P3 is made for inference") as error:
        plan_command.estimate_job(job, plan_command.find_machine(job, "310P3", 1, 1))
    assert "910B4" in error.value.hint
    sizes = {chip: plan_command.find_chip(chip).memory_gib for chip in ("910B4", "910B4-1")}
    assert sizes == {"910B4": 32, "910B4-1": 64}
