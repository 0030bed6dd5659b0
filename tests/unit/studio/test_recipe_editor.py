"""Changing one setting in the text of a recipe changes that setting and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError
from anabatic_studio.recipe_editor import remove_value, set_value

TEXT = """\
# what it is for
model: base   # a folder
data:
  # two files
  train:
  - a.jsonl
  - b.jsonl  # the second
batch: {seq_len: 128}
optim:
  lr: 1e-4

# the end
"""
KEYS = st.sampled_from(
    [
        "model",
        "out",
        "data.train",
        "data.valid",
        "batch.seq_len",
        "batch.rows",
        "optim.lr",
        "optim.name",
        "a.b.c",
        "log.x",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=20)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=4)


def read(text: str) -> dict[str, object]:
    return yaml_reader.parse_yaml(text, "recipe").tree


def nested(tree: dict[str, object], key: str, value: object) -> dict[str, object]:
    name, _, rest = key.partition(".")
    below = tree.get(name)
    inner = nested(below if isinstance(below, dict) else {}, rest, value) if rest else value
    return {**tree, name: inner}


def test_comments_and_layout_stay():
    changed = set_value(set_value(TEXT, "model", "runs/a"), "optim.name", "adamw")
    assert changed == TEXT.replace("base ", "runs/a ").replace("  lr: 1e-4\n", "  lr: 1e-4\n  name: adamw\n")
    assert remove_value(changed, "optim.name") == TEXT.replace("base ", "runs/a ")


def test_a_list_is_replaced_and_a_section_is_added():
    changed = set_value(set_value(TEXT, "data.train", ["c.jsonl"]), "schedule.max_steps", 5)
    assert "  train: [c.jsonl]\nbatch:" in changed
    assert "a.jsonl" not in changed and "# two files" in changed
    assert read(changed)["schedule"] == {"max_steps": 5}
    assert read(set_value(TEXT, "batch.seq_len", "0}"))["batch"] == {"seq_len": "0}"}
    assert read(set_value("~ # nothing yet\n", "model", "a")) == {"model": "a"}
    assert set_value("", "data.train", ["a"]) == "data:\n  train:\n  - a\n"


@given(st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=6))
def test_any_changes_have_their_values(changes):
    text, expected = TEXT, read(TEXT)
    for key, value in changes:
        text, expected = set_value(text, key, value), nested(expected, key, value)
        assert read(text) == expected
    assert all(comment in text for comment in ("# what it is for", "# the end"))


@given(st.lists(KEYS, max_size=8))
def test_removed_settings_are_gone_and_others_stay(keys):
    text = TEXT
    for key in keys:
        text = remove_value(text, key)
        node: object = read(text)
        for name in key.split("."):
            node = node.get(name, {}) if isinstance(node, dict) else {}
        assert node == {}
    assert read(remove_value(TEXT, "batch.seq_len")).keys() == read(TEXT).keys() - {"batch"}


@given(st.text(max_size=60), KEYS, SCALARS)
def test_any_text_is_changed_or_refused(text, key, value):
    try:
        changed = set_value(text, key, value)
    except ConfigError:
        return
    node: object = read(changed)
    for name in key.split("."):
        assert isinstance(node, dict)
        node = node[name]
    assert node == value or isinstance(value, str)


def test_what_comes_from_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="cannot be changed"):
        set_value("base: &b {lr: 1}\noptim: *b\n", "optim.lr", 2)
