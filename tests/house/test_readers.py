"""What comes from outside is read in one way: JSON through `core/json_reader.py`, which refuses what nothing can
walk."""

from __future__ import annotations

import ast

from house import tree

OWN = {
    "core/json_reader.py": "the reader itself",
    "data/tokenizer/bpe_training.py": "what a tokenizer here says of itself",
    "doctor/bundle.py": "a report that was just made",
    "evals/distributed_model.py": "between the ranks of a job",
    "infer/server/model_registry.py": "a value that was just written",
    "infer/web/libraries.py": "a table of this package; builds load the file by itself",
    "launch/": "between the processes of a start",
    "rl/": "between the processes of a job",
    "sandbox/program_monitor.py": "how a program's start went, from our own side of the start",
    "sandbox/remote_calls.py": "messages of a hostile program; what they hold is checked as it is decoded",
    "anabatic_sim/libraries/prebuilt_libraries.py": "a table of the package",
    "anabatic_sim/pytest_own_simulation.py": "between the processes of a test",
    "train/guards/bad_steps.py": "between the ranks of a job",
    "anabatic_vessels/words/segments.py": "a text that was just made",
}
"""Files that call Python's reader themselves, and what they read; a path that ends in `/` is a room."""


def test_json_has_one_reader() -> None:
    found = []
    for path in tree.sources():
        name = tree.source_name(path)
        for node in tree.nodes(path):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.load", "json.loads"):
                continue
            if not any(name == own or (own.endswith("/") and name.startswith(own)) for own in OWN):
                found.append(f"{tree.name(path)}:{node.lineno}")
    assert not found, f"read it with json_reader.loads, or name the file in OWN: {', '.join(found)}"


def test_the_table_is_true() -> None:
    for own in OWN:
        paths = [path for path in tree.sources() if tree.source_name(path).startswith(own)]
        assert paths, f"{own} does not exist"
        assert any("json.load" in path.read_text(encoding="utf-8") for path in paths), own


GUARDS = {
    "config/loading/validation.py": "words a hint alone",
    "convert/shell_parser.py": "asks whether a word is a file descriptor",
    "core/formatting.py": "the reader itself",
    "models/lora/adapter.py": "leaves out numbered modules of a hint",
}
"""Files that ask whether a text is a number without making one of it."""


def test_whole_numbers_have_one_reader() -> None:
    found = []
    for path in tree.sources():
        for node in tree.nodes(path):
            is_guard = isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isdecimal", "isnumeric")
            if is_guard and tree.source_name(path) not in GUARDS:
                found.append(f"{tree.name(path)}:{node.lineno}")
    assert not found, f"`int` refuses what they take: read it with formatting.parse_whole: {', '.join(found)}"
