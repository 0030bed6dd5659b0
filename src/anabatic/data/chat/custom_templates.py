"""Chat templates that are given by name or as a file, in place of the tokenizer's own.

The named ones in `templates/` are written from the published layouts of the models' families. A template takes effect
as a folder: the tokenizer's files beside the template, in the cache, so that whatever reads a tokenizer's folder
(rows, engines, saved models) reads it. A template is tried on a short conversation first, with bounds on its time and
memory: jinja's sandbox, in which transformers renders, keeps templates from the machine, not from endless loops.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import get_cache_root, write_atomic
from anabatic.data.tokenizer import hf_folder
from anabatic.data.tokenizer import hf_folder as tokenizers

TEMPLATE_FILES = {
    "chatml": "chatml",
    "deepseek": "deepseek3",
    "deepseek3": "deepseek3",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "glm4": "glm4",
    "llama2": "llama2",
    "llama3": "llama3",
    "mistral": "mistral",
    "phi3": "phi3",
    "phi4": "phi4",
    "qwen": "qwen2.5",
    "qwen2": "qwen2.5",
    "qwen2.5": "qwen2.5",
    "qwen3": "qwen3",
}
"""Name -> file of `templates/`."""
MAX_TEMPLATE_BYTES = 1 << 20
"""Bytes of a template."""
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROBE_TEXTS = ("probe0question", "probe0answer")
_HINT = "give a file of Jinja as chat_template.jinja has it, or one of: " + ", ".join(TEMPLATE_FILES)
_CONTROL_TOKEN = re.compile(r"<[|｜][^\s<>]{1,60}[|｜]>|<(?:start|end)_of_turn>")


def read_template(given: str) -> str:
    """Return the text of a template.

    Args:
        given: a name, or a file; a name that is also a file's is taken as the name.

    Raises:
        ConfigError: there is no such name or file, or the file is no text.
    """
    if given.lower() in TEMPLATE_FILES:
        file = resources.files("anabatic.data") / "templates" / f"{TEMPLATE_FILES[given.lower()]}.jinja"
        return file.read_text(encoding="utf-8").removesuffix("\n")
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "chat_template.jinja"
    if not path.is_file():
        raise ConfigError(f"chat_template: there is no file {given}.{did_you_mean(given, TEMPLATE_FILES)}", _HINT)
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MAX_TEMPLATE_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {given} cannot be read: {error}", _HINT) from error
    if not text.strip():
        what = "is empty" if size <= MAX_TEMPLATE_BYTES else f"has {size:,} bytes, more than {MAX_TEMPLATE_BYTES:,}"
        raise ConfigError(f"chat_template: {given} {what}", _HINT)
    return text


def folder_with_template(folder: Path, given: str | None) -> Path:
    """Return a folder with the tokenizer of `folder` and another chat template; None: `folder` as it is.

    Raises:
        ConfigError: the template cannot be read or used.
        DataError: there is no tokenizer.
    """
    if given is None:
        return folder
    template = read_template(given)
    source = tokenizers.find_tokenizer_file(folder)
    parts = {name: file.read_bytes() for name in _TOKENIZER_FILES if (file := source.with_name(name)).is_file()}
    parts["tokenizer.json"] = source.read_bytes()
    config = _config_with_template(parts.get("tokenizer_config.json", b"{}"), template)
    parts["tokenizer_config.json"] = config.encode()
    parts["chat_template.jinja"] = template.encode()
    names = sorted(parts)
    digest = hashlib.sha256(b"".join(name.encode() + hashlib.sha256(parts[name]).digest() for name in names))
    target = get_cache_root() / "templates" / digest.hexdigest()[:16] / source.parent.resolve().name
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(names, key=lambda one: one == "tokenizer.json"):  # last: a folder without it holds none
        if not (target / name).is_file():
            write_atomic(target / name, parts[name])
    loaded = tokenizers.load_tokenizer(target, check=False)
    text = try_template(loaded, template, given)
    _warn_split_tokens(loaded, text, given)
    return target


def _config_with_template(before: bytes, template: str) -> str:
    try:
        config = json_reader.loads(before)
    except ValueError:
        config = {}  # what is wrong with it is said where the tokenizer is loaded
    return json.dumps({**config, "chat_template": template}, ensure_ascii=False, indent=2)


def try_template(tokenizer: Any, template: str, name: str) -> str:
    """Return a short conversation as a template shows it.

    Raises:
        ConfigError: it is broken, fails, does not end, or leaves out what is said.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    question, answer = _PROBE_TEXTS
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    what = f"chat_template: {name}"
    try:
        with hf_folder.limit_render_resources():
            text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{what} is broken at its line {error.lineno}: {error.message}", _HINT) from error
    except SecurityError as error:
        raise ConfigError(f"{what} does something that a template may not do: {error}", _HINT) from error
    except hf_folder.RenderTimeoutError as error:
        seconds = hf_folder.MAX_RENDER_SECONDS
        raise ConfigError(f"{what} takes more than {seconds:g} s for one short conversation", _HINT) from error
    except MemoryError as error:
        raise ConfigError(
            f"{what} takes more than {hf_folder.MAX_RENDER_BYTES >> 20} MiB for one short conversation", _HINT
        ) from error
    except Exception as error:  # a template may fail in any way that Python's values can
        raise ConfigError(f"{what} fails on a question and its answer: {_shorten_error(error)}", _HINT) from error
    if question not in text or answer not in text:
        lost = "the user" if question not in text else "the assistant"
        raise ConfigError(f"{what} leaves out what {lost} says", _HINT)
    return text


def _shorten_error(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def _warn_split_tokens(tokenizer: Any, text: str, name: str) -> None:
    """Warn of control tokens that the tokenizer reads as plain text: the model has never seen them as tokens."""
    marks = dict.fromkeys(_CONTROL_TOKEN.findall(text))
    split = [mark for mark in marks if len(tokenizer(mark, add_special_tokens=False)["input_ids"]) > 1]
    if split:
        log.warn(f"chat_template {name}: the tokenizer has no token {', '.join(split[:4])}: several tokens each")
