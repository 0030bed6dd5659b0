"""Text that is on every machine: this Python's standard library, sources and documentation."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from anabatic.core.errors import DataError
from anabatic.data.readers.document import Document

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
