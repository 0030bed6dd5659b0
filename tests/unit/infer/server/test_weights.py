"""New weights over HTTP: what is loaded answers, what is refused changes nothing."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabatic.config.serve import ServeJob
from anabatic.core.errors import ConfigError
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.infer.server.weight_loading import describe_tensor
from anabatic.models.pretrained import save_model
from anabatic.recipes.serve import run
from anabatic_testing.random_models import build_random_model
from unit.infer.server.running import KEY, catalogue_of, serving
from unit.infer.test_adapters import adapted

PROMPT = list(range(40, 80))
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tokenizer, tmp_path_factory):
    """A folder with the weights of another seed in `new`, and what is damaged beside it; `elsewhere` is outside."""
    top = tmp_path_factory.mktemp("weights")
    new, good = top / "root" / "new", build_random_model(len(tokenizer), seed=3)
    save_model(good, new, tokenizer)
    save_model(good, top / "elsewhere", tokenizer)
    for name in ("torn", "nan", "shape", "theta", "family", "linked-file", "no-weights", "no-json"):
        shutil.copytree(new, top / "root" / name)
    weights = load_file(new / "model.safetensors")
    some = "model.layers.0.mlp.up_proj.weight"
    file = {name.name: name / "model.safetensors" for name in (top / "root").iterdir()}
    file["torn"].write_bytes(file["torn"].read_bytes()[:-100])
    save_file({**weights, some: torch.full_like(weights[some], torch.nan)}, file["nan"], {"format": "pt"})
    save_file({**weights, some: weights[some][:-1].contiguous()}, file["shape"], {"format": "pt"})
    file["no-weights"].unlink()
    (top / "root" / "no-json" / "config.json").write_text("{")
    for name, change in (("theta", {"rms_norm_eps": 0.5}), ("family", {"model_type": "mistral"})):
        config = top / "root" / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    file["linked-file"].unlink()
    file["linked-file"].symlink_to(top / "elsewhere" / "model.safetensors")
    (top / "root" / "linked").symlink_to(top / "elsewhere")
    adapted(tokenizer, top / "root" / "adapter", 1)
    return top / "root"


@pytest.fixture
def here(tokenizer, root):
    model = build_random_model(len(tokenizer), seed=0)
    engine = Engine(model, tokenizer, max_batch=4, max_len=96)
    with (
        serving(catalogue_of({"m": (engine, model)}), keys=[KEY], weights_folder=root) as running,
        running.client(headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        running.ask = lambda path, body=None: client.post(path, json=body)
        yield running


def ids_of(here, **more):
    told = here.ask("/v1/completions", BODY | more).json()
    return told["choices"][0]["token_ids"]


def reload_body(path):
    return {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}


def test_new_weights_answer(here, tokenizer, root):
    old = ids_of(here)
    for _ in range(2):  # the beginning of the prompt is in the cache then
        assert ids_of(here) == old
    told = here.ask("/collective_rpc", reload_body(root / "new"))
    assert told.status_code == 200 and told.json() == {"results": [None]}
    fresh = Engine(build_random_model(len(tokenizer), seed=3), tokenizer, max_batch=1, max_len=96)
    [expected] = fresh.generate([PROMPT], GREEDY)
    assert ids_of(here) == expected.ids != old
    sums = here.ask("/weight_checker", {"action": "checksum"}).json()["checksums"]
    stored = load_file(root / "new" / "model.safetensors")
    assert sums.items() >= {name: describe_tensor(value, torch.float32) for name, value in stored.items()}.items()
    assert here.ask("/collective_rpc", reload_body("new")).status_code == 200, "paths start from the folder, too"


REFUSED = {
    "none": "cannot be read: No such file",
    "new/model.safetensors": "cannot be read: Not a directory",
    "../elsewhere": "is not below",
    "/": "is not below",
    "": "is not below",  # the folder itself, which holds links to elsewhere
    "linked": "is not below",
    "linked-file": "is not below",
    "a\0b": "cannot be read",
    "adapter": "config.json cannot be read",
    "torn": "is incomplete",
    "nan": "up_proj.weight holds values that are not finite",
    "shape": "up_proj.weight has shape",
    "theta": "config.json says rms_norm_eps 0.5, and the model that is served has",
    "family": "another model: config.json says",
    "no-weights": "lacks 1 of 1 weight files",
    "no-json": "cannot be read",
}


def test_what_is_refused_changes_nothing(here):
    before = ids_of(here)
    for name, said in REFUSED.items():
        told = here.ask("/collective_rpc", reload_body(name))
        assert told.status_code == 400 and said in told.json()["error"]["message"], (name, told.text)
        assert ids_of(here) == before, name


def test_bodies_that_are_wrong(here):
    for path, body in (
        ("/collective_rpc", {"kwargs": {"weights_path": "new"}}),
        ("/collective_rpc", {"method": "run_code", "kwargs": {"weights_path": "new"}}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": 3}}),
        ("/v1/load_lora_adapter", {"lora_name": "m", "lora_path": "adapter"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "new"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "../elsewhere"}),
        ("/weight_checker", {"action": "compare"}),
        ("/pause?mode=keep", None),
    ):
        assert here.ask(path, body).status_code == 400, path
    assert here.ask("/v1/unload_lora_adapter", {"lora_name": "m"}).status_code == 404


def test_adapters_come_and_go(here, tokenizer, root, tmp_path):
    base = ids_of(here)
    own = Engine(adapted(tokenizer, tmp_path / "same", 1), tokenizer, max_batch=1, max_len=96)
    [expected] = own.generate([PROMPT], GREEDY)
    body = {"lora_name": "policy-1", "lora_path": str(root / "adapter")}
    assert here.ask("/v1/load_lora_adapter", body).text == "Success: LoRA adapter 'policy-1' added successfully."
    assert here.ask("/v1/load_lora_adapter", body).status_code == 400
    assert here.ask("/v1/load_lora_adapter", body | {"load_inplace": True}).status_code == 200
    assert ids_of(here, model="policy-1") == expected.ids != base == ids_of(here)
    assert here.ask("/v1/unload_lora_adapter", {"lora_name": "policy-1"}).status_code == 200
    assert here.ask("/v1/completions", BODY | {"model": "policy-1"}).status_code == 404
    for number in range(16):
        assert here.ask("/v1/load_lora_adapter", body | {"lora_name": f"a{number}"}).status_code == 200
    told = here.ask("/v1/load_lora_adapter", body)
    assert told.status_code == 400 and "16 adapters are loaded" in told.text


def test_a_pause_ends_answers(here):
    engine = here.catalogue.engines[0]
    answers = []
    asked = threading.Thread(
        target=lambda: answers.append(here.ask("/v1/completions", BODY | {"max_tokens": 50, "logit_bias": {}}).json())
    )
    asked.start()
    while not engine.get_load().running and asked.is_alive():
        time.sleep(0.001)
    assert here.ask("/pause").json() == {"status": "paused"} and not engine.get_load().running
    asked.join(60)
    choice = answers[0]["choices"][0]
    assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    told = here.ask("/v1/completions", BODY)
    assert told.status_code == 503 and "paused until POST /resume" in told.text
    assert here.ask("/collective_rpc", reload_body("new")).status_code == 200
    assert here.ask("/resume").json() == {"status": "resumed"} and ids_of(here)
    assert here.ask("/reset_prefix_cache").json() == {"success": True} and not engine.get_load().idle


def test_keys_are_needed_and_paths_are_off_by_default(engine_parts, root, tmp_path, monkeypatch):
    monkeypatch.delenv("ANABATIC_API_KEYS", raising=False)
    catalogue = catalogue_of(engine_parts)
    with serving(catalogue) as running:
        assert running.post("/collective_rpc", reload_body(root / "new")).status_code == 404
    with serving(catalogue, keys=[KEY], weights_folder=root) as running:
        assert running.post("/collective_rpc", reload_body(root / "new")).status_code == 401
    with pytest.raises(ConfigError, match="there is no API key"):
        run(ServeJob(model=["m"], weights_folder=str(root)))
    monkeypatch.setenv("ANABATIC_API_KEYS", KEY)
    with pytest.raises(ConfigError, match="which is no folder"):
        run(ServeJob(model=["m"], weights_folder=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="quantize is int8"):
        ServeJob(model=["m"], weights_folder=str(root), quantize="int8")


def test_answers_in_tokens(here):
    whole = here.ask("/v1/completions", BODY).json()["choices"][0]
    assert whole["prompt_token_ids"] == PROMPT and whole["logprobs"]["top_logprobs"] is None
    lines = here.ask("/v1/completions", BODY | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if "{" in line]
    assert chunks[0]["prompt_token_ids"] == PROMPT and "prompt_token_ids" not in chunks[1]
    assert [one for chunk in chunks for one in chunk.get("token_ids", [])] == whole["token_ids"]
    short = here.ask("/v1/completions", BODY | {"stop_token_ids": whole["token_ids"][2:3]}).json()["choices"][0]
    place = whole["token_ids"].index(whole["token_ids"][2])
    assert short["token_ids"] == whole["token_ids"][: place + 1] and short["finish_reason"] == "stop"
    assert "token_ids" not in here.ask("/v1/completions", BODY | {"return_token_ids": False}).json()["choices"][0]
