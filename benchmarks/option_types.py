"""Types of the programs' options: what cannot be measured is refused before anything is measured."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Collection
from pathlib import Path


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


def positive_int(text: str) -> int:
    """The `type` of an argparse option that counts: rounds, threads, rows."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def positive_number(text: str) -> float:
    """The `type` of an argparse option that measures: seconds, gigabytes."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number


def positive_ints(text: str) -> list[int]:
    """The `type` of an argparse option that takes counts with commas between them."""
    return [positive_int(part) for part in text.split(",")]


def positive_numbers(text: str) -> list[float]:
    """The `type` of an argparse option that takes measures with commas between them."""
    return [positive_number(part) for part in text.split(",")]


def nanochat_checkout(text: str) -> str:
    """The `type` of an argparse option that takes a checkout of nanochat."""
    if not (Path(text) / "nanochat" / "gpt.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of nanochat: it has no nanochat/gpt.py")
    return text


def program(text: str) -> str:
    """The `type` of an argparse option that takes a program: a path, or a name on the PATH."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text} is no program that can be run")
    return text
