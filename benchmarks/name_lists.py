"""Options that take names with commas between them: what no program knows is refused before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the `type` of an argparse option that takes names of these, and returns them in the given order."""

    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r} among {', '.join(known)}")
        return names

    return parse_names


def parts_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the `type` of an argparse option that takes parts of these names, and returns every name that has one."""

    def parse_parts(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        if unknown := [part for part in parts if not any(part in name for name in known)]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is a part of none of {'; '.join(known)}")
        return [name for name in known if any(part in name for part in parts)]

    return parse_parts
