"""What a run was trained on and what was held out, and whether the two are of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError
from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.monitor.run_data import RunData
from anabatic.train.report.words import WORDS, get_text, join_texts

MAX_NAMED = 4
MAX_NAME_CHARS = 60
_BUILT_IN_KINDS = {"stdlib": "text", "docs": "text", "chat": "conversations"}


@dataclass(frozen=True)
class NamedSource:
    """A source, and the kind of what it holds: a `data.*` of the words; `unknown`: the run did not say."""

    source: str
    kind: str


@dataclass(frozen=True)
class DataSources:
    """What a run read.

    Attributes:
        heldout: other sources, or those of the training where `heldout_fraction` of them is held out.
    """

    train: tuple[NamedSource, ...]
    heldout: tuple[NamedSource, ...] = ()
    heldout_fraction: float | None = None

    @property
    def is_other_kind(self) -> bool:
        """Whether the held-out data hold a kind that the training data lack, or the other way round."""
        return differ_in_kind(self.train, self.heldout)


def differ_in_kind(train: Sequence[NamedSource], heldout: Sequence[NamedSource]) -> bool:
    """Return whether the kinds of two sets of sources are known and not the same."""
    kinds = [{one.kind for one in sources} for sources in (train, heldout)]
    return all(kinds) and "unknown" not in kinds[0] | kinds[1] and kinds[0] != kinds[1]


def read_data_sources(run: RunData) -> DataSources | None:
    """Return the sources by the run's last event `data`, else by its settings; None: neither names any."""
    event = next((event for event in reversed(run.events) if event.get("event") == "data"), None)
    if event is None:
        return _read_from_settings(run.config)
    train = parse_sources(event.get("train"))
    fraction = to_finite_number(event.get("heldout_fraction"))
    return DataSources(train, parse_sources(event.get("heldout")), fraction) if train else None


def parse_sources(rows: Any) -> tuple[NamedSource, ...]:
    """Return the sources of an event or an evaluation; whatever else is there is left out."""
    if not isinstance(rows, list):
        return ()
    found = [
        NamedSource(row["source"], str(row.get("kind")))
        for row in rows
        if isinstance(row, dict) and isinstance(row.get("source"), str)
    ]
    return tuple(one if f"data.{one.kind}" in WORDS else NamedSource(one.source, "unknown") for one in found)


def describe_sources(sources: Sequence[NamedSource]) -> LocalizedText:
    """Return `conversations of a.jsonl, plain text of b.txt`."""
    named = join_texts(
        [get_text(f"data.{one.kind}", source=_shorten(one.source)) for one in sources[:MAX_NAMED]], ", ", "、"
    )
    rest = len(sources) - MAX_NAMED
    return get_text("data.more", sources=named, count=rest) if rest > 0 else named


def describe_data(data: DataSources) -> LocalizedText:
    """Return the sentence that names the training data and the held-out data."""
    train = describe_sources(data.train)
    if not data.heldout:
        return get_text("data.training", sources=train)
    if data.heldout_fraction is not None:
        return get_text("data.share", sources=train, share=f"{100 * data.heldout_fraction:.3g}\u00a0%")
    return get_text("data.heldout", sources=train, heldout=describe_sources(data.heldout))


def _shorten(source: str) -> str:
    source = source.rstrip(":")  # of `stdlib:`, which has no path
    return source if len(source) <= MAX_NAME_CHARS else f"…{source[-MAX_NAME_CHARS:]}"


def _read_from_settings(config: str) -> DataSources | None:
    try:
        data = yaml_reader.parse_yaml(config, "config.yaml").tree.get("data")
    except ConfigError:  # torn or foreign: the run has no known settings
        return None
    if not isinstance(data, dict):
        return None
    train, heldout = (_name_specs(data.get(key)) for key in ("train", "valid"))
    fraction = to_finite_number(data.get("valid_fraction"))
    if not train:
        return None
    if heldout or not fraction:
        return DataSources(train, heldout)
    return DataSources(train, train, fraction)


def _name_specs(specs: Any) -> tuple[NamedSource, ...]:
    listed = [specs] if isinstance(specs, str) else specs if isinstance(specs, list) else []
    texts = [spec for spec in listed if isinstance(spec, str)]
    return tuple(NamedSource(spec, _BUILT_IN_KINDS.get(spec.partition(":")[0], "unknown")) for spec in texts)
