"""What comes from outside is read in one way: JSON through `core/json_text.py`, which refuses what nothing can walk."""

from __future__ import annotations

import ast

from house import tree

OWN = {
    "core/json_text.py": "the reader itself",
    "data/tokenizer_train.py": "what a tokenizer here says of itself",
    "doctor/bundle.py": "a report that was just made",
    "evals/dealt.py": "between the ranks of a job",
    "infer/server/served.py": "a value that was just written",
    "infer/tool_calls.py": "strict JSON of a model; its depth is looked at there",
    "launch/": "between the processes of a start",
    "rl/": "between the processes of a job",
    "sandbox/calls.py": "messages of a hostile program; what they hold is walked through as it is decoded",
    "sandbox/channel.py": "what a keeper was told by us",
    "sim/report.py": "what simulated devices have written",
    "train/bad_steps.py": "between the ranks of a job",
    "trajectory/segment.py": "a text that was just made",
}
"""Files that call Python's reader themselves, and what they read; a path that ends in `/` is a room."""


def test_json_has_one_reader() -> None:
    found = []
    for path in tree.sources():
        name = path.relative_to(tree.SRC).as_posix()
        for node in ast.walk(tree.parse(path)):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.load", "json.loads"):
                continue
            if not any(name == own or (own.endswith("/") and name.startswith(own)) for own in OWN):
                found.append(f"{tree.name(path)}:{node.lineno}")
    assert not found, f"read it with json_text.loads, or name the file in OWN: {', '.join(found)}"


def test_the_table_is_true() -> None:
    for own in OWN:
        paths = sorted((tree.SRC / own).rglob("*.py")) if own.endswith("/") else [tree.SRC / own]
        assert any("json.load" in path.read_text(encoding="utf-8") for path in paths), own
