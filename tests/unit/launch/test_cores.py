"""Cores and NUMA nodes, on machines made of files, and with a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core import cpu_info
from anabatic.core.formatting import format_spans
from anabatic.launch.local import core_binding
from anabatic.launch.local.core_binding import DeviceLocality


def machine(root: Path, nodes: dict[int, str], buses: dict[str, int], siblings: dict[int, str] | None = None) -> Path:
    """Write a /sys with NUMA nodes, PCI devices and physical cores of two threads."""
    for node, text in nodes.items():
        path = root / f"sys/devices/system/node/node{node}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    for bus, node in buses.items():
        path = root / f"sys/bus/pci/devices/{bus}/numa_node"
        path.parent.mkdir(parents=True)
        path.write_text(f"{node}\n")
    for core, text in (siblings or {}).items():
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    return root


ATLAS = {0: "0-23", 1: "24-47", 2: "48-71", 3: "72-95"}
"""As four Kunpeng 920 of an Atlas 800T A2, halved."""
BUSES = {
    f"0000:{bus}:00.0": node for node, pair in enumerate(("c1 c2", "81 82", "01 02", "41 42")) for bus in pair.split()
}


def test_every_process_beside_its_device(tmp_path: Path) -> None:
    root = machine(tmp_path, ATLAS, BUSES)
    near = [DeviceLocality(bus.upper()) for bus in BUSES]
    found = core_binding.assign_cores(8, near, range(96), root)
    assert found is not None
    assert [format_spans(share) for share in found.cores] == [
        "0-11",
        "12-23",
        "24-35",
        "36-47",
        "48-59",
        "60-71",
        "72-83",
        "84-95",
    ]
    assert found.numa_nodes == (0, 0, 1, 1, 2, 2, 3, 3) and found.threads_per_process == 12
    assert found.format_variable() == "0-11;12-23;24-35;36-47;48-59;60-71;72-83;84-95"
    assert found.format_line().startswith("cores of each process: 0-11 (NUMA node 0); 12-23 (NUMA node 0); ")


def test_the_free_devices_of_one_node_share_its_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, ATLAS, BUSES)
    found = core_binding.assign_cores(
        2, [DeviceLocality("0000:01:00.0"), DeviceLocality("00000000:C1:00.0")], range(96), root
    )  # NVML writes 8 digits
    assert found is not None and [format_spans(share) for share in found.cores] == ["48-71", "0-23"]


def test_only_cores_that_are_allowed(tmp_path: Path) -> None:
    root = machine(tmp_path, ATLAS, BUSES)
    allowed = [*range(4, 8), *range(30, 34)]
    found = core_binding.assign_cores(
        2, [DeviceLocality("0000:c1:00.0"), DeviceLocality("0000:81:00.0")], allowed, root
    )
    assert found is not None and found.cores == ((4, 5, 6, 7), (30, 31, 32, 33))
    elsewhere = core_binding.assign_cores(
        2, [DeviceLocality("0000:01:00.0"), DeviceLocality("0000:02:00.0")], allowed, root
    )
    assert elsewhere is not None and elsewhere.cores == ((4, 5, 6, 7), (30, 31, 32, 33)), "their node is not allowed"
    crowded = core_binding.assign_cores(3, [DeviceLocality("0000:c1:00.0")] * 3, allowed, root)
    assert crowded is not None and crowded.numa_nodes == (-1, -1, -1), "too few on the node: parts of all"
    assert sorted(core for share in crowded.cores for core in share) == allowed
    assert core_binding.assign_cores(5, [], allowed, root) is None


def test_threads_of_one_core_stay_together(tmp_path: Path) -> None:
    pairs = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    root = machine(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, {}, pairs)
    found = core_binding.assign_cores(4, [], range(8), root)
    assert found is not None and found.cores == ((0, 4), (1, 5), (2, 6), (3, 7)) and found.numa_nodes == (0, 0, 1, 1)


def test_what_the_driver_names_where_the_bus_does_not(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-7"}, {"0000:c1:00.0": -1})
    near = [DeviceLocality("0000:c1:00.0", "4-7"), DeviceLocality("", "0-3")]
    found = core_binding.assign_cores(2, near, range(8), root)
    assert found is not None and found.cores == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert core_binding.read_device_numa_node(near[0], root) is None
    odd = core_binding.assign_cores(
        2, [DeviceLocality("?", "no list"), DeviceLocality("0000:zz:00.0", "1-")], range(8), root
    )
    assert odd is not None and odd.cores == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = core_binding.assign_cores(3, [], range(8), tmp_path)
    assert found is not None and found.cores == ((0, 1), (2, 3, 4), (5, 6, 7)) and found.threads_per_process == 2
    assert found.format_line() == "cores of each process: 0-1; 2-4; 5-7; 2 threads each"


@given(st.lists(st.integers(0, 300), unique=True, min_size=1))
def test_lists_of_cores_read_back(numbers: list[int]) -> None:
    assert cpu_info.parse_core_list(format_spans(numbers)) == sorted(numbers)


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 9))
def test_every_core_goes_to_one_process(allowed: set[int], nproc: int) -> None:
    found = core_binding.assign_cores(nproc, [], allowed, "/nowhere")
    if found is None:
        assert len(allowed) < 2 * nproc
    else:
        assert sorted(core for share in found.cores for core in share) == sorted(allowed)
        assert max(map(len, found.cores)) - min(map(len, found.cores)) <= 1


def test_lists_that_are_none() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        cpu_info.parse_core_list("0-x")


SHOW = """
import os, threading
from anabatic.core import cpu_info
cpu_info.bind_to_cores()
def show(word): print(word, sorted(os.sched_getaffinity(0)))
show("own")
thread = threading.Thread(target=show, args=("thread",)); thread.start(); thread.join()
with cpu_info.use_all_cores():
    show("all")
show("own")
"""


@pytest.mark.process
def test_a_process_takes_its_share() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    last = allowed[-1]
    told = {**os.environ, cpu_info.CORES_VARIABLE: f"{allowed[0]};{last}", "LOCAL_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", SHOW], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"own [{last}]", f"thread [{last}]", f"all {allowed}", f"own [{last}]"]
    alone = {name: value for name, value in os.environ.items() if name != cpu_info.CORES_VARIABLE}
    done = subprocess.run([sys.executable, "-c", SHOW], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{word} {allowed}" for word in ("own", "thread", "all", "own")]
