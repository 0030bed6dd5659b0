"""What a report states beside its curves: sizes and times of a run, its data, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from anabatic import __version__
from anabatic.config.loading import yaml_reader
from anabatic.core import cpu_info
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.monitor.run_data import RunData
from anabatic.train.report.localized_page import (
    MISSING,
    TEMPLATE_FOLDER,
    WORDS,
    as_text,
    describe_duration,
    get_text,
    join_texts,
)

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


def summarize_runs(runs: Sequence[RunData]) -> list[tuple[LocalizedText, str | LocalizedText]]:
    """Return (what, value) of the training as a whole: sizes, time, memory, and the devices where they were watched."""
    summaries = [run.summary for run in runs if run.curves or "tokens" in run.summary]
    tokens, seconds, steps = (
        [value for summary in summaries if (value := to_finite_number(summary.get(key))) is not None]
        for key in ("tokens", "seconds", "steps")
    )
    params = [value for summary in summaries if (value := to_finite_number(summary.get("params")))]
    peaks = [value for summary in summaries if (value := to_finite_number(summary.get("peak_memory_bytes")))]
    rows: list[tuple[str, str | LocalizedText]] = [
        ("parameters", format_count(params[-1]) if params else ""),
        ("training_tokens", format_count(sum(tokens)) if tokens else ""),
        ("optimizer_steps", f"{sum(steps):,.0f}" if steps else ""),
        ("training_time", describe_duration(sum(seconds)) if seconds else ""),
        ("tokens_per_second", format_count(sum(tokens) / sum(seconds)) if tokens and sum(seconds) else ""),
        ("peak_memory", format_size(max(peaks)) if peaks else ""),
        *_device_facts(summaries),
    ]
    return [(get_text(key), value) for key, value in rows if value]


def _device_facts(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return means over the training, of several stages weighted by their seconds."""

    def weighted_mean(key: str) -> float | None:
        known = [
            (value, to_finite_number(each.get("seconds")) or 0.0)
            for each in summaries
            if (value := to_finite_number(each.get(key))) is not None
        ]
        weight = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / weight if weight else None

    util, power, energy = (
        weighted_mean("device_util_pct"),
        weighted_mean("device_power_w"),
        weighted_mean("energy_wh_per_mtoken"),
    )
    return [
        ("device_utilisation", "" if util is None else f"{util:.0f} %"),
        ("device_power", "" if power is None else f"{power:,.0f} W"),
        ("energy", "" if energy is None else f"{energy:,.3g} Wh"),
    ]


def describe_machine(events: Iterable[Mapping[str, Any]]) -> list[tuple[LocalizedText, str | LocalizedText]]:
    """Return (what, value) of this machine and its software.

    Args:
        events: of the runs: those named `device` say what they trained on.
    """
    devices = [event for event in events if event.get("event") == "device"]
    names = dict.fromkeys(str(event.get("name", "")) for event in devices if event.get("type") != "cpu")
    formats = dict.fromkeys(str(event["dtype"]) for event in devices if event.get("dtype"))
    rows: list[tuple[str, str | LocalizedText]] = [("processor", describe_cpu()), ("memory", describe_memory())]
    if devices:
        rows.append(("accelerator", ", ".join(names) or get_text("no_accelerator")))
        rows.append(("number_format", ", ".join(formats) or MISSING))
    rows.append(("software", " · ".join(f"{name} {version}" for name, version in list_versions())))
    if commit := find_commit(TEMPLATE_FOLDER):
        rows.append(("commit", commit))
    return [(get_text(key), value) for key, value in rows]


def describe_cpu() -> LocalizedText:
    """Return the processor and its cores."""
    threads = psutil.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or threads
    key = f"{'cores' if cores > 1 else 'core'}{'_threads' if threads != cores else ''}"
    return get_text(key, name=describe_cpu_name(cpu_info.read_cpuinfo()), cores=cores, threads=threads)


def describe_cpu_name(facts: Mapping[str, str]) -> str:
    """Return the name of the processor with these fields of `/proc/cpuinfo`, else what Python knows of it."""
    name = cpu_info.get_cpu_name(facts, platform.processor() or platform.machine() or "unknown")
    return " ".join(name.replace("(R)", "").replace("(TM)", "").split())


def describe_memory() -> str:
    """Return the machine's memory."""
    return format_size(psutil.virtual_memory().total)


def list_versions() -> list[tuple[str, str]]:
    """Return (name, version) of Python, torch, transformers, where installed, and anabatic."""
    found = [("Python", platform.python_version())]
    for package in ("torch", "transformers"):
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return [*found, ("anabatic", __version__)]


def find_commit(folder: Path) -> LocalizedText | None:
    """Return the short commit of the git checkout that tracks `folder`, and whether files changed; else None.

    A folder that merely lies inside a checkout, as a virtual environment does, has no commit.
    """
    if not _run_git(folder, "ls-files", "--", "."):
        return None
    short = _run_git(folder, "rev-parse", "--short=10", "HEAD")
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    if not short:
        return None
    return get_text("changed", commit=short) if changed else as_text(short)


def _run_git(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a folder on a dead mount
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
