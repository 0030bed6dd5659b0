"""DCMI, the driver's own library, through ctypes: no process is started for a reading.

Functions, structures and codes: hicann/driver, src/custom/include/dcmi_interface_api.h; the `dcmiv2_` calls of the 950
take one device number instead of card and chip (driver documentation).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_int, c_uint, c_uint8, c_uint32, c_uint64, c_ulong
from typing import Any

from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot

LIBRARY_PATHS = (
    "/usr/local/dcmi/libdcmi.so",
    "/usr/local/Ascend/driver/lib64/driver/libdcmi.so",
    "libdcmi.so",
)
MAX_CARDS, MAX_PROCESSES = 64, 32
_HEALTH_NAMES = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")
ERROR_CODES = {
    -8001: "invalid argument", -8002: "not permitted", -8005: "the driver does not answer", -8006: "timeout",
    -8008: "no such device", -8012: "not ready", -8013: "not available in a container",
    -8020: "the device is owned by another container", -8255: "not supported",
}  # fmt: skip
_UTILIZATION_FIELDS = {2: "util_pct", 10: "bandwidth_pct", 12: "vector_pct", 13: "overall_pct", 14: "cube_pct"}
"""Types of dcmi_get_device_utilization_rate."""


_SLACK_FIELD = ("slack", c_uint8 * 256)
"""A newer driver whose structures have grown must not write past ours."""


class _HbmInfo(Structure):
    _fields_ = (
        ("size_mb", c_uint64),
        ("freq", c_uint32),
        ("used_mb", c_uint64),
        ("temp", c_int),
        ("bandwidth", c_uint32),
        _SLACK_FIELD,
    )


class _MemoryInfo(Structure):
    _fields_ = (
        ("size_mb", c_uint64),
        ("available_mb", c_uint64),
        ("freq", c_uint32),
        ("page_kb", c_ulong),
        ("pages", c_ulong),
        ("pages_free", c_ulong),
        ("util", c_uint32),
        ("reserve", c_uint8 * 60),
        _SLACK_FIELD,
    )


class _ChipInfo(Structure):
    _fields_ = (
        ("type", c_char * 32),
        ("name", c_char * 32),
        ("version", c_char * 32),
        ("cores", c_uint),
        ("npu_name", c_char * 32),
        _SLACK_FIELD,
    )


class _PcieInfo(Structure):
    _fields_ = (
        ("ids", c_uint * 4),
        ("domain", c_int),
        ("bus", c_uint),
        ("device", c_uint),
        ("function", c_uint),
        ("reserve", c_uint8 * 32),
        _SLACK_FIELD,
    )


class _ProcessMemory(Structure):
    _fields_ = (("pid", c_int), ("bytes", c_ulong))


class DcmiSource:
    """Reads through libdcmi.so. A value that a chip refuses is None; why is counted into the notes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._is_v2 = not hasattr(library, "dcmi_init")
        self._prefix = "dcmiv2_" if self._is_v2 else "dcmi_"
        self._refusals: dict[int, int] = {}

    def init_library(self) -> int:
        """Return what `dcmi_init` says; 0 is good."""
        return int(getattr(self._library, f"{self._prefix}init")())

    def _call_library(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._library, self._prefix + name, None)
        if function is None:
            return False
        code = int(function(*arguments))
        if code in (-8002, -8020):
            self._refusals[code] = self._refusals.get(code, 0) + 1
        return code == 0

    def _read_number(self, name: str, *place: int, kind: type[c_int] | type[c_uint] = c_int) -> int | None:
        value = kind()
        return int(value.value) if self._call_library(name, *place, byref(value)) else None

    def _list_chips(self) -> list[tuple[int, ...]] | None:
        """Return (card, chip) of every device, or (device,) with the newer calls. Cards are numbered as they like."""
        count, listed = c_int(), (c_int * MAX_CARDS)()
        if self._is_v2:
            if not self._call_library("get_device_list", byref(count), listed, MAX_CARDS):
                return None
            return [(listed[index],) for index in range(count.value)]
        if not self._call_library("get_card_list", byref(count), listed, MAX_CARDS):
            return None
        places: list[tuple[int, ...]] = []
        for card in listed[: count.value]:
            chips, mcu, cpu = c_int(), c_int(), c_int()
            if self._call_library("get_device_id_in_card", card, byref(chips), byref(mcu), byref(cpu)):
                places += [(card, chip) for chip in range(chips.value)]
        return places

    def read(self) -> Snapshot:
        """Return the devices now."""
        self._refusals = {}
        places = self._list_chips()
        found = Snapshot("dcmi", driver_version=self._read_driver_version())
        for place in places or []:
            found.devices.append(self._read_device(place))
            found.processes += self._read_processes(place)
        found.notes = [f"DCMI refused {count} values: {ERROR_CODES[code]}" for code, count in self._refusals.items()]
        if not found.devices:
            found.error = "DCMI lists no device" + ("" if not found.notes else f": {found.notes[0]}")
            found.hint = "run `npu-smi info` by hand; in a container, start it with the device nodes of the driver"
        return found

    def _read_driver_version(self) -> str | None:
        text = ctypes.create_string_buffer(64)
        return (
            (text.value.decode("utf-8", "replace") or None)
            if self._call_library("get_driver_version", text, 64)
            else None
        )

    def _read_device(self, place: tuple[int, ...]) -> DeviceReading:
        chip, hbm, memory, pcie = _ChipInfo(), _HbmInfo(), _MemoryInfo(), _PcieInfo()
        device = DeviceReading(place[0], chip_id=place[1] if len(place) > 1 else None, util_kind="aicore")
        if self._call_library(
            "get_device_chip_info" if self._is_v2 else "get_device_chip_info_v2", *place, byref(chip)
        ):
            device.name = (chip.npu_name or chip.name).decode("utf-8", "replace") or None
        health = self._read_number("get_device_health", *place, kind=c_uint)
        device.health = None if health is None else _HEALTH_NAMES[min(health, 4)]
        device.temp_c = self._read_number("get_device_temperature", *place)
        voltage = self._read_number("get_device_voltage", *place, kind=c_uint)
        device.voltage_v = None if voltage is None else voltage / 100
        device.freq_mhz = self._read_number("get_device_frequency", *place, 7, kind=c_uint)
        if self._call_library("get_device_hbm_info", *place, byref(hbm)) or self._call_library(
            "get_hbm_info", *place, byref(hbm)
        ):
            device.hbm_used_mb, device.hbm_total_mb = int(hbm.used_mb), int(hbm.size_mb)
            device.hbm_temp_c = int(hbm.temp)
        power = self._read_number("get_device_power_info", *place)
        second_die = bool(device.hbm_total_mb) and place[1:] > (0,)  # the figure is the card's
        device.power_w = None if power is None or second_die else power / 10
        if self._call_library("get_device_memory_info_v3", *place, byref(memory)) and memory.size_mb:
            device.mem_total_mb = int(memory.size_mb)
            device.mem_used_mb = int(memory.size_mb) - int(memory.available_mb)
            device.hugepages_total = int(memory.pages)
            device.hugepages_used = int(memory.pages) - int(memory.pages_free)
        if self._call_library(
            "get_device_pcie_info" if self._is_v2 else "get_device_pcie_info_v2", *place, byref(pcie)
        ):
            device.bus_id = f"{pcie.domain & 0xFFFF:04X}:{pcie.bus:02X}:{pcie.device:02X}.{pcie.function:X}"
        self._read_utilization(device, place)
        self._read_device_ids(device, place)
        device.error_codes = self._read_error_codes(place)
        return device

    def _read_utilization(self, device: DeviceReading, place: tuple[int, ...]) -> None:
        for kind, name in _UTILIZATION_FIELDS.items():
            value = self._read_number("get_device_utilization_rate", *place, kind, kind=c_uint)
            if value is not None and value <= 100:  # above: flagged, the chip is divided into virtual ones
                setattr(device, name, value)
        if device.util_pct is None and device.overall_pct is not None:
            device.util_pct, device.util_kind = device.overall_pct, "npu"

    def _read_device_ids(self, device: DeviceReading, place: tuple[int, ...]) -> None:
        if self._is_v2:
            device.phy_id = self._read_number("get_chip_phy_id_by_dev_id", *place, kind=c_uint)
            device.logic_id = place[0]
            return
        logic = c_int()
        if self._call_library("get_device_logic_id", byref(logic), *place):  # here the answer comes first
            device.logic_id = int(logic.value)
            device.phy_id = self._read_number("get_device_phyid_from_logicid", int(logic.value), kind=c_uint)

    def _read_error_codes(self, place: tuple[int, ...]) -> list[int] | None:
        count, codes = c_int(), (c_uint * 128)()
        if self._call_library("get_device_errorcode_v2", *place, byref(count), codes, 128):
            return [int(code) for code in codes[: max(count.value, 0)]]
        return None

    def _read_processes(self, place: tuple[int, ...]) -> list[DeviceProcess]:
        buffer, count = (_ProcessMemory * MAX_PROCESSES)(), c_int(MAX_PROCESSES)
        name = "get_device_proc_mem_info" if self._is_v2 else "get_device_resource_info"
        if not self._call_library(name, *place, ctypes.cast(buffer, POINTER(_ProcessMemory)), byref(count)):
            return []
        chip = place[1] if len(place) > 1 else None
        valid = buffer[: max(0, min(count.value, MAX_PROCESSES))]
        return [DeviceProcess(place[0], chip, int(each.pid), mem_mb=int(each.bytes) >> 20) for each in valid]


def open_source() -> DcmiSource | str | None:
    """Return the source; a sentence where the library is here and refuses; None where there is none."""
    for path in LIBRARY_PATHS:
        try:
            source = DcmiSource(ctypes.CDLL(path))
            code = source.init_library()
        except OSError as error:
            if "cannot open shared object file" in str(error) and path in str(error).split(":")[0]:
                continue  # not there
            return f"DCMI does not load: {error}"
        except AttributeError:
            return f"{path} is no DCMI: it has neither dcmi_init nor dcmiv2_init"
        if code:
            return f"DCMI does not start: {code} ({ERROR_CODES.get(code, 'no known code')})"
        return source
    return None
