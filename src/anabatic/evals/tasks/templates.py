"""Templates of tasks: jinja2 in a sandbox, the row's columns as variables, and `row` for all of them; what they cannot
render is named by file and row."""

from __future__ import annotations

import functools
import re
from collections.abc import Container
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.readers.raw_rows import RawRow
from anabatic.data.readers.row_parsing import format_column_names

_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, LookupError, NameError, TypeError, ValueError, AttributeError, MemoryError,
    RecursionError, re.error,
)  # fmt: skip
"""Errors of a template, and of one that was compiled with a row."""
_ONE_EXPRESSION = re.compile(r"\s*\{\{((?:(?!\{\{|\}\}).)*)\}\}\s*", re.DOTALL)


def _to_letter(number: int) -> str:
    return chr(ord("A") + number)


def _regex_replace(text: str, pattern: str, by: str = "") -> str:
    return re.sub(pattern, by, text)


@functools.cache
def get_environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox: no attribute that begins with an underscore, nothing of a row can be changed.

    Filters beside jinja2's own: `letter` (0 -> A), `regex_replace(pattern, by)`.
    """
    made = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters["letter"] = _to_letter
    made.filters["regex_replace"] = _regex_replace
    return made


@functools.cache
def _compile_template(text: str, as_value: bool) -> Any:
    one = _ONE_EXPRESSION.fullmatch(text) if as_value else None
    if one is not None:
        return get_environment().compile_expression(one[1], undefined_to_none=False)
    return get_environment().from_string(text)


def check_template(text: str, what: str, columns: Container[str] = ()) -> None:
    """Compile a template.

    Args:
        columns: names that the rows have.

    Raises:
        ConfigError: it is no jinja2 template, or the bare name of a column.
    """
    if text and text in columns:
        raise ConfigError(
            f'{what} is the constant "{text}" for every row, and the rows have such a column',
            f'write "{{{{ {text} }}}}" for its content',
        )
    try:
        _compile_template(text, False)
    except (
        *_TEMPLATE_ERRORS,
        TemplateSyntaxError,
    ) as error:  # brackets nested too deep, a number of thousands of digits
        told = error.message if isinstance(error, TemplateSyntaxError) else str(error) or type(error).__name__
        raise ConfigError(f"{what} is no template: {told}", "write {{ column }} for a column") from error


def fill_text(template: str, row: RawRow, what: str) -> str:
    """Return a template filled with a row.

    Raises:
        DataError: a column is missing, or the template cannot be filled with this row.
    """
    return str(_fill_template(template, row, what, as_value=False))


def fill_value(template: Any, row: RawRow, what: str) -> Any:
    """Return the value of `{{ expression }}` as it is (a list, a number); of other templates the text; of lists the
    same for each entry; what is no text is returned as it is.

    Raises:
        DataError: as `fill_text`.
    """
    if isinstance(template, list):
        return [fill_value(one, row, what) for one in template]
    return _fill_template(template, row, what, as_value=True) if isinstance(template, str) else template


def _fill_template(template: str, row: RawRow, what: str, as_value: bool) -> Any:
    try:
        compiled = _compile_template(template, as_value)
        known = {"row": row.columns, **row.columns}
        made = compiled.render(known) if hasattr(compiled, "render") else compiled(known)
        if isinstance(made, StrictUndefined):
            str(made)  # raises, with the name
        return made
    except UndefinedError as error:
        raise DataError(
            f"{row.location}: {what}: {error.message}; the row has {format_column_names(row.columns)}",
            "fix the row, or the template of the task",
        ) from error
    except _TEMPLATE_ERRORS as error:
        raise DataError(
            f"{row.location}: {what} cannot be made of this row: {type(error).__name__}: {error}",
            "fix the row, or the template of the task",
        ) from error
