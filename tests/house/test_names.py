"""Names are the words of the field, one meaning each, and every term of the glossary has its file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import pytest

from house import tree
from house.limits import LIMITS

ONE_WORD_SHARE = LIMITS["one_word_percent"] / 100
"""Largest share of functions whose name is one word, those of FIELD_WORDS and overrides of other packages left out."""
ROOMS_PER_NAME = LIMITS["name_rooms"]
"""In how many rooms a class name, or the name of a module, may occur."""
FILES_PER_FOLDER = LIMITS["folder_files"]
TERMS = 60
"""Fewest terms of the glossary."""

COMMAND_ROOMS = {"cli", "config", "recipes"}
"""A command has a file of its own name in each of these: one meaning, three rooms."""
PACKAGE_MODULE = "command_package"
"""Each guest lists in a module of this name what it adds to the program."""

FIELD_WORDS = {
    "append", "autocast", "backward", "barrier", "broadcast", "close", "collect", "debug", "decode", "encode",
    "exists", "fit", "flatten", "flush", "format", "forward", "generate", "get", "info", "load", "loads", "main",
    "median", "mount", "open", "pack", "parse", "poll", "predict", "read", "render", "reset", "run", "save", "start",
    "step", "stop", "submit", "synchronize", "to", "tokenize", "unmount", "unshare", "update", "wait", "warn",
    "write",
}  # fmt: skip
"""Words that name the whole of what a function does: of torch, of Python's own classes, of the operating system."""

UNUSED_WORDS = {
    "around": "host_resources",
    "asked": "request, prompt",
    "beat": "heartbeat",
    "begin": "start, initialize",
    "begun": "start, initialize",
    "below": "the bound that it is about",
    "beside": "alongside, compared",
    "dealt": "distributed",
    "drained": "finished",
    "far": "remote",
    "filled": "load_weights",
    "found": "match, result",
    "free": "available_devices",
    "gate": "middleware",
    "goal": "objective",
    "heart": "heartbeat",
    "held": "held_out",
    "here": "local_machine",
    "judge": "grader, reward_worker, test_process",
    "known": "registered, cached",
    "lay": "collate",
    "learn": "loss_mask, train",
    "learned": "target_tokens, trained",
    "learning": "loss_policy, training",
    "look": "check, inspect, probe",
    "made": "created, built",
    "opened": "loaded",
    "own": "local",
    "paper": "estimate, plan",
    "part": "shard, section, subset",
    "patience": "idle_timeout",
    "piece": "segment, chunk",
    "place": "rank, placement, materialize",
    "rehearsal": "probe",
    "roll": "rendezvous",
    "say": "log, report",
    "says": "log, report",
    "seats": "placement",
    "served": "model_registry",
    "share": "fraction, shard",
    "spare": "replacement",
    "stands": "position, state",
    "tell": "report, describe",
    "verdict": "finding, spike_detector",
    "way": "strategy, isolation",
    "whole": "merged, complete",
    "wish": "stop_request",
    "written": "result_files",
}
"""No function, class or module has one of these as its whole name. The value: what is used instead."""

DIALECT = {
    "aim": "target",
    "aloud": "log",
    "barren": "empty",
    "foretell": "predict",
    "foretold": "predicted",
    "laid": "collated",
    "mend": "fix",
    "mended": "fixed",
    "nominal": "expected",
    "owes": "pending",
    "said": "reported",
    "seat": "placement",
    "settle": "resolve",
    "settled": "resolved",
    "tidy": "clean_up",
    "told": "reported",
}
"""No name has one of these anywhere in it."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NEUTRAL_BASES = {"object", "ABC", "Enum", "Exception", "Generic", "NamedTuple", "Protocol", "TypedDict"}
"""Bases from outside that bring no methods whose names we would have to keep."""

Package = Mapping[str, ast.Module]
"""Path under src/anabatic -> syntax tree."""


@pytest.fixture(scope="module")
def package() -> Package:
    """Return every file of src/anabatic."""
    return {tree.source_name(path): tree.parse(path) for path in tree.sources()}


def made_up(**sources: str) -> Package:
    """Return a package of made-up files; `room__file` is `room/file.py`."""
    return {f"{name.replace('__', '/')}.py": ast.parse(text) for name, text in sources.items()}


def split_name(name: str) -> list[str]:
    """Return the words of a name in lower case: `_HostReport` -> host, report; `read_rows` -> read, rows."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def get_room(path: str) -> str:
    """Return the first folder of a path, empty for a file of the package itself."""
    return path.rpartition("/")[0].partition("/")[0]


def get_base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without their modules and their parameters."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [ast.unparse(base).rpartition(".")[2] for base in bases]


def list_outside_classes(package: Package) -> set[str]:
    """Return the classes that inherit, at some remove, from a class of another package."""
    bases: dict[str, set[str]] = defaultdict(set)
    for module in package.values():
        for node in tree.walk(module):
            if isinstance(node, ast.ClassDef):
                bases[node.name].update(get_base_names(node))
    outside: set[str] = set()
    while True:
        more = {
            name
            for name, of in bases.items()
            if any(base in outside or (base not in bases and base not in NEUTRAL_BASES) for base in of)
        }
        if more == outside:
            return outside
        outside = more


