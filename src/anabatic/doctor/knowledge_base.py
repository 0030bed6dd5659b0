"""Meanings of error codes and error texts: entries from the YAML files in `knowledge/`, and a user's own.

An entry is found by a code (`EI0006`, `507015`, `hccl:9`, `-8020`) or by a text. A text is compared without regard to
upper and lower case; `*` in it stands for anything on the same line. There are no regular expressions: a file that a
colleague sends cannot make the search slow.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError

KNOWLEDGE_FOLDER = Path(__file__).with_name("knowledge")
KNOWLEDGE_VARIABLE = "ANABATIC_KNOWLEDGE"
"""Names a file of own entries that is always read."""
ROLES = ("cause", "consequence", "wrapper", "notice")
"""A cause; what other ranks suffer from it; a general message around either; nothing that stops a job."""
CONFIDENCES = ("high", "medium", "low")
LANGUAGES = ("en", "zh")
EXPLANATION_PARTS = ("meaning", "cause", "fix")
MIN_TEXT_CHARS = 6
"""Characters of the longest piece of a text: less would match anything."""
UNKNOWN_EXCEPTION_PREFIX = "python:"
"""Start of the id of an exception without an entry."""
_ENTRY_KEYS = {"id", "codes", "texts", "packages", "instead_of", "above", "role", "confidence", "source", *LANGUAGES}


@dataclass(frozen=True)
class Explanation:
    """An entry in one language."""

    meaning: str
    cause: str
    fix: str


@dataclass(frozen=True)
class KnowledgeEntry:
    """One thing that can be said in a log."""

    id: str
    codes: tuple[str, ...]
    texts: tuple[str, ...]
    role: str
    confidence: str
    source: str
    explanations: dict[str, Explanation]
    packages: tuple[str, ...] = ()
    """Packages of Python of which a line may say that they are missing; `x*` stands for all that begin with x."""
    instead_of: tuple[str, ...] = ()
    """Entries that this one replaces where one of `above` is in the lines before."""
    above: tuple[str, ...] = ()

    def get_explanation(self, language: str) -> Explanation:
        """Return the words in `language`, else in English, else in the language there is."""
        return self.explanations.get(language) or self.explanations.get("en") or next(iter(self.explanations.values()))


@dataclass(frozen=True, eq=False)
class KnowledgeBase:
    """All entries, and what prefixes of codes say about codes without one."""

    entries: tuple[KnowledgeEntry, ...]
    by_code: dict[str, KnowledgeEntry]
    prefixes: tuple[tuple[str, KnowledgeEntry], ...]
    """Longest first."""
    by_package: dict[str, KnowledgeEntry] = field(default_factory=dict)
    refinements: dict[str, list[KnowledgeEntry]] = field(default_factory=dict)
    """Id of an entry -> those that can take its place."""

    def find_by_package(self, name: str) -> KnowledgeEntry | None:
        """Return the entry of a package, by its name or by how it begins, or None."""
        if name in self.by_package:
            return self.by_package[name]
        starts = (known for known in self.by_package if known.endswith("*") and name.startswith(known[:-1]))
        return self.by_package.get(next(starts, ""))

    def find_by_code(self, code: str) -> KnowledgeEntry | None:
        """Return the entry of a code, or what its prefix says, or None."""
        if code in self.by_code:
            return self.by_code[code]
        found = next((entry for prefix, entry in self.prefixes if code.startswith(prefix)), None)
        return replace(found, id=code) if found else None


def load_knowledge(files: tuple[Path, ...] = ()) -> KnowledgeBase:
    """Read the package's entries and the users'; a user's entry takes the codes and the id that it names.

    Args:
        files: YAML files with a list `entries`, and the one that `ANABATIC_KNOWLEDGE` names.

    Raises:
        ConfigError: a file is missing, no YAML, or an entry is wrong; names the file and the line.
    """
    entry_files = list(files)
    if env_path := os.environ.get(KNOWLEDGE_VARIABLE):
        entry_files.insert(0, Path(env_path))
    entries = {entry.id: entry for entry in load_shipped_entries()}
    by_code = {code: entry for entry in load_shipped_entries() for code in entry.codes}
    for path in entry_files:
        for entry in _load_user_entries(path):
            entries[entry.id] = entry
            by_code.update(dict.fromkeys(entry.codes, entry))
    by_package = {normalize_package(name): entry for entry in entries.values() for name in entry.packages}
    refinements: dict[str, list[KnowledgeEntry]] = {}
    for entry in entries.values():
        for general in entry.instead_of:
            refinements.setdefault(general, []).append(entry)
    return KnowledgeBase(tuple(entries.values()), by_code, load_prefixes(), by_package, refinements)


def normalize_package(name: str) -> str:
    """Return a package's name as programs and installers write it alike."""
    return name.lower().replace("-", "_")


@cache
def load_shipped_entries() -> tuple[KnowledgeEntry, ...]:
    """Return the entries of the package."""
    found: list[KnowledgeEntry] = []
    for path in sorted(KNOWLEDGE_FOLDER.glob("*.yaml")):
        if path.name != "prefixes.yaml":
            found += [_parse_entry(raw, f"{path.name}: ") for raw in _load_yaml_fast(path)]
    return tuple(found)


@cache
def load_prefixes() -> tuple[tuple[str, KnowledgeEntry], ...]:
    """Return (prefix, entry), the longest prefix first."""
    found = [
        (str(raw["id"]), _parse_entry(raw, "prefixes.yaml: "))
        for raw in _load_yaml_fast(KNOWLEDGE_FOLDER / "prefixes.yaml")
    ]
    return tuple(sorted(found, key=lambda row: -len(row[0])))


