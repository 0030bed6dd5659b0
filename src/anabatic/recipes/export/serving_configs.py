"""Recipes for other servers, beside the weights: what a person would otherwise put together from three manuals.

Sources: docs.ollama.com/modelfile; the pages "Quick Start" and "Installation" of docs.vllm.ai/projects/ascend; "Service
Parameter Configuration" of the MindIE LLM manual (hiascend.com, MindIE 2.3). None of the servers was run here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from anabatic.core.errors import ConfigError
from anabatic.data.chat import ollama_template
from anabatic.infer import tool_call_parser

OLLAMA_MAX_CONTEXT = 8192
"""Ollama takes memory for the whole context at once."""
DEFAULT_MAX_CONTEXT = 32_768
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OLLAMA_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""A generation setting -> Ollama's name of it."""
OLLAMA_ARCHITECTURES = (
    "Llama",
    "Mixtral",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "Qwen2",
    "Olmo3",
    "Cohere",
    "GptOss",
    "Lfm2",
)
"""Architectures (`...ForCausalLM`) that Ollama reads as safetensors (ollama, convert/convert.go, at 01cf7445)."""
_MIN_PREFILL_TOKENS = 8192
_CACHE_BLOCK_SIZE = 128


@dataclass(frozen=True)
class ExportInfo:
    """What recipes are made of.

    Attributes:
        out: where the folder will lie.
        name: it is served under.
        dtype: bf16, fp16 or fp32.
        gguf: name of the GGUF file; None: there is none.
        devices: it is divided over.
        context: longest, in tokens.
        generation: content of generation_config.json.
    """

    out: Path
    name: str
    dtype: str
    config: PretrainedConfig
    tokenizer: Any
    generation: dict[str, Any]
    gguf: str | None
    devices: int
    context: int


