"""Render an explanation for a terminal of any width or as JSON, with what to collect next where no cause is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from anabatic.config.loading import yaml_reader
from anabatic.core.formatting import format_size
from anabatic.core.language import Language
from anabatic.doctor import knowledge_base
from anabatic.doctor.check_report import wrap_text
from anabatic.doctor.explain.diagnosis import LogFinding, LogReport
from anabatic.doctor.explain.log_scan import Sighting

MAX_OTHERS = 12
"""Rows of the list below the first cause; `--json` has all."""
_NARROW_WIDTH = 60
_ROLE_STYLES = {"cause": "bold red", "consequence": "yellow", "wrapper": "dim", "notice": "cyan"}

_LABELS: dict[str, list[str]] = yaml_reader.read_own_yaml(Path(__file__).with_name("labels.yaml"))


def get_label(key: str, language: Language, *values: object) -> str:
    """Return a word of the report in `language`."""
    return _LABELS[key][language == "zh"].format(*values)


def print_report(report: LogReport, language: Language, console: Console) -> None:
    """Print the first cause, what else was seen, and what could not be read."""
    with console.capture() as written:
        _render_report(report, language, console)
    text = written.get()
    if not console.is_terminal:  # rich fills lines up with blanks: in a file, in a mail they are in the way
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text)


def _render_report(report: LogReport, language: Language, console: Console) -> None:
    first = report.first_cause
    if first is None:
        files = report.scan.files
        what = files[0] if len(files) == 1 else get_label("files", language, len(files))
        console.print(Text(get_label("nothing", language, what, format_size(report.scan.num_bytes))))
        for row in wrap_text(get_label("killed", language), console.width):
            console.print(Text(row))
    elif report.is_code_lookup:
        for finding in report.findings:
            console.print(_render_finding(finding, Text(finding.code, style="bold"), language, console.width))
    else:
        console.print(_render_first_cause(first, language, console.width))
        if report.silent_ranks:
            silent = get_label("silent", language, _format_ranks(report.silent_ranks))
            console.print(Text(silent, style="bold yellow"))
        if others := report.findings[1:]:
            console.print(_render_others(others, language, console.width))
    if steps := suggest_next_steps(report, language):
        console.print(Text(get_label("next", language), style="bold"))
        rows = ["\n    ".join(wrap_text(step, console.width - 4)) for step in steps]
        console.print(Text("\n".join(f"  - {row}" for row in rows)))
    for note in _collect_notes(report, language):
        console.print(Text(note, style="dim"))


def _collect_notes(report: LogReport, language: Language) -> list[str]:
    notes = list(report.scan.notes)
    if report.first_cause is not None and not report.is_ordered_by_time:
        notes.append(get_label("order", language))
    if report.scan.num_earlier:
        notes.append(get_label("earlier", language, f"{report.scan.num_earlier:,}"))
    if report.scan.num_unkept:
        notes.append(get_label("unkept", language, report.scan.num_unkept))
    return notes


def _render_first_cause(finding: LogFinding, language: Language, width: int) -> RenderableType:
    role = finding.role
    head = Text.assemble(
        (get_label(f"first.{role}", language), _ROLE_STYLES[role]),
        (get_label("colon", language), "bold"),
        (finding.code or finding.entry.id, "bold"),
    )
    return _render_finding(finding, head, language, width)


def _render_finding(finding: LogFinding, head: Text, language: Language, width: int) -> RenderableType:
    explanation = finding.entry.get_explanation(language)
    parts: list[RenderableType] = [head]
    if finding.first_sighting.text:
        parts.append(Padding(Text(_shorten_line(finding.first_sighting, 3 * width - 12), style="dim"), (0, 0, 0, 2)))
    reason = finding.first_sighting.reason
    rows = [(get_label("beside", language), reason, "")] if reason else []
    rows += [
        (get_label("meaning", language), explanation.meaning, ""),
        (get_label("cause", language), explanation.cause, ""),
        (get_label("fix", language), explanation.fix, "bold"),
    ]
    if finding.first_sighting.file:
        rows.append((get_label("where", language), _format_where(finding, language), ""))
    rows.append((get_label("confidence", language), get_label(finding.entry.confidence, language), ""))
    rows.append((get_label("source", language), finding.entry.source, ""))
    if width < _NARROW_WIDTH:  # a column for the names would leave too little
        for name, text, style in rows:
            named_by = name + get_label("colon", language)
            for row in wrap_text(named_by + text, width):
                named = len(named_by) if row.startswith(named_by.rstrip()) else 0
                parts.append(Text.assemble((row[:named], "dim"), (row[named:], style)))
        return Group(*parts, Text())
    label = max(cell_len(name) for name, _, _ in rows) + 2
    for name, text, style in rows:
        for place, line in enumerate(wrap_text(text, width - label - 2)):
            before = name + " " * (label - cell_len(name)) if not place else " " * label
            parts.append(Text.assemble("  ", (before, "dim"), (line, style)))
    return Group(*parts, Text())


def _render_others(findings: list[LogFinding], language: Language, width: int) -> RenderableType:
    parts: list[RenderableType] = [Text(get_label("also", language), style="bold")]
    listed = findings[:MAX_OTHERS]
    for finding in listed:
        role = finding.role
        line = Text.assemble(
            (finding.code or finding.entry.id, "bold"),
            "  ",
            (get_label(f"role.{role}", language), _ROLE_STYLES[role]),
            (f"  {_format_count(finding, language)}", ""),
            (f"  {_format_location(finding)}", "dim"),
        )
        parts.append(Padding(line, (0, 0, 0, 2)))
        parts += [Text(f"    {row}") for row in wrap_text(finding.entry.get_explanation(language).meaning, width - 4)]
    if left := len(findings) - len(listed):
        parts.append(Padding(Text(get_label("more", language, left), style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _format_where(finding: LogFinding, language: Language) -> str:
    time = finding.first_sighting.time
    when = [time.isoformat(sep=" ", timespec="milliseconds")] if time else []
    return get_label("comma", language).join([_format_location(finding), *when, _format_count(finding, language)])


def _format_location(finding: LogFinding) -> str:
    """Return `file:line`, by the shorter of the two names that the file has from here."""
    file = finding.first_sighting.file
    if not file:
        return ""
    return f"{min(file, os.path.relpath(file), key=len)}:{finding.first_sighting.line}"


def _format_count(finding: LogFinding, language: Language) -> str:
    often = get_label("once", language) if finding.count == 1 else get_label("times", language, f"{finding.count:,}")
    ranks = [get_label("rank", language, _format_ranks(finding.ranks))] if finding.ranks else []
    return get_label("comma", language).join([often, *ranks])


def _format_ranks(ranks: list[int]) -> str:
    """`0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _shorten_line(sighting: Sighting, width: int) -> str:
    """Return as much of the line as fits in three rows, with the place that was recognised."""
    text = sighting.text
    if len(text) <= width:
        return text
    start = 0 if sighting.offset < 2 * width // 3 else min(sighting.offset - width // 3, len(text) - width)
    end = start + width
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def report_to_dict(report: LogReport, language: Language) -> dict[str, Any]:
    """Return the report as plain values: `findings`, the first cause first."""
    return {
        "first": _finding_to_dict(report.first_cause, language) if report.first_cause else None,
        "findings": [_finding_to_dict(finding, language) for finding in report.findings],
        "silent_ranks": report.silent_ranks,
        "files": report.scan.files,
        "num_bytes": report.scan.num_bytes,
        "ordered_by_time": report.is_ordered_by_time,
        "lines_before_last_start": report.scan.num_earlier,
        "lines_only_counted": report.scan.num_unkept,
        "notes": report.scan.notes,
        "next": suggest_next_steps(report, language),
    }


def _finding_to_dict(finding: LogFinding, language: Language) -> dict[str, Any]:
    explanation = finding.entry.get_explanation(language)
    return {
        "id": finding.entry.id,
        "code": finding.code or None,
        "role": finding.role,
        "meaning": explanation.meaning,
        "cause": explanation.cause,
        "fix": explanation.fix,
        "confidence": finding.entry.confidence,
        "source": finding.entry.source,
        "count": finding.count,
        "ranks": finding.ranks,
        "seen": [_sighting_to_dict(sighting) for sighting in finding.sightings if sighting.file],
    }


def _sighting_to_dict(sighting: Sighting) -> dict[str, Any]:
    return {
        "file": sighting.file,
        "line": sighting.line,
        "rank": sighting.rank,
        "time": sighting.time.isoformat() if sighting.time else None,
        "time_on_line": sighting.has_own_time,
        "count": sighting.count,
        "text": sighting.text,
        "beside": sighting.reason or None,
    }


def format_hint(report: LogReport, language: Language) -> str:
    """Return the hint below a failed command: what it was and the fix; empty when nothing is known."""
    first = report.first_cause
    if (
        first is None
        or first.role in ("wrapper", "notice")
        or first.entry.id.startswith(knowledge_base.UNKNOWN_EXCEPTION_PREFIX)
    ):
        return ""
    explanation = first.entry.get_explanation(language)
    between = "" if explanation.meaning.endswith("。") else " "
    return f"hint: {first.code or first.entry.id}: {explanation.meaning}{between}{explanation.fix}"


SYMPTOMS = (
    "slow",
    "slow-start",
    "hang",
    "memory-grows",
    "wrong-numbers",
    "killed",
    "straggler",
    "slow-link",
    "silent-corruption",
)
"""Troubles without an error message: words that `anabatic explain` takes like a code."""


def suggest_next_steps(report: LogReport, language: Language) -> list[str]:
    """Return what to collect, the most telling first; empty: the log names its cause."""
    symptoms = ("、" if language == "zh" else ", ").join(SYMPTOMS)
    return [get_label(f"step.{key}", language, symptoms) for key in _choose_steps(report)]


def _choose_steps(report: LogReport) -> tuple[str, ...]:
    first = report.first_cause
    if report.is_code_lookup:
        return ()
    if first is None:
        return "plog", "level", "health", "symptoms"
    if first.entry.id.startswith(knowledge_base.UNKNOWN_EXCEPTION_PREFIX):
        return ()
    if first.role == "consequence":
        return "plog", "level", "health"
    if first.role == "wrapper" or first.entry.confidence == "low":
        return "plog", "blocking", "versions"
    return ()
