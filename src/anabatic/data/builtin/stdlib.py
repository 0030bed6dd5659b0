"""Text that is on every machine: the sources, the documentation and conversations made from this Python's standard
library.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from anabatic.core.errors import DataError
from anabatic.data.readers.document import Document, Message, is_held_out

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    # Tables, not text: character maps that differ from one another in a few lines; one huge string literal.
    | {"encodings", "pydoc_data"}
)

_HELP_TOPICS = "pydoc_data.topics"


def find_stdlib_folder() -> Path:
    """The folder of the standard library.

    Raises:
        DataError: it is not a folder of sources (an interpreter that keeps it in a zip file, say).
    """
    path = Path(sysconfig.get_paths()["stdlib"])
    if not (path / "os.py").is_file():
        raise DataError(
            f"this Python's standard library has no sources in {path}",
            "use another Python, or give text of your own with --data.train PATH",
        )
    return path


def list_stdlib_files() -> list[Path]:
    """Sorted `.py` files of the standard library, without tests, tables and what is installed beside it."""
    found: list[Path] = []
    for folder, folders, names in os.walk(find_stdlib_folder()):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS and not name.startswith("config-")]
        found.extend(
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
    return sorted(found)


def read_source_documents() -> Iterator[Document]:
    """Yield one document per module: its source. Its id is `stdlib:json/decoder.py`."""
    base = find_stdlib_folder()
    for path in list_stdlib_files():
        if text := _read_source(path):
            yield Document(text, None, _document_id(base, path))


def read_doc_documents() -> Iterator[Document]:
    """Yield one document per module, its docstrings, then one per topic of Python's `help()`.

    A module's docstrings carry the id of its source, so that both are held out together: text that is trained
    on in one source never tests the model in the other.
    """
    base = find_stdlib_folder()
    for path in list_stdlib_files():
        if text := extract_docstrings(_read_source(path), _module_name(base, path)):
            yield Document(text, None, _document_id(base, path))
    if importlib.util.find_spec("pydoc_data") is None:
        return
    topics: dict[str, str] = importlib.import_module(_HELP_TOPICS).topics
    for name in sorted(topics):
        yield Document(topics[name].strip() + "\n", None, f"stdlib:docs/{name}")


def extract_docstrings(source: str, module: str) -> str:
    """Return the docstrings of a module, its classes and functions under their names, or an empty string."""
    tree = ast.parse(source)
    parts = list(_iter_docstrings(tree, module, ""))
    return "\n\n".join(parts) + "\n" if parts else ""


def _iter_docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, prefix: str
) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield f"{_format_heading(node, name)}\n\n{text}"
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _iter_docstrings(child, f"{prefix}{child.name}", f"{prefix}{child.name}.")


def _format_heading(node: ast.AST, name: str) -> str:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{name}({ast.unparse(node.args)})"
    return f"class {name}" if isinstance(node, ast.ClassDef) else f"module {name}"


def _read_source(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        with tokenize.open(path) as file:  # a source may declare another encoding (PEP 263)
            return file.read()


def _document_id(base: Path, path: Path) -> str:
    return f"stdlib:{path.relative_to(base).as_posix()}"


def _module_name(base: Path, path: Path) -> str:
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


MAX_HOLDOUT_FRACTION = 0.1
"""Modules that a held-out share up to this one would hold out are never quoted, so that conversations
cannot teach what the held-out text of `stdlib:` measures (a smaller share holds out a subset)."""

LONGEST_ANSWER = 300
SHORT_SENTENCE = 40
LISTED_NAMES = 6
FOLLOW_UP_FRACTION = 0.35
"""Share of the conversations that continue after the first answer, where there is something to continue with."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class DocumentedObject:
    """Something with a docstring.

    Attributes:
        kind: `module`, `class`, `function` or `method`.
        module: dotted name of its module.
        name: `copy`, `Path.exists`; a module's own dotted name.
        summary: first sentences of its docstring, one line.
        signature: how it is called, or an empty string.
        members: public functions and classes of a module, public methods of a class.
    """

    kind: str
    module: str
    name: str
    summary: str
    signature: str = ""
    members: list[str] = field(default_factory=list)


QUESTIONS = {
    "module": (
        "What is the module {name} for?",
        "What does the Python module {name} do?",
        "Tell me about the module {name}.",
        "What is {name} in Python?",
    ),
    "class": (
        "What is {module}.{name}?",
        "What is the class {name} in {module}?",
        "What is {name} from the module {module}?",
    ),
    "function": (
        "What does {module}.{name} do?",
        "What does the function {name} in {module} do?",
        "What is {module}.{name} for?",
        "Explain the function {name} from {module}.",
    ),
    "method": (
        "What does the method {name} in {module} do?",
        "What does {module}.{name} do?",
        "What is the method {name} for?",
    ),
}
"""Kind -> first questions, answered by the summary."""

SIGNATURE_QUESTIONS = ("How do I call {module}.{name}?", "What is the signature of {name} in {module}?")
SIGNATURE_FOLLOW_UPS = ("How do I call it?", "What arguments does it take?", "What is its signature?")
MEMBER_FOLLOW_UPS = {
    "module": ("What is in it?", "What does it define?", "Which functions and classes does it have?"),
    "class": ("Which methods does it have?", "What are its methods?"),
}


