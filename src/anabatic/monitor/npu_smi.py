"""Reading what `npu-smi` prints: which kind of text it is, and the values in it.

A tolerant reader: cells are split at `|`, never at character positions (the tool pads and never cuts), layouts are
told by their header cells, chips by nothing; colours and what a log or a mail puts before the lines are dropped. It
raises on no text; a value that is not there is None, never 0.
Layouts: hicann/driver, src/custom/dev_prod/user/npucli/src/npu_info_print.c and npu_info_watch.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from anabatic.monitor import smi_pairs, smi_prefix, smi_table, smi_text
from anabatic.monitor.smi_pairs import Listing, Pairs
from anabatic.monitor.smi_table import InfoTable, VirtualTable
from anabatic.monitor.smi_text import ErrorText, Mapping, Topology, Watch

Parsed = InfoTable | VirtualTable | Watch | Topology | Mapping | Listing | Pairs | ErrorText

_READERS: tuple[Callable[[list[str]], Parsed | None], ...] = (
    smi_table.read_virtual,
    smi_table.read_info,
    smi_text.read_watch,
    smi_text.read_topology,
    smi_text.read_mapping,
    smi_pairs.read_listing,
    smi_pairs.read_pairs,
)


def parse(text: str) -> Parsed:
    """Return the values of any output of `npu-smi info ...`; text of no known form is an `ErrorText`."""
    lines = smi_prefix.strip(text)
    for read in _READERS:
        found = read(lines)
        if found is not None:
            return found
    return smi_text.read_error(lines)


def info(text: str) -> InfoTable:
    """Return the table of `npu-smi info`; other text has no devices, and its first line as `error`."""
    found = parse(text)
    if isinstance(found, InfoTable):
        return found
    return InfoTable(error=found.message if isinstance(found, ErrorText) else "not the table of `npu-smi info`")


def plain(parsed: Parsed) -> dict[str, Any]:
    """Return `parsed` as JSON-able values, with its `kind`; fields that a layout does not have are left out."""
    row: dict[str, Any] = {"kind": parsed.kind, **asdict(parsed)}
    for key in parsed.optional:
        if not row[key]:
            del row[key]
    if isinstance(parsed, InfoTable):
        row["devices"] = [_without(each, "second_id_ambiguous", None) for each in row["devices"]]
        if not row.pop("container_column"):
            row["processes"] = [_without(each, "container_pid", None) for each in row["processes"]]
    if isinstance(parsed, Pairs):
        row["blocks"] = [
            {key: value for key, value in each.items() if value or key == "values"} for each in row["blocks"]
        ]
    return row


def _without(row: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    return {name: item for name, item in row.items() if name != key or item is not value}