_CONSEQUENCE_EXCEPTIONS = (
    "BrokenPipeError",
    "BrokenProcessPool",
    "CalledProcessError",
    "ConnectionAbortedError",
    "ConnectionError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "EOFError",
    "TimeoutError",
)
"""Exceptions that mostly tell of another process."""


_UNKNOWN_EXCEPTION_TEXT = {
    "en": Explanation(
        "Python raised {name}; no entry knows its text.",
        "The line says what was wrong, the frames above it say where.",
        "Read the traceback that ends there, from below: the last line of your own code is the place.",
    ),
    "zh": Explanation(
        "Python 抛出了 {name}，没有条目收录这段文字。",
        "该行说明出了什么错，上方的调用栈说明在哪里。",
        "从下往上读在此结束的 Traceback：最靠下的自己代码的那一行就是出错位置。",
    ),
}
_OWN_ERROR_TEXT = {
    "en": Explanation(
        "anabatic ended the job itself.",
        "The line says why, with the numbers.",
        "Start the command again: below `error:` it prints `hint:` with the remedy.",
    ),
    "zh": Explanation(
        "anabatic 主动结束了作业。",
        "该行说明了原因和数值。",
        "重新运行该命令：`error:` 下方的 `hint:` 给出处理办法。",
    ),
}


@lru_cache(maxsize=256)
def make_exception_entry(path: str) -> KnowledgeEntry:
    """Return what can be said of a Python exception that no entry knows, by its name with the module's."""
    name = path.rpartition(".")[2]
    is_own = path.startswith("anabatic.core.errors.")
    role = "consequence" if name in _CONSEQUENCE_EXCEPTIONS else "cause"
    words = {
        language: Explanation(*(part.format(name=name) for part in (text.meaning, text.cause, text.fix)))
        for language, text in (_OWN_ERROR_TEXT if is_own else _UNKNOWN_EXCEPTION_TEXT).items()
    }
    source = "anabatic, core/errors.py" if is_own else "docs.python.org, tutorial, errors"
    return KnowledgeEntry(
        f"{UNKNOWN_EXCEPTION_PREFIX}{name}", (), (), role, "medium" if is_own else "low", source, words
    )


def _load_yaml_fast(path: Path) -> list[dict[str, Any]]:
    """libyaml reads our own files in a tenth of the time that the reader with line numbers takes."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tree = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return list(tree["entries"])


def _load_user_entries(path: Path) -> list[KnowledgeEntry]:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", "give the YAML file with the entries")
    source = yaml_reader.read_yaml(path)
    unknown = sorted(set(source.tree) - {"entries"})
    rows = source.tree.get("entries")
    if unknown or not isinstance(rows, list):
        what = f'has a key "{unknown[0]}"' if unknown else "has no list `entries`"
        raise ConfigError(f"{path} {what}", "write `entries:` and below it `- id: ...`; see the guide to explain")
    return [_parse_entry(row, source.format_location(("entries", index))) for index, row in enumerate(rows)]


def _parse_entry(raw: Any, where: str) -> KnowledgeEntry:
    if not isinstance(raw, dict) or not isinstance(raw.get("id"), (str, int)):
        raise ConfigError(f"{where}an entry has no id", "write `- id: my-error`")
    name = str(raw["id"])
    if unknown := sorted(set(map(str, raw)) - _ENTRY_KEYS):
        raise ConfigError(f'{where}entry {name}: unknown key "{unknown[0]}"', f"keys: {', '.join(sorted(_ENTRY_KEYS))}")
    texts = tuple(_parse_list(raw, "texts", where))
    for text in texts:
        if max(len(piece) for piece in text.split("*")) < MIN_TEXT_CHARS:
            raise ConfigError(
                f'{where}entry {name}: the text "{text}" would match too much',
                f"one piece between `*` needs {MIN_TEXT_CHARS} characters",
            )
        if not re.search(r"[^\s\d*]", text):
            raise ConfigError(f'{where}entry {name}: the text "{text}" is a number', "name it under `codes:`")
    words = {
        language: _parse_explanation(raw[language], f"{where}entry {name}: {language}")
        for language in LANGUAGES
        if language in raw
    }
    if not words:
        raise ConfigError(f"{where}entry {name} says nothing", "write `en:` or `zh:` with meaning, cause and fix")
    return KnowledgeEntry(
        name,
        tuple(code.upper() if code[:1] in "eE" else code for code in _parse_list(raw, "codes", where)),
        texts,
        _parse_choice(raw, "role", ROLES, where),
        _parse_choice(raw, "confidence", CONFIDENCES, where),
        str(raw.get("source", "")),
        words,
        tuple(_parse_list(raw, "packages", where)),
        tuple(_parse_list(raw, "instead_of", where)),
        tuple(text.lower() for text in _parse_list(raw, "above", where)),
    )


def _parse_list(raw: dict[str, Any], key: str, where: str) -> list[str]:
    value = raw.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{where}entry {raw['id']}: {key} is no list", f"write `{key}: [...]`")
    return [str(one) for one in value]


def _parse_explanation(raw: Any, where: str) -> Explanation:
    if (
        not isinstance(raw, dict)
        or set(raw) != set(EXPLANATION_PARTS)
        or not all(str(raw[part]).strip() for part in EXPLANATION_PARTS)
    ):
        raise ConfigError(f"{where} needs exactly {', '.join(EXPLANATION_PARTS)}", "write each as one line of text")
    return Explanation(*(re.sub(r"\s+", " ", str(raw[part])).strip() for part in EXPLANATION_PARTS))


def _parse_choice(raw: dict[str, Any], key: str, known: tuple[str, ...], where: str) -> str:
    value = str(raw.get(key, known[0]))
    if value not in known:
        raise ConfigError(f'{where}entry {raw["id"]}: {key} is "{value}"', f"one of {', '.join(known)}")
    return value
