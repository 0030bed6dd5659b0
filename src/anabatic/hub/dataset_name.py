"""The name of a data set on a hub: `hf:OWNER/NAME[@REVISION][/SUBSET][:SPLIT]`, `ms:` for ModelScope."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Literal

from anabatic.core.errors import ConfigError

Scheme = Literal["hf", "ms"]
SCHEMES: dict[Scheme, str] = {"hf": "Hugging Face", "ms": "ModelScope"}
USAGE = "write hf:OWNER/NAME[@REVISION][/SUBSET][:SPLIT][#ROWS][@WEIGHT], ms: for ModelScope"

_SPEC = re.compile(
    r"(?P<scheme>hf|ms):(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w-]+|[^@/:#\s]+))?"
    r"(?:/(?P<subset>[^@/:#]+))?"
    r"(?::(?P<split>[^@/:#]+))?"
    r"(?:\#(?P<rows>[^#@/.]*))?"
    r"(?:@(?P<weight>[^@/]*))?",
    re.ASCII,
)
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}|[^~]*~[0-9a-f]{16}")
"""A commit of Hugging Face, or a ModelScope revision with the digest of its file list."""


@dataclass(frozen=True)
class DatasetName:
    """A data set of a hub, as named in a recipe.

    Attributes:
        scheme: `hf` or `ms`.
        repo: `OWNER/NAME`.
        revision: branch, tag or commit; empty: the default branch.
        subset: the configuration, as the hub calls it; empty: the default one.
        split: empty: `train`, or the only one.
    """

    scheme: Scheme
    repo: str
    revision: str = ""
    subset: str = ""
    split: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        subset = f"/{self.subset}" if self.subset else ""
        split = f":{self.split}" if self.split else ""
        return f"{self.scheme}:{self.repo}{revision}{subset}{split}"

    @property
    def repo_name(self) -> str:
        """The name without subset and split."""
        return str(replace(self, subset="", split=""))

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which always has the same files."""
        return _COMMIT.fullmatch(self.revision) is not None

    def pin(self, commit: str) -> DatasetName:
        """Return the name with a commit as its revision."""
        return replace(self, revision=commit)


def is_dataset_spec(spec: str) -> bool:
    """Return whether a data source begins as the name of a data set on a hub."""
    return spec.partition(":")[0] in SCHEMES


_BARE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_bare_name(path: str) -> bool:
    """Return whether a path may be the name of a data set without its hub: `OWNER/NAME`, and no folder OWNER here."""
    return _BARE_NAME.fullmatch(path) is not None and not os.path.exists(path.partition("/")[0])


def read_scheme_variable() -> Scheme | None:
    """Return the hub that ANABATIC_HUB or USE_MODELSCOPE_HUB names, as for models; None: they name none."""
    schemes: dict[str, Scheme] = {"huggingface": "hf", "modelscope": "ms"}
    if named := os.environ.get("ANABATIC_HUB"):
        return schemes.get(named)
    return "ms" if os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true") else None


def split_spec(spec: str) -> tuple[DatasetName, str | None, str | None]:
    """Split a spec into name, rows and weight; the last two are text, not checked here.

    A number behind the last `@` is a weight, so a revision that is a number needs a subset or a split behind it.

    Raises:
        ConfigError: it is not of this form.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f'"{spec}" does not name a data set', _describe_mistake(spec))
    revision, weight = match["revision"], match["weight"]
    if revision and weight is None and spec.endswith(f"@{revision}") and _is_weight(revision):
        revision, weight = None, revision
    scheme: Scheme = "hf" if match["scheme"] == "hf" else "ms"
    name = DatasetName(scheme, match["repo"], revision or "", match["subset"] or "", match["split"] or "")
    return name, match["rows"], weight


def parse_name(text: str) -> DatasetName:
    """Return the data set that `DataSource.path` names.

    Raises:
        ConfigError: the text is no such name.
    """
    return split_spec(text)[0]


def _is_weight(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and len(text) < 40  # a commit may consist of digits


def _describe_mistake(spec: str) -> str:
    if "[" in spec:
        return f"{USAGE}; the first 1000 rows of a split are #1000"
    if "//" in spec:
        return f"{USAGE}, without //"
    if "/" not in spec:
        return f"{USAGE}; OWNER is the part of the address before the name, such as openai in openai/gsm8k"
    return USAGE
