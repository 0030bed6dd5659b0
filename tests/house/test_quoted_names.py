"""Names in back-ticks, in docstrings and comments, are names that exist: files, modules, and words of the code."""

from __future__ import annotations

import ast
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from house import tree

QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w/-]+\.(py|cpp|h|js|j2|toml|sh)")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(\))?")
WORD = re.compile(r"(_?[A-Za-z]+(_[A-Za-z0-9]+)+|_[a-z]\w+|[A-Z][a-z]+[A-Za-z]+)(\(\))?")
DATA_FORMATS = {"json", "jsonl", "md", "svg", "html", "yaml", "txt", "css"}
FOREIGN = frozenset({
    "random.py", "response_output_message.py", "response_function_tool_call.py",
    "response_reasoning_item.py", "response_input_item_param.py", "_exceptions.py", "ParamWrapper", "settings.train",
    "RequeueExit", "_fsdp_param.py", "_fsdp_collectives.py", "reward_model.ground_truth", "PyThread_exit_thread",
    "_cann_package_check", "load_balancing_loss_func", "skip_init",
    "NAME_adapter", "merge_adapter", "print_diagnosis_info", "torch_chunk_gated_delta_rule", "all_gather_inputs",
    "foreach_reduce", "copy_process", "Short_SoC_version", "_check_device_conflict", "_utc", "_device_count_ascend_hal",
})  # fmt: skip
"""Names of torch, transformers, PEFT, CPython, Linux and others, and patterns, that the code itself never spells."""
PENDING = frozenset({"recipes", "train", "parallel", "launch"})
"""Rooms whose texts have not been read yet."""


def iter_quoted(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of all back-ticked words of a file's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    texts = tree.docstrings(tree.parse(path))
    for node in tree.nodes(path):
        if isinstance(node, ast.Constant) and id(node) in texts:
            for name in QUOTED.findall(node.value):
                yield node.lineno, name
    if not re.search(r"#.*`", text):
        return  # reading tokens takes ten times as long as looking for one
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for name in QUOTED.findall(token.string):
                yield token.start[0], name


@functools.cache
def known_words() -> frozenset[str]:
    """Return every word of the code outside docstrings and comments, in Python and other sources."""
    words: set[str] = set()
    for path in tree.python_files():
        texts = tree.docstrings(tree.parse(path))
        for node in tree.nodes(path):
            for _, value in ast.iter_fields(node):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, str) and id(node) not in texts:
                        words.update(re.findall(r"\w+", each))
    for path in tree.tracked():
        if path.suffix in (".cpp", ".h", ".js", ".yaml", ".j2", ".toml", ".css"):
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(words)


@functools.cache
def modules() -> dict[str, list[Path]]:
    """Return the files of each module name, and of each name with its room: `train.step`, `step`."""
    found: dict[str, list[Path]] = {}
    for path in tree.sources():
        parts = [*path.relative_to(tree.ROOT / "src").with_suffix("").parts]
        if parts[-1] != "__init__":
            for start in range(len(parts)):
                found.setdefault(".".join(parts[start:]), []).append(path)
    return found


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """Return what a module defines: functions, classes, their members, assigned names, imported names."""
    names: set[str] = set()
    for node in tree.nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)


@functools.cache
def tracked_names() -> str:
    """Return the tracked files, a line each, with a slash before it."""
    return "".join(f"/{tree.name(path)}\n" for path in tree.tracked())


def find_fault(name: str) -> str:
    """Return why a quoted name does not exist; empty: it does, or is no name of ours."""
    bare = name.removesuffix("()").removeprefix("anabatic.")
    if name in FOREIGN or bare in FOREIGN or keyword.iskeyword(bare):
        return ""
    if FILE.fullmatch(name):
        is_ours = "/" not in name or (tree.SRC / name.partition("/")[0]).is_dir()
        return "no such file" if is_ours and f"/{name}\n" not in tracked_names() else ""
    if DOTTED.fullmatch(name):
        head, _, last = bare.rpartition(".")
        if bare in modules() or head not in modules() or last in DATA_FORMATS:
            return ""
        if any(last in names_of(file) for file in modules()[head]):
            return ""
        # A setting, a field or a variable can have the name of a module: `plan.rows`.
        is_other = last[0].islower() and last in known_words() and last not in modules() and "_" not in head
        return "" if is_other else f"{head} has no {last}"
    return "no such name in the code" if WORD.fullmatch(name) and bare not in known_words() else ""


def test_quoted_names_exist() -> None:
    sources = [path for path in tree.sources() if tree.room(path) not in PENDING]
    quoted = [(path, line, name) for path in sources for line, name in iter_quoted(path)]
    wrong = [
        f"{tree.name(path)}:{line}: `{name}`: {fault}" for path, line, name in quoted if (fault := find_fault(name))
    ]
    assert not wrong, "\n".join(wrong)
