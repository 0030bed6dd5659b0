"""The `key : value` texts of `npu-smi`: `-t usages|power|temp|common|health|board|ecc|proc-mem|...`, and `-l`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabatic.monitor.npu_smi.framed_tables import parse_float, parse_int


@dataclass
class KeyValueBlock:
    """The lines of one chip, of the management controller (MCU), or those before the first chip."""

    values: dict[str, str] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class KeyValueOutput:
    """`npu-smi info -t TYPE -i CARD`."""

    kind: ClassVar = "kv"
    npu_id: int | None = None
    blocks: list[KeyValueBlock] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    normalised: list[dict[str, Any]] = field(default_factory=list)
    """The values that mean the same in every spelling, per chip: percent, C, W, MB, MHz."""


@dataclass
class CardListing:
    """`npu-smi info -l`."""

    kind: ClassVar = "list"
    total_count: int | None = None
    npu_ids: list[int] = field(default_factory=list)
    entries: list[dict[str, str]] = field(default_factory=list)


# A blank before the colon tells a value from an error of a shell ("npu-smi: command not found").
_KEY_VALUE_LINE = re.compile(r"\s*([A-Za-z][^:|]*?)\s+:\s*(.*?)\s*")
_CONTINUATION_LINE = re.compile(r"(?:\s+:\s+|\s{31,})(\S.*?)\s*")
"""One more line of the value above: a colon without a key, or text that begins below the values."""
_PROCESS_LINE = re.compile(
    r"\s*Process id\s*:\s*(\d{1,18})\s+Process name\s*:(.*?)\s+Process memory\s*\((\w+)\)\s*:\s*(\d{0,18})\s*"
)
_NO_PROCESS_LINE = re.compile(r"\s*No process in device\.?\s*")
_LOCATION_KEYS = {"NPU ID", "Slot ID", "Chip Phy-ID", "Chip Count"}
"""Keys that say where, and are no values of a chip: a chip id behind them does not end its block."""
_MEBI = 1 << 20

_NUMBER_KEYS = {
    "Aicore Usage Rate(%)": "aicore_pct", "Aivector Usage Rate(%)": "aivector_pct",
    "Aicube Usage Rate(%)": "aicube_pct", "Aicpu Usage Rate(%)": "aicpu_pct",
    "Ctrlcpu Usage Rate(%)": "ctrlcpu_pct", "NPU Utilization(%)": "npu_util_pct",
    "HBM Usage Rate(%)": "hbm_pct", "HBM Bandwidth Usage Rate(%)": "hbm_bw_pct",
    "Memory Usage Rate(%)": "mem_pct", "DDR Usage Rate(%)": "mem_pct",
    "HBM Capacity(MB)": "hbm_total_mb", "DDR Capacity(MB)": "mem_total_mb", "Memory Capacity(MB)": "mem_total_mb",
    "Temperature(C)": "temp_c", "Temperature (C)": "temp_c",
    "NPU Temperature(C)": "temp_c", "NPU Temperature (C)": "temp_c", "HBM Temperature(C)": "hbm_temp_c",
    "NPU Real-time Power(W)": "power_w", "Power Dissipation(W)": "power_w",
    "Aicore Freq(MHZ)": "aicore_freq_mhz", "Aicore curFreq(MHZ)": "aicore_cur_freq_mhz",
    "Aicore Count": "aicore_count",
    "HBM Single Bit Error Count": "hbm_ecc_single", "HBM Double Bit Error Count": "hbm_ecc_double",
}  # fmt: skip
"""Spellings of drivers 21 to 26 (NPU and MCU blocks)."""
_TEXT_KEYS = {"Health": "health", "Health Status": "health"}


def _parse_pair(line: str) -> tuple[str, str] | None:
    match = _KEY_VALUE_LINE.fullmatch(line)
    return (match[1], match[2]) if match else None


def _is_chip_identity(key: str, value: str) -> bool:
    return key == "Chip ID" or (key == "Chip Name" and value.lower() == "mcu")


class _BlockBuilder:
    """Lines to blocks.

    A chip id closes the block of its chip in most types and opens it in `-t common`: it opens where nothing of a chip
    has been said yet.
    """

    def __init__(self) -> None:
        self.blocks: list[KeyValueBlock] = []
        self.messages: list[str] = []
        self._open = KeyValueBlock()
        self._identified = False
        self._has_content = False

    def close_block(self) -> None:
        if self._open.values or self._open.processes:
            self.blocks.append(self._open)
        self._open, self._identified, self._has_content = KeyValueBlock(), False, False

    def add_pair(self, key: str, value: str) -> None:
        if not _is_chip_identity(key, value):
            if key in self._open.values:
                self.close_block()
            self._open.values[key] = value
            self._has_content = self._has_content or key not in _LOCATION_KEYS
            return
        if self._identified:
            self.close_block()
        self._open.values[key] = value
        self._identified = True
        if self._has_content:
            self.close_block()

    def add_process(self, match: re.Match[str]) -> None:
        memory = parse_int(match[4])
        if memory is not None and match[3] == "B":
            memory //= _MEBI
        self._open.processes.append({"pid": int(match[1]), "name": match[2].strip() or None, "mem_mb": memory})
        self._has_content = True

    def add_message(self, line: str) -> None:
        self.messages.append(line.strip())
        self._has_content = True


def _normalize_block(block: KeyValueBlock, npu: int | None) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for key, value in block.values.items():
        if key in _TEXT_KEYS:
            found[_TEXT_KEYS[key]] = None if value in ("", "NA", "-") else value
        elif key in _NUMBER_KEYS:
            number = parse_int(value)
            found[_NUMBER_KEYS[key]] = parse_float(value) if number is None else number
    if block.processes:
        found["processes"] = block.processes
    if not found:
        return None
    if block.values.get("Chip Name", "").lower() == "mcu":
        return {"unit": "mcu", **found}
    return {"npu_id": npu, "chip_id": parse_int(block.values.get("Chip ID")), **found}


def _join_continuations(lines: list[str]) -> list[tuple[str, tuple[str, str] | None]]:
    """Return each line and its value; the texts of several errors, told below one another, are one value.

    Before each of them but the first the tool prints an empty line (`print_diagnosis_info` of npu_info_print.c).
    """
    rows: list[tuple[str, tuple[str, str] | None]] = []
    for line in lines:
        pair = _parse_pair(line)
        more = _CONTINUATION_LINE.fullmatch(line) if pair is None else None
        value_row = max((place for place, (above, _) in enumerate(rows) if above.strip()), default=-1) if more else -1
        if more is not None and value_row >= 0 and (value := rows[value_row][1]) is not None:
            rows[value_row:] = [(rows[value_row][0], (value[0], f"{value[1]}\n{more[1]}".strip()))]
        else:
            rows.append((line, pair))
    return rows


def read_pairs(lines: list[str]) -> KeyValueOutput | None:
    """Return the blocks of `key : value` lines; None for text that has none."""
    blocks = _BlockBuilder()
    for line, pair in _join_continuations(lines):
        process = _PROCESS_LINE.fullmatch(line)
        if process:
            blocks.add_process(process)
        elif pair:
            blocks.add_pair(*pair)
        elif not line.strip():
            blocks.close_block()
        else:  # "No process in device.", or what one chip of several does not support
            blocks.add_message(line)
    blocks.close_block()
    if not blocks.blocks and not any(_NO_PROCESS_LINE.fullmatch(line) for line in blocks.messages):
        return None
    npu = next((parse_int(block.values["NPU ID"]) for block in blocks.blocks if "NPU ID" in block.values), None)
    meant = [each for each in (_normalize_block(block, npu) for block in blocks.blocks) if each is not None]
    return KeyValueOutput(npu, blocks.blocks, blocks.messages, meant)


def read_listing(lines: list[str]) -> CardListing | None:
    """Return the cards of `-l`; None without a `Total Count` line."""
    listing: CardListing | None = None
    for line in lines:
        pair = _parse_pair(line)
        if pair is None:
            continue
        key, value = pair
        if key == "Total Count":
            listing = CardListing(parse_int(value))
        elif listing is not None and key == "NPU ID":
            listing.entries.append({key: value})
            npu = parse_int(value)
            listing.npu_ids += [] if npu is None else [npu]
        elif listing is not None and listing.entries:
            listing.entries[-1][key] = value
    return listing
