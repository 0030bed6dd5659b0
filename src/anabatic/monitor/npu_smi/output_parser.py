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

from anabatic.monitor.npu_smi import framed_tables, key_values, line_prefix, unframed_tables
from anabatic.monitor.npu_smi.framed_tables import InfoTable, VirtualTable
from anabatic.monitor.npu_smi.key_values import CardListing, KeyValueOutput
from anabatic.monitor.npu_smi.unframed_tables import ChipMapping, ErrorOutput, Topology, WatchTable

ParsedOutput = (
    InfoTable | VirtualTable | WatchTable | Topology | ChipMapping | CardListing | KeyValueOutput | ErrorOutput
)

_OUTPUT_READERS: tuple[Callable[[list[str]], ParsedOutput | None], ...] = (
    framed_tables.read_virtual,
    framed_tables.read_info,
    unframed_tables.read_watch,
    unframed_tables.read_topology,
    unframed_tables.read_mapping,
    key_values.read_listing,
    key_values.read_pairs,
)


def parse_output(text: str) -> ParsedOutput:
    """Return the values of any output of `npu-smi info ...`; text of no known form is an `ErrorOutput`."""
    lines = line_prefix.strip_line_prefixes(text)
    for read in _OUTPUT_READERS:
        found = read(lines)
        if found is not None:
            return found
    return unframed_tables.read_error(lines)


def parse_info_table(text: str) -> InfoTable:
    """Return the table of `npu-smi info`; other text has no devices, and its first line as `error`."""
    found = parse_output(text)
    if isinstance(found, InfoTable):
        return found
    return InfoTable(error=found.message if isinstance(found, ErrorOutput) else "not the table of `npu-smi info`")


def output_to_dict(parsed: ParsedOutput) -> dict[str, Any]:
    """Return `parsed` as JSON-able values, with its `kind`; fields that a layout does not have are left out."""
    row: dict[str, Any] = {"kind": parsed.kind, **asdict(parsed)}
    for key in parsed.optional:
        if not row[key]:
            del row[key]
    if isinstance(parsed, InfoTable):
        row["devices"] = [_drop_value(each, "second_id_ambiguous", None) for each in row["devices"]]
        if not row.pop("container_column"):
            row["processes"] = [_drop_value(each, "container_pid", None) for each in row["processes"]]
    if isinstance(parsed, KeyValueOutput):
        row["blocks"] = [
            {key: value for key, value in each.items() if value or key == "values"} for each in row["blocks"]
        ]
    return row


def _drop_value(row: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    return {name: item for name, item in row.items() if name != key or item is not value}