def generate_conversations(rows: int | None) -> Iterator[list[Message]]:
    """Yield up to `rows` conversations (all of them when None), always the same ones in the same order.

    Every documented public module, class, function and method is asked about once, in an order that mixes
    modules; some conversations continue with the signature or a list of what is inside. Reading and parsing
    the whole library takes a few seconds and happens before the first conversation.

    Raises:
        DataError: the interpreter has no sources of its standard library.
    """
    found = [entry for path in list_stdlib_files() for entry in _iter_module_objects(path)]
    rng = Random(0)
    rng.shuffle(found)
    for entry in found[:rows]:
        yield _build_conversation(entry, rng)


def _build_conversation(entry: DocumentedObject, rng: Random) -> list[Message]:
    if entry.signature and rng.random() < 0.2:
        return _build_exchange(rng.choice(SIGNATURE_QUESTIONS), entry.signature, entry)
    messages = _build_exchange(rng.choice(QUESTIONS[entry.kind]), entry.summary, entry)
    if rng.random() >= FOLLOW_UP_FRACTION:
        return messages
    if entry.signature:
        messages += _build_exchange(rng.choice(SIGNATURE_FOLLOW_UPS), entry.signature, entry)
    if entry.members:
        messages += _build_exchange(rng.choice(MEMBER_FOLLOW_UPS[entry.kind]), _join_names(entry.members), entry)
    return messages


def _build_exchange(question: str, answer: str, entry: DocumentedObject) -> list[Message]:
    question_text = question.format(module=entry.module, name=entry.name)
    return [{"role": "user", "content": question_text}, {"role": "assistant", "content": answer}]


def _join_names(names: list[str]) -> str:
    """Return `a.`, `a and b.`, `a, b and c.`, or the first names `and others.`"""
    listed = names if len(names) <= LISTED_NAMES else [*names[: LISTED_NAMES - 1], "others"]
    return (f"{', '.join(listed[:-1])} and {listed[-1]}" if len(listed) > 1 else listed[0]) + "."


def _iter_module_objects(path: Path) -> Iterator[DocumentedObject]:
    """Yield what a source file documents; private modules and those never quoted have nothing."""
    relative = path.relative_to(find_stdlib_folder())
    module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    if any(part.startswith("_") for part in module.split(".")):
        return
    if is_held_out(f"stdlib:{relative.as_posix()}", MAX_HOLDOUT_FRACTION):
        return
    with tokenize.open(path) as file:
        tree = ast.parse(file.read())
    public = [
        node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_")
    ]
    if text := summarize_docstring(ast.get_docstring(tree)):
        yield DocumentedObject("module", module, module, text, members=_unique_names(public))
    for node in public:
        if isinstance(node, ast.ClassDef):
            yield from _iter_class_objects(node, module)
        elif text := summarize_docstring(ast.get_docstring(node)):
            yield DocumentedObject(
                "function", module, node.name, text, _format_signature(f"{module}.{node.name}", node, False)
            )


def _iter_class_objects(node: ast.ClassDef, module: str) -> Iterator[DocumentedObject]:
    methods = [
        each
        for each in node.body
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and not each.name.startswith("_")
    ]
    if text := summarize_docstring(ast.get_docstring(node)):
        yield DocumentedObject("class", module, node.name, text, members=_unique_names(methods))
    for method in methods:
        if text := summarize_docstring(ast.get_docstring(method)):
            name = f"{node.name}.{method.name}"
            yield DocumentedObject("method", module, name, text, _format_signature(name, method, True))


def _unique_names(nodes: list[ast.ClassDef | _Definition] | list[_Definition]) -> list[str]:
    return list(dict.fromkeys(node.name for node in nodes))


def _format_signature(name: str, node: _Definition, bound: bool) -> str:
    """Return `name(arguments)` without annotations, and without `self` or `cls`; empty for a property."""
    decorators = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    if decorators & {"property", "cached_property"}:
        return ""
    arguments = node.args
    for each in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ):
        if each is not None:
            each.annotation = None
    if bound and "staticmethod" not in decorators:
        del (arguments.posonlyargs or arguments.args)[:1]
    text = f"{name}({ast.unparse(arguments)})"
    return text if len(text) <= LONGEST_ANSWER else ""


def summarize_docstring(docstring: str | None) -> str:
    """Return the first sentence of a docstring on one line, and the second where the first is very short.

    A first paragraph that only repeats the signature is skipped. Empty where there is no prose of at most
    `LONGEST_ANSWER` characters to quote.
    """
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))[:2]:
        text = " ".join(paragraph.split())
        if not re.match(r"[A-Za-z]", text) or re.match(r"[\w.]+\(", text) or text.endswith(":"):
            continue
        return _first_sentences(text)
    return ""


def _first_sentences(text: str) -> str:
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    summary = sentences[0]
    if len(summary) < SHORT_SENTENCE and len(sentences) > 1:
        summary = f"{summary} {sentences[1]}"
    if not 8 <= len(summary) <= LONGEST_ANSWER or " " not in summary:
        return ""
    return summary[0].upper() + summary[1:] + ("" if summary[-1] in ".!?" else ".")
