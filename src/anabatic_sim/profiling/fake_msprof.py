"""`msprof` inside a simulation: the tables, timeline and database of a folder PROF_*, as torch_npu's profiler asks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from anabatic.core.errors import AnabaticError, UserError
from anabatic_sim.profiling import database, export, tasks

_USAGE = """Usage: msprof --export=on [--type=db] --output=<PROF folder>
       msprof --analyze=on [--type=db] --output=<PROF folder>

Options:
       --export    <on|off>  Write mindstudio_profiler_output: the timeline and the tables
       --analyze   <on|off>  Write analyze: the times of the collectives
       --type      <text|db> Tables and a timeline, or a database; text is the default
       --output    <path>    A folder PROF_*, or one that contains some
       --help                Show this help text and exit

This is a simulated NPU: programs are profiled with torch_npu.profiler.
"""

_WRITERS = {
    "text": (export.export_profile, export.analyze_profile),
    "db": (database.export_database, database.analyze_database),
}
"""Files that --export and --analyze write, by --type."""
_POLL_SECONDS = 0.5
"""torch_npu's parser looks for the tables every 0.1 s, and writes no timeline if the export ends before it sees them:
an export that is too fast loses that race (torch_npu 2.13, profiler/analysis/prof_common_func/_task_manager.py)."""


def _find_profiles(output: str) -> list[Path]:
    if not output:
        raise UserError("msprof: --output is missing", "name a folder PROF_*: --output=PROF_000001_…")
    folder = Path(output)
    found = [folder] if folder.name.startswith("PROF_") else sorted(folder.glob("PROF_*"))
    found = [path for path in found if (path / "host" / "start_info").is_file()]
    if not found:
        raise UserError(f"msprof: {folder} contains no profile", "--output names a folder PROF_* of torch_npu.profiler")
    return found


def _run(arguments: Sequence[str]) -> None:
    options: dict[str, str] = {}
    for word in arguments:
        name, _, value = word.partition("=")
        if name not in ("--export", "--analyze", "--output", "--type"):
            raise UserError(
                f"msprof: {name} is not simulated", "collect with torch_npu.profiler; `msprof --help` lists the options"
            )
        options[name] = value
    kind = options.get("--type", "text")
    if kind not in _WRITERS:
        raise UserError(f"msprof: --type={kind} is unknown", "--type=text or --type=db")
    write_tables, write_analysis = _WRITERS[kind]
    for path in _find_profiles(options.get("--output", "")):
        profile = tasks.read_profile(path)
        if options.get("--export") == "on":
            write_tables(profile, path)
        if options.get("--analyze") == "on":
            write_analysis(profile, path)
    if options.get("--export") == "on":
        time.sleep(_POLL_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_USAGE)
        return 0
    try:
        _run(arguments)
    except AnabaticError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    return 0