def list_functions(package: Package) -> Iterator[tuple[str, str]]:
    """Yield (place, name) of functions: methods, private and nested ones too, no dunders, no possible overrides.

    A public method of a class with a base of another package may be that package's name, and is left out.
    """
    outside = list_outside_classes(package)
    for path, module in package.items():
        overrides = {
            id(inner)
            for node in tree.walk(module)
            if isinstance(node, ast.ClassDef) and node.name in outside
            for inner in node.body
            if isinstance(inner, FUNCTIONS) and not inner.name.startswith("_")
        }
        for node in tree.walk(module):
            if isinstance(node, FUNCTIONS) and not node.name.startswith("__") and id(node) not in overrides:
                yield f"{path}:{node.lineno}", node.name


def list_one_word_functions(functions: Iterable[tuple[str, str]]) -> list[str]:
    """Return the functions named by one word that is not the field's own."""
    return [
        f"{place} {name}"
        for place, name in functions
        if len(words := split_name(name)) == 1 and words[0] not in FIELD_WORDS
    ]


def list_names(package: Package) -> Iterator[tuple[str, str]]:
    """Yield (place, name) of modules, classes and functions, dunders left out."""
    for path, module in package.items():
        if not (stem := PurePosixPath(path).stem).startswith("__"):
            yield path, stem
        for node in tree.walk(module):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("__"):
                yield f"{path}:{node.lineno}", node.name


