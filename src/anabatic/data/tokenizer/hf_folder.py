"""Byte-level BPE tokenizers as Hugging Face folders: special tokens, chat template, loading."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from anabatic.core import json_reader
from anabatic.core.errors import ChatTemplateError, DataError
from anabatic.core.paths import make_write_error, write_atomic
from anabatic.data.chat.python_tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START

MAX_RENDER_SECONDS = 10.0
"""Of processor time that a template may take for one conversation."""
MAX_RENDER_BYTES = 1 << 30
"""Bytes of memory that a template may take when it is tried."""
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    PYTHON_START,
    PYTHON_END,
    OUTPUT_START,
    OUTPUT_END,
    *(f"<|reserved_{index}|>" for index in range(3)),
)
"""Tokens that no merge makes, ids from 0. `END_OF_TEXT` separates documents, ends text and pads."""
_FILES_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files that transformers reads beside `tokenizer.json`."""
VISIBLE_SPECIAL_TOKENS = frozenset(
    token for token in SPECIAL_TOKENS if not token.startswith(("<|end", "<|im_", "<|reserved"))
)
"""Special tokens that are part of what the assistant says: `skip_special_tokens` keeps them."""
_TURNS = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_PROBES: tuple[tuple[list[dict[str, str]], dict[str, Any]], ...] = (
    ([{"role": "user", "content": ""}], {}),
    (_TURNS[1:3], {}),
    (_TURNS, {"add_generation_prompt": True}),
    (_TURNS, {"add_generation_prompt": True, "tools": [_TOOL]}),
)
"""Conversations on which the template of a folder is tried, and how."""
TEMPLATE_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
"""Errors of templates in addition to jinja's own: they join what is no text, divide, count too far."""


class RenderTimeoutError(Exception):
    """A template has used up its time."""

    def __str__(self) -> str:
        return f"it takes more than {MAX_RENDER_SECONDS:g} s of processor time"


@contextmanager
def limit_render_time() -> Iterator[None]:
    """Bound the processor time of what runs inside; in the main thread alone, where signals arrive.

    Raises:
        RenderTimeoutError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def raise_timeout(_: int, __: FrameType | None) -> None:
        left = MAX_RENDER_SECONDS - (time.thread_time() - started)
        if left <= 0:
            raise RenderTimeoutError
        signal.setitimer(signal.ITIMER_VIRTUAL, left)  # it counts the other threads of the process, too

    before = signal.signal(signal.SIGVTALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def limit_render_resources() -> Iterator[None]:
    """Bound the memory as well: the address space of the process, in the main thread.

    Raises:
        RenderTimeoutError: the time is over.
        MemoryError: the memory is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space_bytes()
    max_bytes = used + MAX_RENDER_BYTES
    is_main = threading.current_thread() is threading.main_thread()
    bounds = is_main and used > 0 and (soft == resource.RLIM_INFINITY or max_bytes < soft)
    try:
        if bounds:
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
        with limit_render_time():
            yield
    finally:
        if bounds:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    """Return the bytes of this process's address space; 0: not known."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.is_file() else 0


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def get_python_tool_ids(tokenizer: Any) -> tuple[int, int, int, int] | None:
    """Return the ids of the python tool's four tokens in their order; None: the tokenizer does not have them."""
    known = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    start, end, output, output_end = map(known.get, (PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END))
    if start is None or end is None or output is None or output_end is None:
        return None
    return start, end, output, output_end


def build_tokenizer_config() -> dict[str, Any]:
    """Return `tokenizer_config.json` of a tokenizer that we train."""
    template = resources.files("anabatic.data").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a Hugging Face folder; what else lies in it stays.

    Each file is written whole or not at all, `tokenizer.json` last: a folder without it holds no tokenizer.

    Raises:
        Failure: the disk is full or refuses writes.
    """
    files = {
        "tokenizer_config.json": _format_json(build_tokenizer_config()),
        "special_tokens_map.json": _format_json({"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}),
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_write_error(folder, error) from error
    for name, content in files.items():
        write_atomic(folder / name, content)


def _format_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def load_tokenizer(folder: str | Path, check: bool = True) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a Hugging Face folder for transformers' interface (chat template, decoding).

    Args:
        check: make sure that its chat template can be read.

    Raises:
        DataError: there is no `tokenizer.json`, or it or its configuration is damaged.
    """
    path = find_tokenizer_file(folder)
    from transformers import PreTrainedTokenizerFast  # a second of imports that encoding does not need

    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path.parent, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise _damaged_error(_find_damaged_file(path) or path, error) from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _read_processor_template(path.parent)
    if check and tokenizer.chat_template:
        _try_template(tokenizer, path.parent)
    return tokenizer


