"""Reading recipes: YAML 1.2 words, lines, duplicates, bombs, and files that are no recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
    | st.sampled_from(["on", "no", "null", "~", "", "1e-5", "010", "1_000", "0x1f", "<<", "=", "1:30", "2001-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8", categories=["L", "N"]), max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("1e-5", 1e-5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("200_000", 200_000),
        ("0x10", 16),
        ("010", 10),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("'12'", "12"),
        ("", None),
        ("~", None),
        ("a#b@0.5", "a#b@0.5"),
    ],
)
def test_words_follow_yaml_1_2(text: str, value: object) -> None:
    read = yaml_reader.parse_yaml(f"key: {text}\n", "r").tree["key"]
    assert read == value and type(read) is type(value)


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(categories=["L"]), min_size=1, max_size=8), TREES, max_size=5))
def test_dump_reads_back(tree: dict[str, object]) -> None:
    assert yaml_reader.parse_yaml(yaml_reader.dump_yaml(tree), "dump").tree == tree


@pytest.mark.process
@given(TREES.filter(lambda value: not isinstance(value, (dict, list))))
def test_scalar_is_one_line(value: object) -> None:
    text = yaml_reader.dump_scalar(value)
    assert yaml_reader.parse_yaml(f"key: {text}\n", "r").tree["key"] == value


@settings(deadline=None)
@given(st.text(max_size=60) | st.text("{}[]&*!|>'\"%@`:-,#? \n\tab1", max_size=40))
def test_any_text_is_settings_or_an_error(text: str) -> None:
    try:
        source = yaml_reader.parse_yaml(text, "any")
    except ConfigError as error:
        assert error.hint and "any" in str(error)
    else:
        assert isinstance(source.tree, dict)


def test_lines_are_known() -> None:
    source = yaml_reader.parse_yaml("a: 1\nb:\n  c:\n  - x\n  - y\n", "r.yaml")
    assert source.format_location(("b", "c", 1)) == "r.yaml:5: "
    assert source.format_location(("b", "c")) == "r.yaml:3: " or source.format_location(("b", "c")) == "r.yaml:4: "


def test_empty_text_is_an_empty_recipe() -> None:
    for text in ("", "\n\n", "# only a comment\n", "---\n", "null\n"):
        assert yaml_reader.parse_yaml(text, "r").tree == {}


def test_merge_keys_and_anchors() -> None:
    text = "base: &base {lr: 1, beta: 2}\nown:\n  <<: *base\n  lr: 3\n"
    assert yaml_reader.parse_yaml(text, "r").tree["own"] == {"lr": 3, "beta": 2}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{below}'] * 9)}]\n" for name, below in zip("bcdefgh", "abcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 'r:3: key "a" is given twice (first on line 1)'),
        ("s:\n  a: 1\n  a: 1\n", 'r:3: key "a" is given twice (first on line 2)'),
        ("- a\n", "holds a list"),
        ("word\n", 'holds "word"'),
        ("a: [1\n", "is not YAML"),
        ("a:\n\tb: 1\n", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("a: !!python/object:os.system x\n", "tag"),
        ("a: !!int x\n", "cannot be read as int"),
        ("a: " + "9" * 5000 + "\n", "cannot be read as int"),
        ("? [1]\n: x\n", "a key is a list"),
        ("a: &a [*a]\n", "too deep"),
        ("a: " + "[" * 5000 + "\n", "r"),
        ("<<: 3\n", "`<<` needs a section"),
        (BOMB, "more than 100,000 values"),
    ],
)
def test_broken_yaml(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yaml_reader.parse_yaml(text, "r")
    assert message in str(caught.value)
    assert caught.value.hint and "\n" not in caught.value.render().split("\nhint: ")[1]


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    good = tmp_path / "recipe.yaml"
    good.write_text("a: 1\n")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\x00\xff\xfe" * 100)
    zeros = tmp_path / "zeros.yaml"
    zeros.write_bytes(b"a: 1\n\0\0")
    large = tmp_path / "large.yaml"
    large.write_text("# x\n" * 300_000)
    for path, message in [
        (tmp_path / "recipes.yaml", "does not exist"),
        (tmp_path / "no" / "recipe.yaml", "does not exist"),
        (tmp_path, "is a folder"),
        (binary, "is not text"),
        (zeros, "is not text"),
        (large, "too much for a recipe"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            yaml_reader.read_yaml(path)
        assert caught.value.hint
    with pytest.raises(ConfigError) as caught:
        yaml_reader.read_yaml(tmp_path / "recipe.yam")
    assert "recipe.yaml" in caught.value.hint


def test_windows_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes("\ufeffa: 1\r\nb: é\r\n".encode())
    assert yaml_reader.read_yaml(path).tree == {"a": 1, "b": "é"}
