"""YAML in and out: YAML 1.2 words, line numbers, no duplicate keys, no surprises.

YAML 1.1, which PyYAML follows, reads `on`, `no`, `1:30` and `1e-5` as true, false, 90 and a string. Here the
core schema of YAML 1.2 holds (https://yaml.org/spec/1.2.2/#103-core-schema), with `_` allowed inside whole
numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean, format_size

MAX_BYTES = 1 << 18
"""A recipe is written by hand; more than this is some other file."""
MAX_VALUES = 100_000
"""Values after aliases are followed: nine lines of YAML can name a billion."""

_MAX_DIGITS = 300
"""Of the longest whole number: a few more, and it is no float either."""

KeyPath = tuple["str | int", ...]
"""Keys and list positions from the root to a value."""

_TAG_PREFIX = "tag:yaml.org,2002:"
_IMPLICIT_TYPES = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _NativeLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A tenth of the time, for files of this package: libyaml overflows the stack where values are nested deeply."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    breaks = any(character in text for character in "\x85\u2028\u2029\ufeff")
    return dumper.represent_scalar(_TAG_PREFIX + "str", text, style='"' if breaks else None)


_Dumper.add_representer(str, _represent_text)
for _name, _pattern, _first in _IMPLICIT_TYPES:
    for _side in (_Loader, _NativeLoader, _Dumper):
        _side.add_implicit_resolver(_TAG_PREFIX + _name, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass
class YamlSource:
    """One file, read: the tree of its values and the line (from 1) of each."""

    origin: str
    tree: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def format_location(self, path: KeyPath) -> str:
        """`recipe.yaml:12: `, or `recipe.yaml: ` when the line is not known."""
        line = self.lines.get(path)
        return f"{self.origin}:{line}: " if line else f"{self.origin}: "


def read_yaml(path: str | FilePath) -> YamlSource:
    """Read a recipe.

    Raises:
        ConfigError: the file is missing, a folder, binary, too large, not YAML or not a mapping of keys.
    """
    return parse_yaml(read_text(FilePath(path)), str(path))


def read_own_yaml(path: FilePath) -> dict[str, Any]:
    """Return the tree of a file of this package, which was checked by its tests."""
    return parse_yaml(path.read_text(encoding="utf-8"), str(path), _NativeLoader).tree


def parse_yaml(text: str, origin: str, loader: type = _Loader) -> YamlSource:
    """Read a recipe from `text`; `origin` names it in messages. An empty text is an empty recipe.

    Raises:
        ConfigError: as for `read_yaml`.
    """
    builder = _TreeBuilder(origin)
    try:
        root = yaml.compose(text, Loader=loader)
        tree = None if root is None else builder.build_value(root, ())
    except yaml.YAMLError as error:
        raise _syntax_error(origin, error) from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: values are nested too deep", "a recipe has two or three levels") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else f'"{str(tree)[:40]}"'
        raise ConfigError(f"{origin}: holds {kind}, not settings", "write `key: value` lines")
    return YamlSource(origin, tree, builder.lines)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return `tree` as YAML that `parse_yaml` reads back to equal values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def dump_scalar(value: Any) -> str:
    """Return one value as it is written in YAML, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, width=float("inf"), default_flow_style=True)
    return text.removesuffix("\n...\n").rstrip("\n")


def read_text(path: FilePath, kind: str = "a YAML file") -> str:
    """Return the text of a file that somebody has written by hand.

    Raises:
        ConfigError: it is missing, a folder, larger than such a file is, or no text.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", "give the recipe file inside it")
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            length = format_size(path.stat().st_size)
            raise ConfigError(f"{path} has {length}, too much for a recipe", f"give {kind}, not data")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", _suggest_file(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", "check its permissions") from error
    try:
        found = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text (byte {error.start} is not UTF-8)", f"give {kind}") from error
    if "\0" in found:
        raise ConfigError(f"{path} is not text (byte {data.index(0)} is zero)", f"give {kind}")
    return found


def _suggest_file(path: FilePath) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either; paths start at the current folder"
    names = [other.name for other in path.parent.iterdir() if other.suffix in (".yaml", ".yml")]
    if guess := did_you_mean(path.name, names):
        return guess.strip()
    return f"YAML files there: {', '.join(sorted(names)[:8])}" if names else f"{path.parent} holds no YAML file"


def _syntax_error(origin: str, error: yaml.YAMLError) -> ConfigError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(f"{origin}: is not YAML: {' '.join(str(error).split())}", "give a YAML file")
    mark = error.problem_mark or error.context_mark
    line = f":{mark.line + 1}" if mark else ""
    problem = error.problem or error.context or "broken"
    hint = "indent with spaces and write `key: value`"
    if "\\t" in problem:
        hint = "indent with spaces; YAML does not allow tabs"
    elif "single document" in f"{error.context} {problem}":
        hint = "keep one document a file; remove the second `---`"
    return ConfigError(f"{origin}{line}: is not YAML: {problem}", hint)


class _TreeBuilder:
    """Turns YAML nodes into plain values; counts them and remembers their lines."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.lines: dict[KeyPath, int] = {}
        self.count = 0
        self.loader = _Loader("")

    def make_error(self, node: yaml.Node, message: str, hint: str) -> ConfigError:
        return ConfigError(f"{self.origin}:{node.start_mark.line + 1}: {message}", hint)

    def build_value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self.make_error(node, f"more than {MAX_VALUES:,} values, aliases included", "write fewer")
        self.lines.setdefault(path, node.start_mark.line + 1)
        plain = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if isinstance(node, yaml.CollectionNode) and node.tag != _TAG_PREFIX + plain:
            raise self.make_error(
                node, f"tag {node.tag} is not known here", "remove the tag: nothing is made or run by one"
            )
        if isinstance(node, yaml.MappingNode):
            return self.build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build_value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self.build_scalar(node)

    def build_scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_TAG_PREFIX)
        convert = _SCALAR_PARSERS.get(kind)
        if convert is None:
            raise self.make_error(node, f"tag {node.tag} is not known here", "remove the tag, or quote the text")
        try:
            return convert(node.value)
        except (ValueError, KeyError) as error:
            raise self.make_error(node, f'"{node.value[:40]}" cannot be read as {kind}', "check the value") from error

    def build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own_keys: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.make_error(key_node, "a key is a list or a section", "quote text that holds `{` or `[`")
            if key_node.tag == _TAG_PREFIX + "merge":
                merged = {**self.merge_sections(value_node, path), **merged}
                continue
            key = key_node.value
            inner = (*path, key)
            if key in own_keys:
                first = self.lines.get(inner)
                twice = f'key "{key}" is given twice (first on line {first})'
                raise self.make_error(key_node, twice, "keep one of them")
            self.lines[inner] = key_node.start_mark.line + 1
            own_keys[key] = self.build_value(value_node, inner)
        return {**merged, **own_keys}

    def merge_sections(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in parts:
            value = self.build_value(part, path)
            if not isinstance(value, dict):
                raise self.make_error(part, "`<<` needs a section", "write `<<: *name` with an anchor on a section")
            result = {**value, **result}
        return result


def _parse_int(text: str) -> int:
    """Return a whole number.

    Raises:
        ValueError: it is longer than any number that a setting has; Python refuses to write such a one.
    """
    digits = text.replace("_", "")
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"{len(digits):,} digits")
    if digits.startswith(("0x", "0o")):
        return int(digits, 0)
    return int(digits)


def _parse_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan").replace("_", ""))


_SCALAR_PARSERS: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _parse_int,
    "float": _parse_float,
    "str": str,
}