def list_crowded(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return what occurs in too many rooms, from (path, name)."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path, name in names:
        rooms[name].add(get_room(path))
    return [f"{name}: {', '.join(sorted(of))}" for name, of in sorted(rooms.items()) if len(of) > ROOMS_PER_NAME]


def list_classes(package: Package) -> Iterator[tuple[str, str]]:
    """Yield (path, name) of the classes, nested ones too."""
    for path, module in package.items():
        yield from ((path, node.name) for node in tree.walk(module) if isinstance(node, ast.ClassDef))


def list_stems(package: Package) -> Iterator[tuple[str, str]]:
    """Yield (path, stem) of the modules. A command's own files count as one."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in package:
        rooms[PurePosixPath(path).stem].add(get_room(path))
    for path in package:
        stem = PurePosixPath(path).stem
        if not stem.startswith("__") and stem != PACKAGE_MODULE and not rooms[stem] <= COMMAND_ROOMS:
            yield path, stem


def list_large_folders(package: Package) -> list[str]:
    """Return the folders with too many Python files."""
    counts: dict[str, int] = defaultdict(int)
    for path in package:
        counts[path.rpartition("/")[0]] += 1
    return [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > FILES_PER_FOLDER]


def list_dialect(package: Package) -> list[str]:
    """Return the names that are, or hold, a word that is not used, with what to write instead."""
    wrong = []
    for place, name in list_names(package):
        words = split_name(name)
        instead = {word: DIALECT[word] for word in words if word in DIALECT}
        if len(words) == 1 and words[0] in UNUSED_WORDS:
            instead[words[0]] = UNUSED_WORDS[words[0]]
        wrong += [f"{place} {name}: not {word!r}; {better}" for word, better in instead.items()]
    return wrong


# The package itself.


def test_functions_are_named_by_verb_and_object(package: Package) -> None:
    functions = list(list_functions(package))
    short = list_one_word_functions(functions)
    share = len(short) / len(functions)
    assert share < ONE_WORD_SHARE, f"{share:.1%} of the functions have a one-word name:\n  " + "\n  ".join(short)


def test_no_class_name_in_three_rooms(package: Package) -> None:
    crowded = list_crowded(list_classes(package))
    assert not crowded, "one name, one meaning:\n  " + "\n  ".join(crowded)


def test_no_module_name_in_three_rooms(package: Package) -> None:
    crowded = list_crowded(list_stems(package))
    assert not crowded, "one name, one meaning:\n  " + "\n  ".join(crowded)


def test_folders_are_small(package: Package) -> None:
    large = list_large_folders(package)
    assert not large, f"at most {FILES_PER_FOLDER} Python files in a folder:\n  " + "\n  ".join(large)


def test_words_that_are_not_used(package: Package) -> None:
    wrong = list_dialect(package)
    assert not wrong, "the glossary has the word:\n  " + "\n  ".join(wrong)


# What the functions above detect.


def test_names_are_split() -> None:
    names = ["_told", "read_rows", "HTTPServer", "_HostReport", "handleError", "ipv6", "to", "_"]
    assert [split_name(name) for name in names] == [
        ["told"],
        ["read", "rows"],
        ["http", "server"],
        ["host", "report"],
        ["handle", "error"],
        ["ipv", "6"],
        ["to"],
        [],
    ]


def test_functions_are_listed() -> None:
    package = made_up(
        a__one="class A(torch.nn.Module):\n def measure(self):\n  def inner(): pass\n def _hide(self): pass",
        b__two="class B(A): \n def count(self): pass\nclass C(Exception):\n def shown(self): pass",
        b__three="class D(Generic[T]):\n async def ask(self): pass\n def __len__(self): pass\ndef run(): pass",
    )
    assert list_outside_classes(package) == {"A", "B"}
    functions = list(list_functions(package))
    assert [name for _, name in functions] == ["_hide", "inner", "shown", "run", "ask"]
    assert list_one_word_functions(functions) == [
        "a/one.py:4 _hide",
        "a/one.py:3 inner",
        "b/two.py:4 shown",
        "b/three.py:2 ask",
    ]


def test_names_in_three_rooms_are_detected() -> None:
    text = "class Report: pass"
    package = made_up(a__report=text, b__x__report=text, c__other=text, c__sft="", cli__sft="", config__sft="")
    assert list_crowded(list_classes(package)) == ["Report: a, b, c"]
    assert list_crowded(list_stems(package)) == ["sft: c, cli, config"]
    commands = made_up(cli__sft="", config__sft="", recipes__training__sft="", a____init__="", b____init__="")
    assert list_crowded(list_stems(commands)) == []
    assert get_room("app.py") == ""


def test_large_folders_are_detected() -> None:
    package = {f"a/b/file{number}.py": ast.parse("") for number in range(FILES_PER_FOLDER)}
    assert list_large_folders(package) == []
    assert list_large_folders(package | made_up(a__b__more="", a__c__more="")) == ["a/b: 21 files"]


def test_unused_words_are_detected() -> None:
    package = made_up(
        a__found="class Told: pass\ndef held_out(): pass",
        a__fine="def _share(): pass\ndef settle_batch(): pass\nclass OpenedModel: pass\ndef share_blocks(): pass",
    )
    assert [line.partition(";")[0] for line in list_dialect(package)] == [
        "a/found.py found: not 'found'",
        "a/found.py:1 Told: not 'told'",
        "a/fine.py:1 _share: not 'share'",
        "a/fine.py:2 settle_batch: not 'settle'",
    ]


# The glossary.

LANGUAGES = ("en", "zh")


def read_glossary(language: str) -> dict[str, list[str]]:
    """Return the terms of a glossary page in their order, each with the other cells of its row."""
    text = (tree.ROOT / "docs" / language / "reference" / "glossary.md").read_text(encoding="utf-8")
    return parse_glossary(text)


def parse_glossary(text: str) -> dict[str, list[str]]:
    """Return term -> cells of the rows whose first cell begins with a bold term."""
    terms: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and (match := re.match(r"\*\*(.+?)\*\*", cells[0])):
            assert match[1] not in terms, f"two rows of {match[1]}"
            terms[match[1]] = cells[1:]
    return terms


def test_glossaries_have_the_same_rows() -> None:
    english, chinese = (read_glossary(language) for language in LANGUAGES)
    assert list(english) == list(chinese)
    assert len(english) >= TERMS
    for term, cells in english.items():
        assert len(cells) == len(chinese[term]) == 4, term
        assert cells[1] == chinese[term][1], f"{term}: the files differ"
        quoted = [re.findall(r"`[^`]+`", row[2]) for row in (cells, chinese[term])]
        assert quoted[0] == quoted[1], f"{term}: the options differ"
        assert all(cells) and all(chinese[term]), f"{term}: an empty cell"


def test_glossary_names_files_that_exist() -> None:
    wrong = []
    for term, (_, files, _, _) in read_glossary("en").items():
        named = re.findall(r"`([\w/]+\.py)`", files)
        wrong += [
            f"{term}: {name}"
            for name in named
            if not (tree.SRC / name).is_file() and not (tree.ROOT / "src" / name).is_file()
        ]
        assert named, f"{term} names no file"
    assert not wrong, "no such files under src/anabatic:\n  " + "\n  ".join(wrong)


def test_glossary_names_settings_that_exist() -> None:
    reference = (tree.ROOT / "docs" / "en" / "reference" / "config.md").read_text(encoding="utf-8")
    settings = set(re.findall(r"^\| `([\w.]+)` \|", reference, re.M))
    files = {"csv", "html", "json", "jsonl", "log", "yaml"}
    wrong = [
        f"{term}: {name}"
        for term, (_, _, shown, _) in read_glossary("en").items()
        for name in re.findall(r"`([a-z]\w*\.\w+)`", shown)
        if name not in settings and name.rpartition(".")[2] not in files
    ]
    assert not wrong, "no such settings:\n  " + "\n  ".join(wrong)


def test_terms_are_used_words() -> None:
    unused = {"_".join(split_name(term)) for term in read_glossary("en")} & (set(UNUSED_WORDS) | set(DIALECT))
    assert not unused, unused


def test_rows_of_a_glossary_are_read() -> None:
    text = "| Term | Meaning |\n|---|---|\n| **rank** 编号 | a number | `core/log.py` |\n**no** row\n"
    assert parse_glossary(text) == {"rank": ["a number", "`core/log.py`"]}


def test_the_main_block_is_the_last_of_its_module(package: Package) -> None:
    """What is defined after it does not exist yet when the module is run."""
    late = []
    for name, module in package.items():
        for statement in module.body[:-1]:
            if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
                late.append(f"{name}:{statement.lineno}")
    assert not late
