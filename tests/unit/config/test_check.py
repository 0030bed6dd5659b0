"""Types of settings: what is accepted, what is refused, and what the message says."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.loading import command_table, validation
from anabatic.config.loading.validation import UntypedText
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError


@dataclass(kw_only=True)
class Inner:
    """A section."""

    steps: int = 1
    """Steps."""
    rate: float | None = None
    """Rate."""


@dataclass(kw_only=True)
class Outer:
    """A job."""

    name: str = "x"
    """Name."""
    kind: Literal["auto", "on", "off"] = "auto"
    """Kind."""
    flag: bool = False
    """Flag."""
    words: list[str] = field(default_factory=list)
    """Words."""
    table: dict[str, str] = field(default_factory=dict)
    """Table."""
    inner: Inner = field(default_factory=Inner)
    """Inner."""


def checked(tree: Any) -> dict[str, Any]:
    return validation.check_section(tree, Outer, validation.SettingNamer("r.yaml: "))


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"inner": {}},
        {"inner": {"steps": 3, "rate": 1e-5}},
        {"inner": {"rate": None}},
        {"kind": "on", "flag": True, "words": ["a"], "table": {"a": "b"}},
    ],
)
def test_right_types_pass_unchanged(tree: dict[str, Any]) -> None:
    assert checked(tree) == tree


@pytest.mark.parametrize(
    ("tree", "result"),
    [
        ({"inner": {"rate": "1e-5"}}, {"inner": {"rate": 1e-5}}),
        ({"inner": {"rate": 2}}, {"inner": {"rate": 2.0}}),
        ({"inner": {"steps": UntypedText("1_000")}}, {"inner": {"steps": 1000}}),
        ({"inner": {"rate": UntypedText("null")}}, {"inner": {"rate": None}}),
        ({"flag": UntypedText("True")}, {"flag": True}),
        ({"words": UntypedText("a")}, {"words": ["a"]}),
        ({"words": UntypedText("[]")}, {"words": []}),
        ({"name": UntypedText("12")}, {"name": "12"}),
        ({"kind": UntypedText("off")}, {"kind": "off"}),
    ],
)
def test_converted(tree: dict[str, Any], result: dict[str, Any]) -> None:
    assert checked(tree) == result


@pytest.mark.parametrize(
    ("tree", "message", "hint"),
    [
        ({"inner": {"steps": 1.5}}, "r.yaml: inner.steps is 1.5, expected a whole number", "digits"),
        ({"inner": {"steps": 1e3}}, "inner.steps is 1000.0, expected a whole number", "write 1000"),
        ({"inner": {"steps": True}}, "inner.steps is true, expected a whole number", "digits"),
        ({"inner": {"steps": "10"}}, 'inner.steps is "10"', "remove the quotes: 10"),
        ({"inner": {"steps": None}}, "inner.steps is null", "leave it out"),
        ({"inner": {"steps": [1]}}, "inner.steps is a list of 1", "digits"),
        ({"inner": {"steps": UntypedText("1.5")}}, 'inner.steps is "1.5"', "digits"),
        ({"inner": {"steps": UntypedText("1e3")}}, 'inner.steps is "1e3"', "digits"),
        ({"inner": {"rate": "fast"}}, 'inner.rate is "fast", expected a number', "3e-4"),
        ({"inner": {"rate": math.nan}}, "expected a finite number", "3e-4"),
        ({"inner": {"rate": math.inf}}, "expected a finite number", "3e-4"),
        ({"inner": {"rate": 10**400}}, "expected a finite number", "3e-4"),
        ({"inner": {"rate": True}}, "inner.rate is true, expected a number", "3e-4"),
        ({"inner": "qwen"}, 'inner is "qwen", expected a section (keys such as steps, rate)', "lines below"),
        ({"inner": None}, "inner is null, expected a section", "lines below"),
        ({"inner": ["a"]}, "inner is a list of 1, expected a section", "lines below"),
        ({"flag": "maybe"}, 'flag is "maybe", expected true or false', "true or false"),
        ({"flag": "true"}, 'flag is "true", expected true or false', "without quotes"),
        ({"flag": 1}, "flag is 1, expected true or false", "true or false"),
        ({"kind": "of"}, 'kind is "of", expected one of auto, on, off', 'Did you mean "off"?'),
        ({"kind": True}, "kind is true, expected one of auto, on, off", "choose from"),
        ({"name": 12}, "name is 12, expected text", 'quotes: "12"'),
        ({"name": ["a"]}, "name is a list of 1, expected text", "one value"),
        ({"words": {"a": "b"}}, "words is a section, expected a list of texts", "[...]"),
        ({"words": 2}, "words is 2, expected a list of texts", "[2]"),
        ({"words": ["a", 2]}, "words[1] is 2, expected text", "quotes"),
        ({"table": {"a": 1}}, "table.a is 1, expected text", "quotes"),
        ({"table": "a"}, 'table is "a", expected a section', "lines below"),
        ({"nam": "x"}, 'r.yaml: nam is not a known setting. Did you mean "name"?', "top level has: name"),
        ({"inner": {"stepz": 1}}, 'inner.stepz is not a known setting. Did you mean "steps"?', "inner has: steps"),
        ({"rate": 1}, "rate is not a known setting.", "write it as inner.rate"),
        ("text", 'is "text", expected a section', "lines below"),
    ],
)
def test_refused(tree: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(tree)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_options_are_named_as_typed() -> None:
    with pytest.raises(ConfigError, match='^--schedule.max-steps is "1.5", expected a whole number$'):
        validation.check_section({"schedule": {"max_steps": UntypedText("1.5")}}, SftJob, validation.OptionNamer())


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.text(max_size=8).map(UntypedText),
)
LEAVES = sorted(
    {
        (name, key)
        for name, row in command_table.COMMANDS.items()
        for key, _ in validation.iter_settings(row.import_job_class())
    }
)


def _is(value: Any, hint: Any) -> bool:
    """The slow reference: does `value` have exactly the type `hint`?"""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is list:
        return type(value) is list and all(_is(one, arguments[0]) for one in value)
    if origin is dict:
        return type(value) is dict and all(_is(one, arguments[1]) for one in value.values())
    if origin is Literal:
        return value in arguments
    if dataclasses.is_dataclass(hint):
        return type(value) is dict
    if arguments:
        return any(_is(value, one) for one in arguments)
    return type(value) is hint and (hint is not float or math.isfinite(value))


@given(st.sampled_from(LEAVES), ANY)
def test_a_wrong_type_is_never_accepted(leaf: tuple[str, str], value: Any) -> None:
    name, key = leaf
    cls = command_table.COMMANDS.find_row(name).import_job_class()
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    try:
        result: Any = validation.check_section(tree, cls, validation.SettingNamer())
    except ConfigError as error:
        assert key in str(error) and error.hint
        return
    for part in key.split("."):
        result = result[part]
    hint = dict(validation.iter_settings(cls))[key]
    assert _is(result, hint)
    rounded = float(value) if type(result) is float and type(value) is int else value  # above 2^53
    if not isinstance(value, str) and result != rounded:
        raise AssertionError(f"{value!r} became {result!r}")
