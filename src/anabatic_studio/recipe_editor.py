"""Changes single settings in the text of a recipe; comments, order and layout of everything else stay."""

from __future__ import annotations

from typing import Any

import yaml

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError

_INDENT = 2


def set_value(text: str, key: str, value: Any) -> str:
    """Return the recipe with the setting `key` (dotted) at `value`; a missing setting or section is appended.

    Raises:
        ConfigError: the text is not a recipe, or the setting comes from an alias or a merge (`<<`), which cannot be
            changed in one place.
    """
    path = key.split(".")
    before = yaml_reader.parse_yaml(text, "recipe").tree
    changed = _edit(text, path, value)
    if _parse_edited(changed) != _with_value(before, path, value):
        raise ConfigError(f"{key} cannot be changed in this layout", "change it in the text")
    return changed


def remove_value(text: str, key: str) -> str:
    """Return the recipe without the setting `key`, which then has its default; an empty section goes, too.

    Raises:
        ConfigError: as for `set_value`.
    """
    path = key.split(".")
    before = yaml_reader.parse_yaml(text, "recipe").tree
    nodes = _find_nodes(_compose(text), path)
    if len(nodes) < len(path):
        return text
    while len(nodes) > 1 and len(nodes[-2][1].value) == 1:
        nodes.pop()
    changed = _cut_entry(text, nodes)
    expected = _without_value(before, [node[0].value for node in nodes])
    if _parse_edited(changed) != expected:
        raise ConfigError(f"{key} cannot be removed in this layout", "change it in the text")
    return changed


def _parse_edited(text: str) -> dict[str, Any] | None:
    """Return what an edited text holds; None: the edit has broken it, an alias without its anchor for example."""
    try:
        return yaml_reader.parse_yaml(text, "recipe").tree
    except ConfigError:
        return None


def _compose(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _find_nodes(root: yaml.Node | None, path: list[str]) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the (key, value) nodes along `path`, as far as they exist."""
    nodes: list[tuple[yaml.Node, yaml.Node]] = []
    node = root
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            break
        entry = next((pair for pair in node.value if pair[0].value == name), None)
        if entry is None:
            break
        nodes.append(entry)
        node = entry[1]
    return nodes


def _edit(text: str, path: list[str], value: Any) -> str:
    root = _compose(text)
    nodes = _find_nodes(root, path)
    if len(nodes) == len(path):
        return _replace_value(text, nodes[-1][1], nodes[-1][0], value)
    rest = path[len(nodes) :]
    container = nodes[-1][1] if nodes else root
    if isinstance(container, yaml.ScalarNode) and nodes and container.value in ("", "~", "null"):
        return _replace_value(text, container, nodes[-1][0], _nest(rest, value))
    if isinstance(container, yaml.MappingNode) and container.flow_style:
        return _append_flow(text, container, rest, value)
    column = container.value[0][0].start_mark.column if isinstance(container, yaml.MappingNode) else 0
    entry = _indent(yaml_reader.dump_yaml(_nest(rest, value)), column)
    if not isinstance(container, yaml.MappingNode):  # an empty recipe, or `null`
        rest_of_text = text if root is None else text[: root.start_mark.index] + text[root.end_mark.index :]
        return f"{_end_line(rest_of_text)}{entry}"
    end = _find_entry_end(text, container.value[-1][1])
    return f"{_end_line(text[:end])}{entry}{text[end:]}"


def _replace_value(text: str, node: yaml.Node, key: yaml.Node, value: Any) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(value, dict) and value:
        block = _indent(yaml_reader.dump_yaml(value), key.start_mark.column + _INDENT)
        return f"{text[: key.end_mark.index]}:\n{block.rstrip()}{_rest_after(text, end)}"
    written = _dump_value(value)
    if isinstance(node, yaml.CollectionNode) and not node.flow_style or _is_block_scalar(text, node):
        return f"{text[: key.end_mark.index]}: {written}{_rest_after(text, _find_entry_end(text, node))}"
    if start == end:  # `key:` without a value
        return f"{text[: key.end_mark.index]}: {written}{text[_skip_colon(text, key) :]}"
    return f"{text[:start]}{written}{text[end:]}"


def _dump_value(value: Any) -> str:
    """Return a value on one line, quoted so that it may stand inside braces and brackets."""
    return yaml_reader.dump_scalar([value])[1:-1]


def _is_block_scalar(text: str, node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")


def _skip_colon(text: str, key: yaml.Node) -> int:
    return text.index(":", key.end_mark.index) + 1


def _rest_after(text: str, end: int) -> str:
    rest = text[end:]
    return rest if rest.startswith("\n") else f"\n{rest}"


def _append_flow(text: str, container: yaml.MappingNode, rest: list[str], value: Any) -> str:
    entry = _dump_value(_nest(rest, value))[1:-1]
    close = container.end_mark.index - 1
    separator = ", " if container.value else ""
    return f"{text[:close].rstrip()}{separator}{entry}{text[close:]}"


def _find_entry_end(text: str, node: yaml.Node) -> int:
    """Return the index behind the line with the last character of a value."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = node.end_mark.index
    if _is_block_scalar(text, node):
        end = len(text[:end].rstrip("\n"))
    newline = text.find("\n", end)
    return len(text) if newline < 0 else newline + 1


def _cut_entry(text: str, nodes: list[tuple[yaml.Node, yaml.Node]]) -> str:
    key, value = nodes[-1]
    parent = nodes[-2][1] if len(nodes) > 1 else None
    if isinstance(parent, yaml.MappingNode) and parent.flow_style:
        start, end = key.start_mark.index, value.end_mark.index
        rest = text[end:].lstrip()
        if rest.startswith(","):
            return f"{text[:start]}{rest[1:].lstrip()}"
        return f"{text[:start].rstrip().removesuffix(',')}{text[end:]}"
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    return text[:start] + text[_find_entry_end(text, value) :]


def _end_line(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _indent(block: str, column: int) -> str:
    return "".join(f"{' ' * column}{line}" for line in block.splitlines(keepends=True))


def _nest(path: list[str], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _with_value(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    result = dict(tree)
    inner = result.get(path[0])
    below = inner if isinstance(inner, dict) else {}
    result[path[0]] = value if len(path) == 1 else _with_value(below, path[1:], value)
    return result


def _without_value(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    result = dict(tree)
    if len(path) == 1:
        result.pop(path[0], None)
    elif isinstance(result.get(path[0]), dict):
        result[path[0]] = _without_value(result[path[0]], path[1:])
    return result
