"""The `key : value` texts of `npu-smi`: `-t usages|power|temp|common|health|board|ecc|proc-mem|...`, and `-l`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabatic.monitor.smi_table import decimal, number


@dataclass
class Block:
    """The lines of one chip, of the management controller (MCU), or those before the first chip."""

    values: dict[str, str] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Pairs:
    """`npu-smi info -t TYPE -i CARD`."""

    kind: ClassVar = "kv"
    optional: ClassVar[tuple[str, ...]] = ("messages",)
    npu_id: int | None = None
    blocks: list[Block] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    normalised: list[dict[str, Any]] = field(default_factory=list)
    """The values that mean the same in every spelling, per chip: percent, C, W, MB, MHz."""


@dataclass
class Listing:
    """`npu-smi info -l`."""

    kind: ClassVar = "list"
    optional: ClassVar[tuple[str, ...]] = ()
    total_count: int | None = None
    npu_ids: list[int] = field(default_factory=list)
    entries: list[dict[str, str]] = field(default_factory=list)


# A blank before the colon tells a value from an error of a shell ("npu-smi: command not found").
_LINE = re.compile(r"\s*([A-Za-z][^:|]*?)\s+:\s*(.*?)\s*")
_MORE = re.compile(r"(?:\s+:\s+|\s{31,})(\S.*?)\s*")
"""One more line of the value above: a colon without a key, or text that begins below the values."""
_PROCESS = re.compile(
    r"\s*Process id\s*:\s*(\d{1,18})\s+Process name\s*:(.*?)\s+Process memory\s*\((\w+)\)\s*:\s*(\d{0,18})\s*"
)
_NO_PROCESS = re.compile(r"\s*No process in device\.?\s*")
_PLACE = {"NPU ID", "Slot ID", "Chip Phy-ID", "Chip Count"}
"""Keys that say where, and are no values of a chip: a chip id behind them does not end its block."""
_MEBI = 1 << 20

_NUMBERS = {
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
_WORDS = {"Health": "health", "Health Status": "health"}


def _pair(line: str) -> tuple[str, str] | None:
    match = _LINE.fullmatch(line)
    return (match[1], match[2]) if match else None


def _identifies(key: str, value: str) -> bool:
    return key == "Chip ID" or (key == "Chip Name" and value.lower() == "mcu")


class _Blocks:
    """Lines to blocks.

    A chip id closes the block of its chip in most types and opens it in `-t common`: it opens where nothing of a chip
    has been said yet.
    """

    def __init__(self) -> None:
        self.done: list[Block] = []
        self.said: list[str] = []
        self._open = Block()
        self._identified = False
        self._something = False

    def end(self) -> None:
        if self._open.values or self._open.processes:
            self.done.append(self._open)
        self._open, self._identified, self._something = Block(), False, False

    def pair(self, key: str, value: str) -> None:
        if not _identifies(key, value):
            if key in self._open.values:
                self.end()
            self._open.values[key] = value
            self._something = self._something or key not in _PLACE
            return
        if self._identified:
            self.end()
        self._open.values[key] = value
        self._identified = True
        if self._something:
            self.end()

    def process(self, match: re.Match[str]) -> None:
        memory = number(match[4])
        if memory is not None and match[3] == "B":
            memory //= _MEBI
        self._open.processes.append({"pid": int(match[1]), "name": match[2].strip() or None, "mem_mb": memory})
        self._something = True

    def message(self, line: str) -> None:
        self.said.append(line.strip())
        self._something = True


def _meaning(block: Block, npu: int | None) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for key, value in block.values.items():
        if key in _WORDS:
            found[_WORDS[key]] = None if value in ("", "NA", "-") else value
        elif key in _NUMBERS:
            whole = number(value)
            found[_NUMBERS[key]] = decimal(value) if whole is None else whole
    if block.processes:
        found["processes"] = block.processes
    if not found:
        return None
    if block.values.get("Chip Name", "").lower() == "mcu":
        return {"unit": "mcu", **found}
    return {"npu_id": npu, "chip_id": number(block.values.get("Chip ID")), **found}


def _whole(lines: list[str]) -> list[tuple[str, tuple[str, str] | None]]:
    """Return each line and its value; the texts of several errors, told below one another, are one value.

    Before each of them but the first the tool prints an empty line (`print_diagnosis_info` of npu_info_print.c).
    """
    rows: list[tuple[str, tuple[str, str] | None]] = []
    for line in lines:
        pair = _pair(line)
        more = _MORE.fullmatch(line) if pair is None else None
        said = max((place for place, (above, _) in enumerate(rows) if above.strip()), default=-1) if more else -1
        if more is not None and said >= 0 and (told := rows[said][1]) is not None:
            rows[said:] = [(rows[said][0], (told[0], f"{told[1]}\n{more[1]}".strip()))]
        else:
            rows.append((line, pair))
    return rows


def read_pairs(lines: list[str]) -> Pairs | None:
    """Return the blocks of `key : value` lines; None for text that has none."""
    blocks = _Blocks()
    for line, pair in _whole(lines):
        process = _PROCESS.fullmatch(line)
        if process:
            blocks.process(process)
        elif pair:
            blocks.pair(*pair)
        elif not line.strip():
            blocks.end()
        else:  # "No process in device.", or what one chip of several does not support
            blocks.message(line)
    blocks.end()
    if not blocks.done and not any(_NO_PROCESS.fullmatch(line) for line in blocks.said):
        return None
    npu = next((number(block.values["NPU ID"]) for block in blocks.done if "NPU ID" in block.values), None)
    meant = [each for each in (_meaning(block, npu) for block in blocks.done) if each is not None]
    return Pairs(npu, blocks.done, blocks.said, meant)


def read_listing(lines: list[str]) -> Listing | None:
    """Return the cards of `-l`; None without a `Total Count` line."""
    listing: Listing | None = None
    for line in lines:
        pair = _pair(line)
        if pair is None:
            continue
        key, value = pair
        if key == "Total Count":
            listing = Listing(number(value))
        elif listing is not None and key == "NPU ID":
            listing.entries.append({key: value})
            npu = number(value)
            listing.npu_ids += [] if npu is None else [npu]
        elif listing is not None and listing.entries:
            listing.entries[-1][key] = value
    return listing
