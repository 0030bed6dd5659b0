"""What `anabatic bench` leaves behind: a table in the terminal, `bench.json`, `bench.md`, `bench.svg`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from anabatic import __version__
from anabatic.bench import result_plot
from anabatic.bench.measurements import BenchResult
from anabatic.config.bench import BenchJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_size
from anabatic.core.json_lines import replace_nonfinite
from anabatic.core.paths import RunFolder, write_atomic

JSON_FILE, MARKDOWN_FILE, PLOT_FILE = "bench.json", "bench.md", "bench.svg"


def prepare_output(job: BenchJob) -> float:
    """Make sure that figures can be written, before minutes are spent on them; return the machine's load.

    Raises:
        ConfigError: the folder holds figures.
        Failure: the folder cannot be written.
    """
    folder = Path(job.out).expanduser()
    if (folder / JSON_FILE).exists() and not job.overwrite:
        raise ConfigError(
            f"{folder} holds the figures of an earlier measurement", "choose another --out, or --overwrite"
        )
    RunFolder(folder).create_folder()
    return os.getloadavg()[0]


def write_results(job: BenchJob, result: BenchResult) -> None:
    """Write the files, and the table to the standard output.

    Raises:
        Failure: the folder cannot be written.
    """
    folder = Path(job.out).expanduser()
    write_atomic(folder / MARKDOWN_FILE, format_markdown(result))
    names = [MARKDOWN_FILE]
    if job.plot != "off":
        write_atomic(folder / PLOT_FILE, result_plot.render_svg(result))
        names.append(PLOT_FILE)
    write_atomic(
        folder / JSON_FILE, json.dumps(replace_nonfinite(result.to_dict()), indent=2, ensure_ascii=False) + "\n"
    )
    sys.stdout.write(format_text(result))
    log.info(f"wrote {', '.join([JSON_FILE, *names])} into {folder}")


def format_text(result: BenchResult) -> str:
    """Return what is shown in a terminal."""
    rows = result.build_table()
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [result.title, _describe_machine(result), ""]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *([""] if result.notes else []), *result.notes]) + "\n"


def format_markdown(result: BenchResult) -> str:
    """Return the page: what, where, the table, the command."""
    head, *rows = result.build_table()
    lines = [
        f"# bench {result.kind}",
        "",
        f"{result.title}.",
        "",
        *_format_markdown_row(head),
        "|" + "---|" * len(head),
    ]
    for row in rows:
        lines += _format_markdown_row(row)
    lines += [
        "",
        *(f"- {note}" for note in result.notes),
        *([""] if result.notes else []),
        f"{_describe_machine(result)}.",
        "",
    ]
    machine = {name: value for name, value in result.machine.items() if name not in ("device", "devices")}
    lines += ["```text", *(f"{name}: {value}" for name, value in {**machine, **result.settings}.items()), "```", ""]
    return "\n".join(lines)


def _format_markdown_row(cells: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"]


def _describe_machine(result: BenchResult) -> str:
    machine = result.machine
    several = "{} processes on " if machine["device"] == machine["processor"] else "{} x "
    count = several.format(machine["devices"]) if machine["devices"] > 1 else ""
    simulated = ", simulated" if machine["simulated"] else ""
    lines = (
        f"{machine['cores']} cores, {format_size(machine['memory_bytes'])}, a load of {machine['load_before']:g} before"
    )
    return (
        f"{count}{machine['device']}{simulated}; {lines}; torch {machine.get('torch', 'none')}, anabatic {__version__}"
    )
