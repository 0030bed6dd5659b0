"""The folder that `model_folder` writes: complete, loaded by transformers alone, never half there."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from anabatic.config.export import ExportJob
from anabatic.core import paths
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.models import pretrained, weights_reader
from anabatic.recipes.export import merged_model, model_folder

IDS = [[5, 90, 33, 7, 120, 61]]
LOADING = f"""
import sys
sys.modules["anabatic"] = None  # importing it fails
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps({{
    "kind": type(model).__name__, "dtype": str(model.dtype), "ends": model.generation_config.eos_token_id,
    "top_p": model.generation_config.top_p, "logits": model.float()(torch.tensor({IDS})).logits.flatten().tolist(),
    "prompt": tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False),
}}))
"""


def content(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.process
def test_transformers_alone_loads_a_merged_adapter(write, lora, model, tokenizer):
    settings = content(model / "generation_config.json") | {"top_p": 0.8, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(settings))
    (model / "LICENSE").write_text("mine")
    out = write(model=str(lora), shard_gib=0.0001)
    done = subprocess.run([sys.executable, "-I", "-W", "error", "-c", LOADING, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["kind"], told["dtype"]) == ("Qwen3ForCausalLM", "torch.float32")
    assert told["ends"] == [0, 2] and told["top_p"] == 0.8
    assert told["prompt"] == tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    loaded = pretrained.load_model(lora, torch.device("cpu")).eval()
    loaded.set_attn_implementation("sdpa")
    ids = torch.tensor(IDS)
    expected = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.flatten().tolist()
    assert told["logits"] == pytest.approx(expected, abs=1e-4)
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size < 0.0001 * 2**30 + 20_000 for file in files)
    assert (out / "LICENSE").read_text() == "mine"
    assert {file.stat().st_mode & 0o777 for file in files} == {(out / "config.json").stat().st_mode & 0o777}


def test_older_programs_find_what_they_look_for(write):
    out = write(dtype="bf16")
    config, told = content(out / "config.json"), content(out / "tokenizer_config.json")
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert (config["rope_theta"], config["rope_scaling"]) == (10_000.0, None)
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert told["chat_template"] == (out / "chat_template.jinja").read_text()
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(out / "model.safetensors").values())


def test_older_names_of_other_models():
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    config = weights_reader.to_older_config({"rope_parameters": yarn})
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    two = {"rope_parameters": {"full_attention": yarn, "sliding_attention": yarn}}
    assert weights_reader.to_older_config(two) == two
    told = weights_reader.to_older_tokenizer(
        {"tokenizer_class": "Qwen2TokenizerFast", "extra_special_tokens": ["<|a|>"]}
    )
    assert told == {"tokenizer_class": "Qwen2TokenizerFast", "additional_special_tokens": ["<|a|>"]}


@pytest.mark.parametrize(("said", "ends"), [(None, [1, 2]), (7, [7, 1, 2]), ([2, 7], [2, 7, 1])])
def test_ends_of_answers_add_up(tmp_path, said, ends):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said, "pad_token_id": 0, "top_k": 5}))
    found = weights_reader.merge_generation_config(tmp_path, {"eos_token_id": [1, 2], "pad_token_id": 1})
    assert found == {"eos_token_id": ends, "pad_token_id": 0, "top_k": 5}


def test_a_folder_that_exists_is_kept_unless_it_is_to_be_replaced(write, model, tmp_path):
    out = write()
    before = (out / "model.safetensors").stat().st_ino
    with pytest.raises(ConfigError, match="exists already"):
        write()
    write(overwrite=True, dtype="fp16")
    assert (out / "model.safetensors").stat().st_ino != before
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("dear")
    with pytest.raises(ConfigError, match="no folder of a model"):
        write(overwrite=True)
    assert (out / "thesis.txt").read_text() == "dear"
    with pytest.raises(ConfigError, match="which is read"):
        write(out=str(model), overwrite=True)
    assert pretrained.load_config(model)


def test_a_disk_that_is_too_small_is_told_before_a_weight_is_read(write, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(paths.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    monkeypatch.setattr(merged_model.MergedModel, "load_merged_model", lambda *_: pytest.fail("it was read"))
    with pytest.raises(Failure, match=r"out needs .* MiB, but 1.0 MiB are free"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_an_export_that_fails(write, tmp_path, monkeypatch):
    monkeypatch.setattr(
        model_folder.serving_configs,
        "write_serving_configs",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")),
    )
    with pytest.raises(Failure):
        write()
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_the_format_cannot_hold_are_found(write, model, tmp_path):
    from safetensors.torch import save_file

    copy = tmp_path / "large"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = 1e6
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lm_head.weight holds numbers that are not finite in float16"):
        write(model=str(copy), dtype="fp16")
    write(model=str(copy), dtype="bf16")


def test_what_is_no_model_is_told_apart(write, tmp_path):
    checkpoint, classifier = tmp_path / "checkpoint-5", tmp_path / "classifier"
    for folder, name in ((checkpoint, "manifest.json"), (classifier, "classifier.json"), (classifier, "config.json")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match="is a checkpoint") as caught:
        write(model=str(checkpoint))
    assert "anabatic checkpoint export" in caught.value.hint
    with pytest.raises(ConfigError, match="its head is ours"):
        write(model=str(classifier))
    with pytest.raises(DataError, match="does not exist"):
        write(model=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "wrong",
    [{"shard_gib": 0}, {"devices": 0}, {"name": "a b"}, {"context": 1}, {"recipes": ["vllm", "vllm"]},
     {"llama_cpp": "x"}, {"out": " "}, {"model": ""}, {"shard_gib": float("nan")}],
)  # fmt: skip
def test_wrong_settings(wrong):
    with pytest.raises(ConfigError):
        ExportJob(**{"model": "m", "out": "o", **wrong})


def test_what_was_written_is_told(write, lora, caplog):
    with caplog.at_level(logging.INFO, logger="anabatic"):
        write(model=str(lora))
    assert "1 adapter merged" in caplog.text and "Modelfile, chat_template.jinja, config.json" in caplog.text
