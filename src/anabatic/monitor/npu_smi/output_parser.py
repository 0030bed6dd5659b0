"""Reading what `npu-smi` prints: which kind of text it is, and the values in it.

A tolerant reader: cells are split at `|`, never at character positions (the tool pads and never cuts), layouts are
recognised by their header cells, chips by nothing; colours and what a log or a mail puts before the lines are dropped.
It raises on no text; a value that is not there is None, never 0.
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


_DEVICE_COLUMNS = (
    *("npu_id", "chip_id", "phy_id", "logic_id", "name", "health", "power_w", "temp_c"),
    *("hugepages_used", "hugepages_total", "bus_id", "util_pct", "util_kind"),
    *("mem_used_mb", "mem_total_mb", "hbm_used_mb", "hbm_total_mb"),
)
"""What `npu-smi info` prints of a device: fields of `DeviceReading`."""
_PROCESS_COLUMNS = ("npu_id", "chip_id", "pid", "name", "mem_mb")
"""And of a process: fields of `DeviceProcess`."""


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
        ambiguous_ids, has_container_pid = row.pop("ambiguous_ids"), row.pop("container_column")
        columns = [*_PROCESS_COLUMNS, "container_pid"] if has_container_pid else _PROCESS_COLUMNS
        row["devices"] = [{name: each[name] for name in _DEVICE_COLUMNS} for each in row["devices"]]
        row["processes"] = [{name: each[name] for name in columns} for each in row["processes"]]
        for place, number in ambiguous_ids.items():
            row["devices"][place]["second_id_ambiguous"] = number
    if isinstance(parsed, KeyValueOutput):
        row["blocks"] = [
            {key: value for key, value in each.items() if value or key == "values"} for each in row["blocks"]
        ]
    return row
