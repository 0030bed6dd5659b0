"""Sizes, flags and lists of a config.json, checked; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from anabatic.core.errors import DataError

MAX_SIZE = 10**9
"""Upper bound of every size of a model."""
MAX_BLOCKS = 10_000
"""Upper bound of the blocks of a model, which are listed one by one."""
FAMILY_NAMES = "Qwen2, Qwen3, Qwen3.5, Llama, Mistral, Gemma, GLM, DeepSeek-V3, gpt-oss, Kimi or Phi-3"


def refuse_size(config: Mapping[str, Any], key: str, name: str) -> NoReturn:
    """Reject a model because of one of its sizes.

    Raises:
        DataError: always.
    """
    value = repr(config.get(key))[:60]
    raise DataError(f"{name}: {key} is {value}, not a whole number from 1 to {MAX_SIZE:,}", "check the file")


@dataclass(frozen=True)
class ConfigValues:
    """A config.json and its name.

    Every method raises DataError for a value of another kind.
    """

    config: Mapping[str, Any]
    name: str

    @property
    def model_type(self) -> str:
        """The family."""
        return str(self.config.get("model_type", ""))

    def require_size(self, *keys: str) -> int:
        """Return the first size of `keys` that is set; it must be there."""
        if not any(self.config.get(key) is not None for key in keys):
            raise DataError(
                f"{self.name} has no {keys[0]}", f"give the config.json of a causal language model like {FAMILY_NAMES}"
            )
        found = next(key for key in keys if self.config.get(key) is not None)
        return self.read_size(*keys) or refuse_size(self.config, found, self.name)

    def read_size(self, *keys: str, default: int = 0) -> int:
        """Return the first size of `keys` that is set; else `default`."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
                refuse_size(self.config, key, self.name)
            return int(value)
        return default

    def require_side(self, key: str) -> int:
        """Return the side of a square, which may be written as height and width."""
        value = self.config.get(key)
        return ConfigValues({key: value[0] if isinstance(value, list) and value else value}, self.name).require_size(
            key
        )

    def read_flag(self, key: str, default: bool = False) -> bool:
        """Return a flag; a number or text is refused."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DataError(f"{self.name}: {key} is {value!r:.60}, not true or false", "check the file")
        return value

    def read_names(self, key: str, length: int, allowed: tuple[str, ...]) -> list[str] | None:
        """Return a list of one of `allowed` for each block; None if the key is not set."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            told = f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.60}"
            raise DataError(f"{self.name}: {key} is {told}, not a list of {length} names", "check the file")
        unknown = next((entry for entry in value if entry not in allowed), None)
        if unknown is not None:
            raise DataError(
                f"{self.name}: {key} has {unknown!r:.60}, which is not planned for {self.model_type or 'this model'}",
                f"these are: {', '.join(allowed)}",
            )
        return value

    def read_block_numbers(self, key: str) -> frozenset[int]:
        """Return a list of numbers of blocks; empty if the key is not set."""
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(entry) is not int for entry in value):
            raise DataError(f"{self.name}: {key} is {value!r:.60}, not a list of whole numbers", "check the file")
        return frozenset(value)

    def read_section(self, key: str) -> ConfigValues:
        """Return an object inside; empty if the key is not set."""
        value = self.config.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise DataError(f"{self.name}: {key} is {value!r:.60}, not an object", "check the file")
        return ConfigValues(value, f"{self.name}: {key}")

    def refuse_other(self, key: str, *usual: Any) -> None:
        """Reject a setting that changes the blocks in a way that is not known here."""
        value = self.config.get(key)
        if value is not None and value not in usual:
            raise DataError(
                f"{self.name}: {key} is {value!r:.60}, and blocks of that kind are not planned",
                f"planned: {key} {' or '.join(map(str, usual))}",
            )

    def require_multiple(self, size_key: str, divisor_key: str) -> None:
        """Reject a size that is no multiple of another."""
        raise DataError(
            f"{self.name}: {size_key} {self.config[size_key]} is no multiple of {divisor_key}"
            f" {self.config[divisor_key]}",
            "check the file",
        )
