"""Recipes for other servers: what they say is what the model is."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from anabatic.core.errors import ConfigError
from anabatic.data.chat import ollama_template

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are Q.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %}{{ m.content }} </s>{% endif %}{% endfor %}"
)
TURNS = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]


def parsed(parts, at=0):
    """Nodes of a template of Go's: just as much of the language as we write."""
    nodes = []
    while at < len(parts):
        word = parts[at]
        if at % 2 == 0 or word == ".Content":
            nodes.append(("text", word) if at % 2 == 0 else ("content", ""))
        elif word == "range .Messages":
            body, at = parsed(parts, at + 1)
            nodes.append(("range", body))
        elif word.startswith("if "):
            arms = []
            while parts[at] != "end":
                condition = parts[at]
                body, at = parsed(parts, at + 1)
                arms.append((condition, body))
            nodes.append(("if", arms))
        else:
            return nodes, at  # end, or the next arm
        at += 1
    return nodes, at


def holds(condition, messages, message):
    if condition in ("else", "if .Messages"):
        return condition == "else" or bool(messages)
    role = re.fullmatch(r'(?:else )?if eq (\.Role|\(index \.Messages 0\)\.Role) "(\w+)"', condition)
    return (message if role[1] == ".Role" else messages[0])["role"] == role[2]


def filled(nodes, messages, message=None):
    out = ""
    for kind, what in nodes:
        if kind in ("text", "content"):
            out += message["content"] if kind == "content" else what
        elif kind == "range":
            out += "".join(filled(what, messages, one) for one in messages)
        else:
            bodies = (body for condition, body in what if holds(condition, messages, message))
            out += filled(next(bodies, []), messages, message)
    return out


def go(template, messages):
    """What Go makes of a template."""
    return filled(parsed(re.split(r"\{\{ (.*?) \}\}", template))[0], messages)


@pytest.mark.parametrize("template", ["own", CHATML, LLAMA2])
def test_a_translated_template_says_what_the_model_s_own_says(tokenizer, monkeypatch, template):
    if template != "own":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    turns, why = ollama_template.translate_chat_template(tokenizer)
    assert turns is not None, why
    talks = (
        [TURNS[:1], TURNS, TURNS * 2 + TURNS[:1]]
        if template == LLAMA2
        else [TURNS[:1], TURNS, [{"role": "system", "content": "s"}, *TURNS]]
    )
    talks = [talk for talk in talks if all(a["role"] != b["role"] for a, b in zip(talk, talk[1:], strict=False))]
    for talk in talks:
        own = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert go(turns.to_go_template(), talk) == turns.render_conversation(talk) == own
    assert turns.trims_whitespace == (template != CHATML)
    assert (turns.start_system is None) == (template == LLAMA2)


DIFFERENT = {
    "the thoughts": CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
    "the date": CHATML + "{# strftime_now #}",
    "signs": CHATML.replace("You are Q.", '"""'),
    "every turn once": "{{ messages[-1].content }}",
    "refuses": "{{ raise_exception('no') }}",
    "otherwise": CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"),
    "longer conversation": CHATML.replace("{{ m.content }}", "{{ m.content | replace('<', '') }}"),
}


@pytest.mark.parametrize("about", DIFFERENT)
def test_a_template_that_does_more_is_told(tokenizer, monkeypatch, write, model, about):
    monkeypatch.setattr(tokenizer, "chat_template", DIFFERENT[about])
    turns, why = ollama_template.translate_chat_template(tokenizer)
    assert turns is None and (about in why or about == "the thoughts" and "thoughts" in why)


def test_a_token_that_begins_every_text_is_left_to_the_reader(tokenizer, monkeypatch):
    class Begins:
        """A tokenizer that begins every text with token 0."""

        chat_template = CHATML

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [0] * add_special_tokens + tokenizer(text, add_special_tokens=False)["input_ids"]}

        def decode(self, ids):
            return tokenizer.decode(ids)

        def apply_chat_template(self, messages, **how):
            monkeypatch.setattr(tokenizer, "chat_template", self.chat_template)
            return tokenizer.apply_chat_template(messages, **how)

    begins = Begins()
    turns, why = ollama_template.translate_chat_template(begins)
    assert turns is None and "begins every text with <|endoftext|>" in why
    begins.chat_template = "<|endoftext|>" + CHATML
    turns, _ = ollama_template.translate_chat_template(begins)
    assert turns is not None and turns.start == "<|im_start|>system\nYou are Q.<|im_end|>\n<|im_start|>user\n"


def test_modelfile(write, model, caplog):
    settings = {"eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(settings))
    text = (write(context=64) / "Modelfile").read_text()
    for line in ("FROM .", 'PARAMETER stop "<|im_end|>"', "PARAMETER temperature 0.6", "PARAMETER repeat_penalty 1.05"):
        assert f"\n{line}\n" in text
    assert "Ollama reads Qwen3 from a GGUF file only" in text and "export with --gguf" in caplog.text
    assert "PARAMETER num_ctx 64" in text and 'TEMPLATE """{{ if .Messages }}' in text


@pytest.mark.process
def test_the_command_of_vllm_runs_with_the_folder_wherever_it_lies(write, tmp_path):
    out = write(devices=2, dtype="fp16", name="my.model")
    moved = tmp_path / "else where"
    out.rename(moved)
    tool = tmp_path / "bin"
    tool.mkdir()
    (tool / "vllm").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tool / "vllm").chmod(0o755)
    done = subprocess.run(
        [moved / "serving" / "vllm-ascend.sh", "--port", "8001"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{tool}:{os.environ['PATH']}"},
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["serve", str(moved)] and words[-2:] == ["--port", "8001"]
    options = dict(zip(words[2:-3:2], words[3:-3:2], strict=False))
    assert options["--served-model-name"] == "my.model" and options["--dtype"] == "float16"
    assert options["--tensor-parallel-size"] == "2" and options["--max-model-len"] == "256"
    assert "hermes" in words


def test_mindie(write, tmp_path, caplog):
    out = write(devices=4, recipes=["mindie"])
    backend = json.loads((out / "serving" / "mindie-config.json").read_text())["BackendConfig"]
    deploy = backend["ModelDeployConfig"]
    (one,) = deploy["ModelConfig"]
    assert backend["npuDeviceIds"] == [[0, 1, 2, 3]] and one["worldSize"] == 4
    assert one["modelWeightPath"] == str(tmp_path / "out") and one["modelName"] == "out"
    assert deploy["maxInputTokenLen"] < deploy["maxSeqLen"] == 256
    assert backend["ScheduleConfig"]["maxPrefillTokens"] >= deploy["maxInputTokenLen"]
    assert not (out / "Modelfile").exists()
    assert "mindie-config.json: fp32 is not known there" in caplog.text


def test_what_the_model_cannot_is_refused(write):
    with pytest.raises(ConfigError, match="the model has 4 heads") as caught:
        write(devices=3)
    assert "1, 2, 4" in caught.value.hint
    with pytest.raises(ConfigError, match="context is 512, the model was made for 256"):
        write(context=512)
