"""Compatible releases of driver, CANN, torch_npu, torch and Python: tables, and the reading of versions.

Sources: COMPATIBILITY.md and SUPPORT.en.md of Ascend/pytorch, its release notes up to TorchNPU 26.2.0, that of TorchNPU
7.2.0 on hiascend.com (what may be mixed), release notes of CANN 8.5 to 9.1 (drivers), hicann/release-management,
the tables of Ascend/vision and MindCluster for older drivers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Compatibility = Literal["matched", "compatible", "broken", "unknown"]
VersionKey = tuple[int, int, int, int]
"""Sorts: major, minor, 0 for a release candidate and 1 for a release, its number."""


@dataclass(frozen=True)
class TorchNpuRelease:
    """A TorchNPU release."""

    name: str
    cann: str
    """The CANN it was made with, as `get_cann_line` names it."""
    wheels: tuple[str, ...]
    """Versions of torch_npu; each needs the torch of the same number."""
    cann_block: int
    """Releases and CANN of one block may be mixed; the border is where CANN was repackaged (8.5)."""


OLDEST_TORCH = "2.7.1"
"""Of torch, as pyproject.toml says."""
TESTED_TORCH = ("2.13.0", "2.7.1", "2.14.0")
"""Versions of torch that the end-to-end tests run with: what set-up installs, the oldest, the newest with a torch_npu
(`make test-all`, `make test-oldest`, `make test-newest`)."""

TORCH_NPU_RELEASES = (
    TorchNpuRelease("26.2.0", "9.2", ("2.7.1.post11", "2.9.0.post9", "2.10.0.post7", "2.11.0.post3", "2.12.0.post3",
                              "2.13.0", "2.14.0"), 2),
    TorchNpuRelease("26.1.0", "9.1", ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"), 2),
    TorchNpuRelease("26.0.0", "9.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"), 2),
    TorchNpuRelease("7.3.0", "8.5", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"), 2),
    TorchNpuRelease("7.2.0", "8.3.RC1", ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"), 1),
    TorchNpuRelease("7.1.0", "8.2.RC1", ("2.1.0.post13", "2.5.1.post1", "2.6.0"), 1),
    TorchNpuRelease("7.0.0", "8.1.RC1", ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1"), 1),
    TorchNpuRelease("6.0.0", "8.0", ("2.1.0.post10", "2.3.1.post4", "2.4.0.post2"), 1),
    TorchNpuRelease("6.0.rc3", "8.0.RC3", ("2.1.0.post8", "2.3.1.post2", "2.4.0"), 0),
    TorchNpuRelease("6.0.rc2", "8.0.RC2", ("1.11.0.post14", "2.1.0.post6", "2.2.0.post2", "2.3.1"), 0),
    TorchNpuRelease("6.0.rc1", "8.0.RC1", ("1.11.0.post11", "2.1.0.post4", "2.2.0"), 0),
    TorchNpuRelease("5.0.0", "7.0", ("1.11.0.post8", "2.0.1.post1", "2.1.0"), 0),
    TorchNpuRelease("5.0.rc3", "7.0.RC1", ("1.11.0.post4", "2.0.1"), 0),
)  # fmt: skip
CANN_BLOCKS: dict[int, tuple[str, ...]] = {
    2: ("8.5", "9.0", "9.1", "9.2"),
    1: ("8.0.RC2", "8.0.RC3", "8.0", "8.1.RC1", "8.2.RC1", "8.3.RC1"),
    0: (),
}
"""Block of TorchNPU -> lines of CANN that its vendor allows; block 0: only the matched one."""

PYTHON_RANGES: dict[str, tuple[int, int]] = {
    "2.1": (8, 11), "2.2": (8, 10), "2.3": (8, 11), "2.4": (8, 11), "2.5": (9, 11), "2.6": (9, 11), "2.7": (9, 13),
    "2.8": (9, 13), "2.9": (10, 14), "2.10": (10, 14), "2.11": (10, 14), "2.12": (10, 14), "2.13": (10, 14),
    "2.14": (10, 14),
}  # fmt: skip
"""Line of torch -> first and last minor version of Python 3 with a torch_npu wheel."""

TRITON_ASCEND_VERSIONS: dict[str, str] = {"2.7.1": "3.2.2", "2.10.0": "3.6.0", "2.13.0": "3.6.0"}
"""torch -> triton-ascend that torch.compile needs (TorchNPU 26.2.0)."""


@dataclass(frozen=True)
class DriverCompatibility:
    """Lines of the driver (Ascend HDK) for a CANN; a line is the start of a version."""

    cann: str
    matched: tuple[str, ...]
    compatible: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


DRIVER_TABLE = (
    DriverCompatibility("9.2", ("26.0.RC1", "25.5"), ("25.0", "25.2", "25.3", "25.7", "26.0", "26.1", "26.2")),
    DriverCompatibility("9.1", ("26.0.RC1", "26.1"), ("25.2", "25.3", "25.5", "25.7", "26.0"), ("25.0",)),
    DriverCompatibility("9.0", ("26.0.RC1", "26.0.RC3", "25.5"), ("25.0", "25.2", "25.3", "26.0", "26.1")),
    DriverCompatibility("8.5", ("25.5", "26.0.RC1"), ("25.0", "25.2", "25.3", "26.0", "26.1")),
    DriverCompatibility("8.3.RC1", ("25.3",), ("25.2", "25.0.RC1")),
    DriverCompatibility("8.2.RC1", ("25.2",), ("25.0.RC1", "24.1.0", "24.1.RC3", "24.1.RC2")),
    DriverCompatibility("8.1.RC1", ("25.0.RC1",), ("24.1.0",)),
    DriverCompatibility("8.0", ("24.1.0",), ("24.1.RC1", "24.1.RC2", "24.1.RC3", "23.0")),
    DriverCompatibility("8.0.RC1", ("24.1.RC1",)),
    DriverCompatibility("7.0", ("23.0",)),
)


def parse_version(text: str) -> VersionKey | None:
    """Return the sortable form of `8.1.RC1`, `25.2.0`, `24.1.rc3.b999`, `9.2.0-beta.2`; None when it is no version."""
    found = re.match(r"[vV]?(\d{1,4})\.(\d{1,4})(?:[.-]?(?:(rc)\.?(\d{1,4})|(\d{1,4})))?", text.strip(), re.I)
    if not found:
        return None
    major, minor = int(found[1]), int(found[2])
    return (major, minor, 0, int(found[4])) if found[3] else (major, minor, 1, int(found[5] or 0))


def get_cann_line(cann: str) -> str:
    """Return the line that the tables know: `9.1` of `9.1.0`, but `8.1.RC1` as it is; before 8.5 every RC was one."""
    sorted_as = parse_version(cann)
    if sorted_as is None:
        return ""
    major, minor, release, number = sorted_as
    if release or (major, minor) >= (8, 5):
        return f"{major}.{minor}"
    return f"{major}.{minor}.RC{number}"


def get_base_version(wheel: str) -> str:
    """Return `2.7.1` of `2.7.1.post8`, `2.7.1+cpu` or `2.13.0rc1`."""
    found = re.match(r"\d+\.\d+(?:\.\d+)?", wheel)
    return found[0] if found else ""


def post(wheel: str) -> int:
    """Return 8 of `2.7.1.post8`, 0 of `2.7.1`."""
    found = re.search(r"\.post(\d{1,6})", wheel)
    return int(found[1]) if found else 0


def find_release(wheel: str) -> TorchNpuRelease | None:
    """Return the TorchNPU release that a torch_npu belongs to: its own row, else the one just before it."""
    same = [
        (post(known), release)
        for release in TORCH_NPU_RELEASES
        for known in release.wheels
        if get_base_version(known) == get_base_version(wheel)
    ]
    before = [row for row in same if row[0] <= post(wheel)] or sorted(same, key=lambda row: row[0])[:1]
    return max(before, key=lambda row: row[0])[1] if before else None


def match_torch_npu_with_cann(wheel: str, cann: str) -> Compatibility:
    """Say whether a torch_npu runs on a CANN."""
    release, cann_line = find_release(wheel), get_cann_line(cann)
    if release is None or not cann_line:
        return "unknown"
    if release.cann == cann_line:
        return "matched"
    known = {row.cann for row in TORCH_NPU_RELEASES} | {one for block in CANN_BLOCKS.values() for one in block}
    if cann_line in CANN_BLOCKS[release.cann_block]:
        return "compatible"
    return "broken" if cann_line in known or (parse_version(cann) or (0,)) < (9, 2) else "unknown"


def match_cann_with_driver(cann: str, driver: str) -> Compatibility:
    """Say whether a CANN runs on a driver."""
    row = next((one for one in DRIVER_TABLE if one.cann == get_cann_line(cann)), None)
    found = parse_version(driver)
    if row is None or found is None:
        return "unknown"
    for match, lines in (("broken", row.refused), ("matched", row.matched), ("compatible", row.compatible)):
        if any(_matches_line(found, one) for one in lines):
            return match  # type: ignore[return-value]
    known = [sorted_as for one in (*row.matched, *row.compatible) if (sorted_as := parse_version(one))]
    return "broken" if found < min(known) else "unknown"


def _matches_line(found: VersionKey, prefix: str) -> bool:
    expected = parse_version(prefix)
    if expected is None:
        return False
    return found == expected if prefix.count(".") > 1 else found[:2] == expected[:2]


def list_wheels(cann: str, torch: str = "") -> list[str]:
    """Return the torch_npu versions made for a CANN, newest first; with `torch`, only those for it."""
    chosen = [one for release in TORCH_NPU_RELEASES if release.cann == get_cann_line(cann) for one in release.wheels]
    fitting = [one for one in chosen if not torch or get_base_version(one) == get_base_version(torch)]
    return sorted(
        fitting, key=lambda one: (parse_version(get_base_version(one)) or (0, 0, 0, 0), post(one)), reverse=True
    )


def list_supported_wheels(cann: str) -> list[str]:
    """Return the torch_npu versions for a CANN whose torch is not too old here, those to be preferred first.

    Before those made for it come none; where there are none, those of releases that its vendor allows with it, what is
    tried first.
    """
    oldest = parse_version(OLDEST_TORCH) or (0, 0, 0, 0)
    wheels = [one for one in list_wheels(cann) if (parse_version(get_base_version(one)) or oldest) >= oldest]
    allowed = [
        one
        for release in TORCH_NPU_RELEASES
        for one in release.wheels
        if get_cann_line(cann) in CANN_BLOCKS[release.cann_block]
        and (parse_version(get_base_version(one)) or oldest) >= oldest
    ]
    return wheels or sorted(allowed, key=lambda one: get_base_version(one) not in TESTED_TORCH)


def format_drivers(cann: str) -> str:
    """Return the drivers that belong to a CANN, for a sentence: `25.5, 26.0.RC1`; empty when unknown."""
    row = next((one for one in DRIVER_TABLE if one.cann == get_cann_line(cann)), None)
    return ", ".join(row.matched) if row else ""
