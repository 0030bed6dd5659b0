"""What `npu-smi` prints, as values that tests compare."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anabatic.monitor.npu_smi import output_parser
from anabatic.monitor.npu_smi.framed_tables import InfoTable
from anabatic.monitor.npu_smi.key_values import KeyValueOutput

OPTIONAL = {"info": ("error",), "kv": ("messages",)}
"""Kind of an output -> fields that are left out where they are empty."""
_DEVICE_COLUMNS = (
    *("npu_id", "chip_id", "phy_id", "logic_id", "name", "health", "power_w", "temp_c"),
    *("hugepages_used", "hugepages_total", "bus_id", "util_pct", "util_kind"),
    *("mem_used_mb", "mem_total_mb", "hbm_used_mb", "hbm_total_mb"),
)
"""Values that `npu-smi info` prints for a device: fields of `DeviceReading`."""
_PROCESS_COLUMNS = ("npu_id", "chip_id", "pid", "name", "mem_mb")
"""And of a process: fields of `DeviceProcess`."""


def output_to_dict(parsed: output_parser.ParsedOutput) -> dict[str, Any]:
    """Return `parsed` as JSON-able values, with its `kind`; fields that a layout does not have are left out."""
    row: dict[str, Any] = {"kind": parsed.kind, **asdict(parsed)}
    for key in OPTIONAL.get(parsed.kind, ()):
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
