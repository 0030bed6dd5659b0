"""What the pre-flight makes of what machines say: by name, with numbers."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.launch.preflight import link_probe, machine_report


def machine(name: str) -> dict[str, Any]:
    """Facts of a machine without fault."""
    return {
        "name": name,
        "address": "10.0.0.1",
        "interface": "eth0",
        "recipe": {"seed": 1},
        "versions": {"python": "3.11.2", "anabatic": "1.0", "torch": "2.13.0", "torch_npu": "2.13.0", "CANN": "9.2"},
        "nproc": 8,
        "devices": {"kind": "npu", "name": "Ascend910B3", "count": 8, "problem": ""},
        "variables": {"HCCL_BUFFSIZE": "200"},
        "free": {"/runs": 1 << 40},
        "files": {"data.train: rows.json": [1, 300]},
        "doctor": [],
    }


def result(count: int) -> dict[str, Any]:
    """What `link_probe` writes when nothing is wrong."""
    return {
        "found": {str(number): machine(f"node{number}") for number in range(count)},
        "clocks": {str(number): [0.001, 0.0001] for number in range(1, count)},
        "links": [[*pair, way, 1e9] for way in ("gloo", "hccl") for pair in combinations(range(count), 2)],
        "shared": [True] * count,
    }


def test_nothing_is_wrong() -> None:
    found = machine_report.parse_result(result(3))
    assert machine_report.find_errors(found) == [] and machine_report.find_warnings(found) == []
    text = "\n".join(machine_report.format_tables(found))
    assert "8 x Ascend910B3" in text and "torch_npu 2.13.0, CANN 9.2" in text and "1.0 ms (± 0.1)" in text
    assert text.splitlines()[-4:] == [
        "link   gloo MB/s  hccl MB/s",
        "0 - 1  1,000      1,000",
        "0 - 2  1,000      1,000",
        "1 - 2  1,000      1,000",
    ]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("recipe", "seed"), 2, "seed is 1 on machine 0 and 2 on machine 1"),
        (("versions", "CANN"), "8.5", "CANN is 9.2 on machine 0 and 8.5 on machine 1"),
        (("versions", "torch_npu"), None, "torch_npu is 2.13.0 on machine 0 and missing on machine 1"),
        (("nproc",), 9, "machine 1 (node1) is to run 9 processes on 8 devices"),
        (("devices", "problem"), "no driver", "machine 1 (node1): no driver"),
        (("devices", "kind"), "cpu", "devices are npu on machine 0 and cpu on machine 1 (node1)"),
        (("files",), {}, "data.train: rows.json is not there on machine 1 (node1)"),
        (
            ("files", "data.train: rows.json"), [2, 1300],
            "data.train: rows.json has 300 bytes on machine 0 and 1,300 bytes in 2 files on machine 1 (node1)",
        ),
        (("versions", "python"), "3.12.1", "warning: python is 3.11.2 on machine 0 and 3.12.1 on machine 1"),
        (
            ("variables", "HCCL_BUFFSIZE"), "400",
            "warning: HCCL_BUFFSIZE is 200 on machine 0 and 400 on machine 1",
        ),
        (("free", "/runs"), 1 << 30, "warning: machine 1 (node1): 1.0 GiB free in /runs"),
        (("doctor",), ["port 60000 is used"], "warning: machine 1 (node1): port 60000 is used"),
        (
            ("devices", "name"), "Ascend910B1",
            "warning: devices are 8 x Ascend910B3 on machine 0 and 8 x Ascend910B1 on machine 1 (node1)",
        ),
    ],
)  # fmt: skip
def test_what_differs(path: tuple[str, ...], value: object, said: str) -> None:
    told = copy.deepcopy(result(2))
    place = told["found"]["1"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    found = machine_report.parse_result(told)
    assert [
        *machine_report.find_errors(found),
        *(f"warning: {line}" for line in machine_report.find_warnings(found)),
    ] == [said]


def test_clocks_links_and_folders() -> None:
    told = result(3)
    told["clocks"]["2"] = [-2.5, 0.001]
    told["links"][1] = [0, 2, "gloo", 4e8]
    told["shared"] = [True, False, True]
    found = machine_report.parse_result(told)
    assert machine_report.find_errors(found) == ["the run folder on machine 1 (node1) is not that of machine 0"]
    assert machine_report.find_warnings(found) == [
        "the clock of machine 2 (node2) is 2.5 s behind",
        "gloo between machines 0 and 2: 400 MB/s, the median is 1,000",
    ]
    told["shared"] = [False, False, False]
    assert machine_report.find_errors(machine_report.parse_result(told)) == [
        "machine 0 (node0) cannot write beside the run folder"
    ]


@given(st.integers(2, 20))
def test_every_two_meet_once_and_nobody_is_in_two_places(size: int) -> None:
    made = list(link_probe.schedule_pairs(size))
    assert sorted(pair for pairs in made for pair in pairs) == sorted(combinations(range(size), 2))
    for pairs in made:
        members = [number for pair in pairs for number in pair]
        assert len(members) == len(set(members))
