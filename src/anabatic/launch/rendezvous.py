"""The facts that machines of a job compare when they meet, and what their store's errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from platform import python_version
from typing import Any

COMPARED_PACKAGES = ("anabatic", "torch", "torch_npu", "transformers", "peft", "safetensors")
_UNKNOWN_GREETING = "invalid value returned from server"
"""Part of the error of torch's store when the server does not understand its greeting (torch 2.13, TCPStore.cpp,
ping)."""


def collect_job_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that must, or should, be equal on every machine.

    Args:
        recipe: the resolved settings, flat: dotted key -> value.
    """
    versions: dict[str, str | None] = {"python": python_version()}
    for name in COMPARED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"recipe": dict(recipe), "versions": versions}


def describe_differences(first: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]], part: str) -> list[str]:
    """Return one line per difference from machine 0 in one part of the facts.

    Args:
        first: the facts of machine 0.
        others: name of a machine, such as `machine 3` -> its facts.
    """
    expected = first[part]
    lines = []
    for name, facts in others.items():
        for key in sorted(expected.keys() | facts[part].keys()):
            if expected.get(key) != (actual := facts[part].get(key)):
                lines.append(
                    f"{key} is {_format_value(expected.get(key))} on machine 0 and {_format_value(actual)} on {name}"
                )
    return lines


def _format_value(value: Any) -> str:
    return "missing" if value is None else str(value)


def describe_store_error(error: BaseException) -> str:
    """Return one line about an error of torch's store."""
    message = " ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())
    return "what answers there is another program, no training" if _UNKNOWN_GREETING in message else message[:400]