def get_chat_template(tokenizer: Any) -> str:
    """Return the tokenizer's chat template.

    Raises:
        DataError: there is none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        name = tokenizer.name_or_path or "the tokenizer"
        raise DataError(f"{name}: no chat template", "use a chat model's tokenizer, or train one with ours")
    return str(template)


PROCESSOR_TEMPLATE_FILE = "chat_template.json"


def _read_processor_template(folder: Path) -> str | None:
    """Return the template of a folder whose processor keeps it, as those of models that see did; None: it has none."""
    file = folder / PROCESSOR_TEMPLATE_FILE
    if not file.is_file():
        return None
    try:
        template = json_reader.read_json_file(file)["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged_error(file, error) from error
    if not isinstance(template, str):
        raise _damaged_error(file, TypeError(f"chat_template is {type(template).__name__}, not text"))
    return template


def _try_template(tokenizer: Any, folder: Path) -> None:
    """A torn template, or one without end, must not wait for the first row. What it says of a row is not judged."""
    from jinja2 import TemplateError, TemplateSyntaxError

    hint = "fetch chat_template.jinja and tokenizer_config.json again, or give --chat-template"
    for turns, more in _PROBES:
        try:
            with limit_render_resources():
                tokenizer.apply_chat_template(turns, tokenize=False, **more)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{folder}: the chat template is damaged at its line {error.lineno}: {error.message}", hint
            ) from error
        except RenderTimeoutError as error:
            seconds = MAX_RENDER_SECONDS
            raise DataError(
                f"{folder}: the chat template takes more than {seconds:g} s for a short conversation", hint
            ) from error
        except MemoryError as error:
            mib = MAX_RENDER_BYTES >> 20
            raise DataError(
                f"{folder}: the chat template takes more than {mib} MiB for a short conversation", hint
            ) from error
        except (TemplateError, *TEMPLATE_FAILURES):
            continue  # it refuses this conversation; others it may take


def encode_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    answer: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation, ready for the assistant to speak; without `answer` as it stands.

    Args:
        variables: of the chat template, such as `enable_thinking`.

    Raises:
        ChatTemplateError: the chat template refuses the conversation (some know no system message).
    """
    ids: list[int] = _apply_chat_template(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=answer,
        tokenize=True,
        return_dict=False,
        **(variables or {}),
    )
    return ids


def render_chat(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, answer: bool = False
) -> str:
    """Return a conversation as text; with `answer`, ready for the assistant to speak.

    Raises:
        ChatTemplateError: the chat template refuses the conversation.
    """
    text: str = _apply_chat_template(tokenizer, messages, tools=tools, add_generation_prompt=answer, tokenize=False)
    return text


def _apply_chat_template(tokenizer: Any, messages: list[dict[str, Any]], /, **how: Any) -> Any:
    from jinja2 import TemplateError

    try:
        with limit_render_time():
            return tokenizer.apply_chat_template(messages, **how)
    except (TemplateError, RenderTimeoutError, *TEMPLATE_FAILURES) as error:
        reason = str(error) or type(error).__name__
        refused = ChatTemplateError(
            f"the chat template of {tokenizer.name_or_path} refuses the conversation: {reason}", _advice(error)
        )
        refused.reason = reason
        raise refused from error


def _advice(error: Exception) -> str:
    """Return what can be done about a template's refusal. What it raises itself is about the order of the turns."""
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError

    if isinstance(error, (RenderTimeoutError, SecurityError, OverflowError, MemoryError, RecursionError)):
        return "it asks for more than templates may: make the variables that it is given smaller"
    if type(error) is TemplateError:
        return "leave the system message out, or begin with the user's turn"
    return "a part of the conversation is not as it expects it: look at its tools, its calls and its variables"


def get_turn_end_id(tokenizer: Any) -> int | None:
    """Return the control token that closes the assistant's turn, as the chat template shows; None: there is none."""
    if not tokenizer.chat_template:
        return None
    mark = "answer0mark"
    try:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        behind = render_chat(tokenizer, messages).partition(mark)[2].lstrip()
    except DataError:
        return None
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return int(ids[0]) if token is not None and token.special else None


def load_fast_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the bare tokenizer for documents: fast to import, and special tokens in the text are plain text.

    Args:
        folder: Hugging Face folder, or a `tokenizer.json`.

    Raises:
        DataError: there is no `tokenizer.json`, or it is damaged.
    """
    path = find_tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise _damaged_error(path, error) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer_file(folder: str | Path) -> Path:
    """Return the `tokenizer.json` of a folder, or the file itself.

    Raises:
        DataError: there is none.
    """
    path = Path(folder).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        return file
    what = "the folder has no tokenizer.json" if path.is_dir() else "no such folder"
    raise DataError(
        f"no tokenizer in {path}: {what}",
        "train one with `anabatic tokenizer train`, or give a Hugging Face folder with tokenizer.json",
    )


def _find_damaged_file(path: Path) -> Path | None:
    """Return the first file beside `tokenizer.json` that cannot be read as what it should be."""
    for file in (path.with_name(name) for name in _FILES_BESIDE):
        try:
            if not file.is_file():
                continue
            text = file.read_bytes()
            if file.suffix != ".json":
                text.decode()
            elif not isinstance(json_reader.loads(text), dict):
                return file
        except (OSError, ValueError):
            return file
    return None


def _damaged_error(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be loaded: {error}", "the folder is damaged: train or fetch the tokenizer again")
