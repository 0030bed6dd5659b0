"""An explanation on a terminal of any width, or as JSON."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from anabatic.core.text import size
from anabatic.doctor import explain_next, knowledge
from anabatic.doctor.explain import Finding, Report
from anabatic.doctor.explain_scan import Sight
from anabatic.doctor.language import Language
from anabatic.doctor.report import cells, wrap

MOST_OTHERS = 12
"""Rows of the list below the first cause; `--json` has all."""
_NARROW = 60
_COLOURS = {"cause": "bold red", "consequence": "yellow", "wrapper": "dim", "notice": "cyan"}

_WORDS: dict[str, tuple[str, str]] = {
    "colon": (": ", "："),
    "comma": (", ", "，"),
    "first.cause": ("first cause", "首个原因"),
    "first.consequence": ("no cause found, first consequence", "未找到原因，最先出现的后果"),
    "first.wrapper": ("only a general message", "只有概括性的报错"),
    "first.notice": ("nothing that stops a job", "不会使作业停止的提示"),
    "meaning": ("meaning", "含义"),
    "cause": ("likely cause", "可能原因"),
    "fix": ("fix", "处理"),
    "confidence": ("confidence", "可信度"),
    "source": ("source", "出处"),
    "where": ("where", "位置"),
    "high": ("high", "高"),
    "medium": ("medium", "中"),
    "low": ("low", "低"),
    "also": ("also seen", "另外见到"),
    "role.cause": ("cause", "原因"),
    "role.consequence": ("consequence", "后果"),
    "role.wrapper": ("general", "概括"),
    "role.notice": ("note", "提示"),
    "rank": ("rank {}", "rank {}"),
    "times": ("{} times", "{} 次"),
    "once": ("once", "1 次"),
    "silent": (
        "rank {} reported nothing while the others waited: look there first",
        "其他 rank 在等待，而 rank {} 没有报错：请先检查它",
    ),
    "next": ("collect next", "下一步收集"),
    "order": (
        "not every line has a time: among these files the order is that of reading",
        "部分日志没有时间：文件之间按读取顺序排列",
    ),
    "more": ("{} more, see --json", "还有 {} 项，见 --json"),
    "nothing": ("nothing known in {} ({})", "在 {} 中没有找到已知的错误（{}）"),
    "killed": (
        "a job that ends without an error was often killed: `dmesg | tail`; CANN has its own logs: `anabatic explain`",
        "没有报错就结束的作业常常是被杀死的：`dmesg | tail`；CANN 另有自己的日志：`anabatic explain`",
    ),
    "files": ("{} files", "{} 个文件"),
    "earlier": (
        "{} lines from before the last start of the run are left out, see --all",
        "该作业最后一次启动之前的 {} 行未计入，见 --all",
    ),
    "unkept": ("{} further lines were only counted", "另有 {} 行只计数"),
}


def word(key: str, language: Language, *values: object) -> str:
    """Return a word of the report in `language`."""
    return _WORDS[key][language == "zh"].format(*values)


def show(report: Report, language: Language, console: Console) -> None:
    """Print the first cause, what else was seen, and what could not be read."""
    with console.capture() as written:
        _print(report, language, console)
    text = written.get()
    if not console.is_terminal:  # rich fills lines up with blanks: in a file, in a mail they are in the way
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text)


def _print(report: Report, language: Language, console: Console) -> None:
    first = report.first
    if first is None:
        files = report.scan.files
        what = files[0] if len(files) == 1 else word("files", language, len(files))
        console.print(Text(word("nothing", language, what, size(report.scan.num_bytes))))
        for row in wrap(word("killed", language), console.width):
            console.print(Text(row))
    elif report.asked:
        for finding in report.findings:
            console.print(_block(finding, Text(finding.code, style="bold"), language, console.width))
    else:
        console.print(_first(first, language, console.width))
        if report.silent:
            silent = word("silent", language, _ranks(report.silent))
            console.print(Text(silent, style="bold yellow"))
        if others := report.findings[1:]:
            console.print(_others(others, language, console.width))
    if steps := explain_next.steps(report, language):
        console.print(Text(word("next", language), style="bold"))
        rows = ["\n    ".join(wrap(step, console.width - 4)) for step in steps]
        console.print(Text("\n".join(f"  - {row}" for row in rows)))
    for note in _notes(report, language):
        console.print(Text(note, style="dim"))


def _notes(report: Report, language: Language) -> list[str]:
    notes = list(report.scan.notes)
    if report.first is not None and not report.ordered:
        notes.append(word("order", language))
    if report.scan.earlier:
        notes.append(word("earlier", language, f"{report.scan.earlier:,}"))
    if report.scan.unkept:
        notes.append(word("unkept", language, report.scan.unkept))
    return notes


def _first(finding: Finding, language: Language, width: int) -> RenderableType:
    role = finding.role
    head = Text.assemble(
        (word(f"first.{role}", language), _COLOURS[role]),
        (word("colon", language), "bold"),
        (finding.code or finding.entry.id, "bold"),
    )
    return _block(finding, head, language, width)


def _block(finding: Finding, head: Text, language: Language, width: int) -> RenderableType:
    said = finding.entry.say(language)
    parts: list[RenderableType] = [head]
    if finding.first.text:
        parts.append(Padding(Text(_short(finding.first, 3 * width - 12), style="dim"), (0, 0, 0, 2)))
    rows = [
        (word("meaning", language), said.meaning, ""),
        (word("cause", language), said.cause, ""),
        (word("fix", language), said.fix, "bold"),
    ]
    if finding.first.file:
        rows.append((word("where", language), _where(finding, language), ""))
    rows.append((word("confidence", language), word(finding.entry.confidence, language), ""))
    rows.append((word("source", language), finding.entry.source, ""))
    if width < _NARROW:  # a column for the names would leave too little
        for name, text, style in rows:
            named_by = name + word("colon", language)
            for row in wrap(named_by + text, width):
                named = len(named_by) if row.startswith(named_by.rstrip()) else 0
                parts.append(Text.assemble((row[:named], "dim"), (row[named:], style)))
        return Group(*parts, Text())
    label = max(cells(name) for name, _, _ in rows) + 2
    for name, text, style in rows:
        for place, line in enumerate(wrap(text, width - label - 2)):
            before = name + " " * (label - cells(name)) if not place else " " * label
            parts.append(Text.assemble("  ", (before, "dim"), (line, style)))
    return Group(*parts, Text())


def _others(findings: list[Finding], language: Language, width: int) -> RenderableType:
    parts: list[RenderableType] = [Text(word("also", language), style="bold")]
    shown = findings[:MOST_OTHERS]
    for finding in shown:
        role = finding.role
        line = Text.assemble(
            (finding.code or finding.entry.id, "bold"),
            "  ",
            (word(f"role.{role}", language), _COLOURS[role]),
            (f"  {_often(finding, language)}", ""),
            (f"  {_place(finding)}", "dim"),
        )
        parts.append(Padding(line, (0, 0, 0, 2)))
        parts += [Text(f"    {row}") for row in wrap(finding.entry.say(language).meaning, width - 4)]
    if left := len(findings) - len(shown):
        parts.append(Padding(Text(word("more", language, left), style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _where(finding: Finding, language: Language) -> str:
    time = finding.first.time
    when = [time.isoformat(sep=" ", timespec="milliseconds")] if time else []
    return word("comma", language).join([_place(finding), *when, _often(finding, language)])


def _place(finding: Finding) -> str:
    """Return `file:line`, by the shorter of the two names that the file has from here."""
    file = finding.first.file
    if not file:
        return ""
    return f"{min(file, os.path.relpath(file), key=len)}:{finding.first.line}"


def _often(finding: Finding, language: Language) -> str:
    often = word("once", language) if finding.count == 1 else word("times", language, f"{finding.count:,}")
    ranks = [word("rank", language, _ranks(finding.ranks))] if finding.ranks else []
    return word("comma", language).join([often, *ranks])


def _ranks(ranks: list[int]) -> str:
    """`0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _short(sight: Sight, width: int) -> str:
    """Return as much of the line as fits in three rows, with the place that was recognised."""
    text = sight.text
    if len(text) <= width:
        return text
    start = 0 if sight.at < 2 * width // 3 else min(sight.at - width // 3, len(text) - width)
    end = start + width
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def as_json(report: Report, language: Language) -> dict[str, Any]:
    """Return the report as plain values: `findings`, the first cause first."""
    return {
        "first": _plain(report.first, language) if report.first else None,
        "findings": [_plain(finding, language) for finding in report.findings],
        "silent_ranks": report.silent,
        "files": report.scan.files,
        "num_bytes": report.scan.num_bytes,
        "ordered_by_time": report.ordered,
        "lines_before_last_start": report.scan.earlier,
        "lines_only_counted": report.scan.unkept,
        "notes": report.scan.notes,
        "next": explain_next.steps(report, language),
    }


def _plain(finding: Finding, language: Language) -> dict[str, Any]:
    said = finding.entry.say(language)
    return {
        "id": finding.entry.id,
        "code": finding.code or None,
        "role": finding.role,
        "meaning": said.meaning,
        "cause": said.cause,
        "fix": said.fix,
        "confidence": finding.entry.confidence,
        "source": finding.entry.source,
        "count": finding.count,
        "ranks": finding.ranks,
        "seen": [_sight(sight) for sight in finding.seen if sight.file],
    }


def _sight(sight: Sight) -> dict[str, Any]:
    return {
        "file": sight.file,
        "line": sight.line,
        "rank": sight.rank,
        "time": sight.time.isoformat() if sight.time else None,
        "time_on_line": sight.own_time,
        "count": sight.count,
        "text": sight.text,
    }


def one_line(report: Report, language: Language) -> str:
    """Return the hint below a failed command: what it was and the fix; empty when nothing is known."""
    first = report.first
    if first is None or first.role in ("wrapper", "notice") or first.entry.id.startswith(knowledge.UNKNOWN):
        return ""
    said = first.entry.say(language)
    between = "" if said.meaning.endswith("。") else " "
    return f"hint: {first.code or first.entry.id}: {said.meaning}{between}{said.fix}"