def safe_model_name(out: Path) -> str:
    """Return the last part of a path with only the signs that every server takes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", out.resolve().name).strip("-.") or "model"


def resolve_context_length(config: PretrainedConfig, requested: int | None) -> int:
    """Return the longest context of the recipes.

    Raises:
        ConfigError: the model has a shorter one.
    """
    longest = int(config.get_text_config().max_position_embeddings)
    if requested is not None and requested > longest:
        raise ConfigError(
            f"context is {requested}, the model was made for {longest}", f"use --context {longest} or less"
        )
    return requested or min(longest, DEFAULT_MAX_CONTEXT)


def require_divisible_heads(config: PretrainedConfig, devices: int) -> None:
    """Make sure that a model's heads can be dealt to so many devices.

    Raises:
        ConfigError: they cannot.
    """
    heads = config.get_text_config().num_attention_heads
    if heads % devices:
        fitting = ", ".join(str(one) for one in range(1, heads + 1) if heads % one == 0)
        raise ConfigError(f"devices is {devices}, and the model has {heads} heads", f"use one of {fitting}")


def write_serving_configs(folder: Path, names: list[str], export_info: ExportInfo) -> list[str]:
    """Write the recipes of the servers `names` into a folder; return what the user should know of them."""
    notes = []
    for name in names:
        path, text, note = _RENDERERS[name](export_info)
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            (folder / path).chmod(0o755)
        if note:
            notes.append(f"{path}: {note}")
    return notes


def _render_ollama_modelfile(export_info: ExportInfo) -> tuple[str, str, str]:
    turns, reason = ollama_template.translate_chat_template(export_info.tokenizer)
    lines = [f"# ollama create {export_info.name} -f Modelfile && ollama run {export_info.name}"]
    notes = [f"without TEMPLATE: {reason}"] if turns is None and export_info.tokenizer.chat_template else []
    kind = str((export_info.config.architectures or [export_info.config.model_type])[0]).removesuffix("ForCausalLM")
    if export_info.gguf is None and kind not in OLLAMA_ARCHITECTURES:
        notes.append(f"Ollama reads {kind} from a GGUF file only, export with --gguf")
        lines.append(f"# {notes[-1]}.")
    lines.append(f"FROM ./{export_info.gguf}" if export_info.gguf else "FROM .")
    if turns is None:
        lines.append(f"# No TEMPLATE: {reason}.")
        lines.append("# Take that of the model's family: ollama show --template MODEL")
    else:
        lines.append("# The model's own template for conversations; tools are not part of it.")
        if turns.trims_whitespace:
            lines.append("# The model's own cuts blanks at the ends of turns away; this one leaves them.")
        lines.append(f'TEMPLATE """{turns.to_go_template()}"""')
    lines += [f"PARAMETER stop {json.dumps(text)}" for text in _stop_tokens(export_info)]
    sampled = export_info.generation.get("do_sample") is not False
    for key, name in _OLLAMA_PARAMETERS.items():
        value = export_info.generation.get(key)
        if sampled and isinstance(value, int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {name} {value:g}")
    lines.append(f"PARAMETER num_ctx {min(export_info.context, OLLAMA_MAX_CONTEXT)}")
    return "Modelfile", "\n".join(lines) + "\n", "; ".join(notes)


def _stop_tokens(export_info: ExportInfo) -> list[str]:
    """Return the tokens that end an answer, as text."""
    ends = export_info.generation.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    texts = export_info.tokenizer.convert_ids_to_tokens(ids)
    return [text for text in texts if text and text.isascii() and text.isprintable()]


_VLLM_TEMPLATE = """\
#!/usr/bin/env bash
# {name} on Ascend, by vLLM with its plugin vllm-ascend: OpenAI's API at http://127.0.0.1:8000/v1
# Which devices: ASCEND_RT_VISIBLE_DEVICES. Further options are passed on: {file} --port 8001
set -e
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")/.." && pwd)"
for variables in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -r "$variables" ]; then source "$variables"; fi
done
exec {command} "$@"
"""


def _render_vllm_script(export_info: ExportInfo) -> tuple[str, str, str]:
    file = "serving/vllm-ascend.sh"
    options = {
        "--served-model-name": export_info.name,
        "--dtype": VLLM_DTYPES[export_info.dtype],
        "--max-model-len": export_info.context,
        "--tensor-parallel-size": export_info.devices,
        "--host": "127.0.0.1",
    }
    words = [word for key, value in options.items() for word in (key, shlex.quote(str(value)))]
    kind = tool_call_parser.detect_style(export_info.tokenizer)
    if kind is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", tool_call_parser.VLLM_PARSERS[kind]]
    command = " \\\n    ".join(['vllm serve "$here"', " ".join(words[:6]), " ".join(words[6:])])
    note = (
        ""
        if export_info.dtype != "fp32"
        else "fp32 is slow there: --dtype bf16 (fp16 on 310P and 910A) is what devices are for"
    )
    return file, _VLLM_TEMPLATE.format(name=export_info.name, file=file, command=command), note


def _render_mindie_config(export_info: ExportInfo) -> tuple[str, str, str]:
    max_input_tokens = max(1, export_info.context - export_info.context // 4)
    content = {
        "Version": "1.0.0",
        "ServerConfig": {
            "ipAddress": "127.0.0.1",
            "managementIpAddress": "127.0.0.2",
            "port": 1025,
            "managementPort": 1026,
            "metricsPort": 1027,
            "allowAllZeroIpListening": False,
            "maxLinkNum": 1000,
            "httpsEnabled": False,
            "interCommTLSEnabled": False,
        },
        "BackendConfig": {
            "backendName": "mindieservice_llm_engine",
            "modelInstanceNumber": 1,
            "npuDeviceIds": [list(range(export_info.devices))],
            "tokenizerProcessNumber": 8,
            "multiNodesInferEnabled": False,
            "interNodeTLSEnabled": False,
            "ModelDeployConfig": {
                "maxSeqLen": export_info.context,
                "maxInputTokenLen": max_input_tokens,
                "truncation": False,
                "ModelConfig": [
                    {
                        "modelInstanceType": "Standard",
                        "modelName": export_info.name,
                        "modelWeightPath": str(export_info.out.resolve()),
                        "worldSize": export_info.devices,
                        "cpuMemSize": 5,
                        "npuMemSize": -1,
                        "backendType": "atb",
                        "trustRemoteCode": False,
                    }
                ],
            },
            "ScheduleConfig": {
                "templateType": "Standard",
                "templateName": "Standard_LLM",
                "cacheBlockSize": _CACHE_BLOCK_SIZE,
                "maxPrefillBatchSize": 50,
                "maxPrefillTokens": max(_MIN_PREFILL_TOKENS, max_input_tokens),
                "maxBatchSize": 200,
                "maxIterTimes": max(1, export_info.context - 1),
            },
        },
    }
    note = (
        "fp32 is not known there: export with --dtype bf16, or fp16 on 310P and 910A"
        if export_info.dtype == "fp32"
        else ""
    )
    return "serving/mindie-config.json", json.dumps(content, indent=2) + "\n", note


_RENDERERS: dict[str, Callable[[ExportInfo], tuple[str, str, str]]] = {
    "ollama": _render_ollama_modelfile,
    "vllm": _render_vllm_script,
    "mindie": _render_mindie_config,
}
