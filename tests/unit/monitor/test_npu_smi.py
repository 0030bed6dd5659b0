"""What `npu-smi` prints is read exactly: collected outputs, every layout of our own renderer, and any text at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.monitor.npu_smi import output_parser
from anabatic.monitor.npu_smi.framed_tables import InfoTable
from anabatic.monitor.npu_smi.key_values import KeyValueOutput
from anabatic.monitor.npu_smi.unframed_tables import ChipMapping, ErrorOutput, Topology, WatchTable
from anabatic_sim import fake_npu_smi, npu_smi_layout
from anabatic_sim.npu_smi_layout import HEALTH_NAMES, ChipFamily, SmiProcess, SmiReading, TableLayout
from suite import smi_values
from unit.monitor import layouts

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "npu-smi"
FAMILIES: tuple[ChipFamily, ...] = ("A2", "A3", "910", "310P")


@pytest.mark.parametrize(
    "path", sorted(SAMPLES.glob("*.json")) or [None], ids=lambda path: path.stem if path else "none"
)
def test_a_collected_output_is_read_exactly(path: Path | None) -> None:
    if path is None:
        pytest.skip("the collected outputs of npu-smi are not here")
    text = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert (
        smi_values.output_to_dict(output_parser.parse_output(text))
        == json.loads(path.read_text(encoding="utf-8"))["expected"]
    )


words = st.text(st.sampled_from("abcxyzABC0123456789-_."), min_size=1, max_size=30)
processes = st.builds(
    SmiProcess,
    pid=st.integers(1, 1 << 22),
    name=st.one_of(st.just(""), words),
    used_mib=st.integers(0, 999_999),
)
readings = st.builds(
    SmiReading,
    npu=st.just(0),
    chip=st.just(0),
    logic_id=st.just(0),
    name=words,
    health=st.sampled_from(HEALTH_NAMES),
    watt=st.one_of(st.none(), st.integers(0, 9999).map(lambda tenth: tenth / 10)),
    celsius=st.integers(0, 120),
    bus=st.integers(0, 255).map(lambda bus: f"0000:{bus:02X}:00.0"),
    aicore=st.integers(0, 100),
    used_mib=st.integers(0, 999_999),
    total_mib=st.integers(0, 999_999),
    processes=st.lists(processes, max_size=9).map(tuple),
    ddr=st.integers(0, 99_999).map(lambda used: f"{used:<5}/ 15137"),
    hugepages=st.integers(0, 99_999).map(lambda used: f"{used:<5}/ 34"),
)
frames = st.builds(
    TableLayout,
    widths=st.tuples(st.integers(10, 40), st.integers(9, 25), st.integers(40, 90)),
    version=st.integers(1, 50),
    ids=st.integers(1, 12),
    power=st.integers(6, 25),
    process=st.tuples(st.integers(10, 30), st.integers(10, 30)),
)
machines = st.lists(readings, min_size=1, max_size=16)


def _placed(drawn: list[SmiReading], first: int, per_card: int) -> list[SmiReading]:
    return [
        replace(one, npu=first + index // per_card, chip=index % per_card, logic_id=index)
        for index, one in enumerate(drawn)
    ]


def _same(table: InfoTable, placed: list[SmiReading], *, chips: bool = True, memory: str = "hbm") -> None:
    assert table.unparsed_lines == []
    assert [(each.npu_id, each.chip_id) for each in table.devices] == [
        (one.npu, one.chip if chips else None) for one in placed
    ]
    for read, one in zip(table.devices, placed, strict=True):
        assert (read.name, read.health, read.temp_c, read.bus_id) == (one.name, one.health, one.celsius, one.bus)
        assert read.util_pct == one.aicore
        used = (getattr(read, f"{memory}_used_mb"), getattr(read, f"{memory}_total_mb"))
        assert used == (one.used_mib, one.total_mib)
        assert (read.hbm_used_mb is None) == (memory == "mem")


def _same_processes(table: InfoTable, placed: list[SmiReading], *, chips: bool = True) -> None:
    printed = [(one, each) for one in placed for each in one.processes[: npu_smi_layout.MOST_PROCESSES]]
    assert [(each.npu_id, each.chip_id, each.pid, each.name, each.mem_mb) for each in table.processes] == [
        (one.npu, one.chip if chips else None, each.pid, each.name[:15] or None, each.used_mib) for one, each in printed
    ]
    idle = {one.npu for one in placed} - {one.npu for one, _ in printed}
    assert set(table.no_process_npus) == idle


@settings(max_examples=25, deadline=None)
@given(drawn=machines, first=st.integers(0, 40_000), frame=frames, family=st.sampled_from(FAMILIES))
def test_what_the_simulator_prints_is_read_back(
    drawn: list[SmiReading], first: int, frame: TableLayout, family: ChipFamily
) -> None:
    placed = _placed(drawn, first, 2 if family == "A3" else 1)
    table = output_parser.parse_info_table(npu_smi_layout.format_info(placed, "25.5.1", family, frame))
    _same(table, placed, memory="mem" if family == "310P" else "hbm")
    _same_processes(table, placed)
    assert (table.tool_version, table.driver_version) == ("25.5.1", "25.5.1")
    assert table.layout == ("ddr" if family == "310P" else "hbm")
    for read, one in zip(table.devices, placed, strict=True):
        assert read.power_w == (None if family == "310P" else one.watt)
        assert (read.phy_id, read.logic_id) == {"A3": (one.logic_id, None), "310P": (None, one.logic_id)}.get(
            family, (None, None)
        )


@settings(max_examples=10, deadline=None)
@given(drawn=machines, wide=st.booleans())
def test_tables_of_the_950_are_read_back(drawn: list[SmiReading], wide: bool) -> None:
    placed = _placed(drawn, 0, 1)
    table = output_parser.parse_info_table(layouts.newest(placed, "26.2.0.b007", wide))
    _same(table, placed, chips=False)
    _same_processes(table, placed, chips=False)
    assert {each.util_kind for each in table.devices} == {"npu"}
    assert table.container_column is wide


@settings(max_examples=15, deadline=None)
@given(drawn=machines)
def test_tables_of_the_oldest_driver_are_read_back(drawn: list[SmiReading]) -> None:
    placed = _placed(drawn, 1, 4)
    table = output_parser.parse_info_table(layouts.oldest(placed, "21.0.3.1"))
    _same(table, placed, memory="mem")
    assert [each.logic_id for each in table.devices] == [one.logic_id for one in placed]
    assert {each.hugepages_used for each in table.devices} == {None}
    assert table.process_table is False


@settings(max_examples=10, deadline=None)
@given(drawn=machines, family=st.sampled_from(FAMILIES))
def test_the_other_outputs_are_read_back(drawn: list[SmiReading], family: ChipFamily) -> None:
    placed = _placed(drawn, 0, 2 if family == "A3" else 1)
    watched = output_parser.parse_output(npu_smi_layout.format_watch_heading() + npu_smi_layout.format_watch(placed))
    assert isinstance(watched, WatchTable) and [row["Pwr(W)"] for row in watched.rows] == [one.watt for one in placed]
    mapped = output_parser.parse_output(npu_smi_layout.format_mapping(placed, "Ascend 910B3", family))
    assert isinstance(mapped, ChipMapping)
    logical = [row["Chip Logic ID"] for row in mapped.rows if row["Chip Name"] == "Ascend 910B3"]
    assert logical == [one.logic_id for one in placed]
    topology = output_parser.parse_output(npu_smi_layout.format_topology(placed, family, 192))
    assert isinstance(topology, Topology) and len(topology.matrix) == len(topology.cpu_affinity) == len(placed)
    usages = output_parser.parse_output(fake_npu_smi._format_type("usages", placed, family, placed[0].npu, None))
    assert isinstance(usages, KeyValueOutput)
    card = [one for one in placed if one.npu == placed[0].npu]
    assert [(row["chip_id"], row["aicore_pct"]) for row in usages.normalised] == [
        (one.chip, one.aicore) for one in card
    ]


fragments = st.sampled_from(
    "| 0     910B3               | OK            | 93.5        36                0    / 0             |\n"
    "| 0                         | 0000:C1:00.0  | 0           0    / 0          3345 / 65536         |\n"
    "+===========================+===============+\n"
    "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
    "| 0       0                 | 4242          | python                   | 177                     |\n"
    "Chip ID                        : 0\nChip Name                      : MCU\nTotal Count : 8\n"
    "NpuID(Idx)  Pwr(W)\nNPU0 NPU1\nNPU0 X HCCS\n...\n[WARNING]The driver\n"
    "NPU ID   Chip Name\nTotal number of vnpu: 3\nAICORE  Memory\n".splitlines()
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(fragments, st.text(max_size=40))).map("\n".join)))
def test_no_text_raises(text: str) -> None:
    plain = smi_values.output_to_dict(output_parser.parse_output(text))
    assert json.loads(json.dumps(plain)) == plain
    assert all(isinstance(device.npu_id, int) for device in output_parser.parse_info_table(text).devices)


@settings(max_examples=25, deadline=None)
@given(drawn=machines, cut=st.integers(0, 5000))
def test_a_cut_table_keeps_the_devices_before_the_cut(drawn: list[SmiReading], cut: int) -> None:
    placed = _placed(drawn, 0, 1)
    text = npu_smi_layout.format_info(placed, "25.5.1", "A2")
    table = output_parser.parse_info_table(text[:cut])
    whole = output_parser.parse_info_table(text)
    done = max(len(table.devices) - 1, 0)
    assert table.devices[:done] == whole.devices[:done]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bash: npu-smi: command not found\n",
        "dcmi model initialized failed, because the device is used. ret is -8020\n",
        "Error parameter of -t\n\nUsage: npu-smi info <watch|proc> [Options...]\n",
        "npu-smi: error while loading shared libraries: libdrvdsmi_host.so: cannot open shared object file\n",
    ],
)
def test_what_is_no_table_is_an_error_with_its_first_line(text: str) -> None:
    found = output_parser.parse_output(text)
    assert isinstance(found, ErrorOutput) and found.message == (text.splitlines() or [""])[0]
    assert output_parser.parse_info_table(text).error == found.message


def test_the_warning_of_a_bare_machine_is_no_device() -> None:
    table = output_parser.parse_info_table(
        npu_smi_layout.format_info(_placed([], 0, 1), "25.5.1", "A2") + "[WARNING]The driver package may not ...\n"
    )
    assert (table.devices, table.warnings, table.unparsed_lines) == (
        [],
        ["[WARNING]The driver package may not ..."],
        [],
    )


reasons = st.text(st.sampled_from("abcxyz0123456789=,. "), min_size=1, max_size=40).map(
    lambda text: f"node {text}".strip()
)


@settings(max_examples=40, deadline=None)
@given(told=st.lists(reasons, min_size=1, max_size=5), card=st.integers(0, 63), chips=st.integers(1, 2))
def test_every_line_of_an_error_belongs_to_its_value(told: list[str], card: int, chips: int) -> None:
    """As `print_diagnosis_info` writes them: an empty line and a colon without a key before each but the first."""
    codes = " ".join(f"80E0{number:04X}" for number in range(len(told)))
    rows = []
    for chip in range(chips):
        rows += [f"\t{'NPU ID':<30} : {card}", f"\t{'Health Status':<30} : Warning", f"\t{'Error Code':<30} : {codes}"]
        rows += [f"\t{'Error Information':<30} : {told[0]}", *(f"\n\t{' ':<30} : {text}" for text in told[1:])]
        rows += [f"\t{'Chip ID':<30} : {chip}", ""]
    read = output_parser.parse_output("\n".join(rows))
    assert isinstance(read, KeyValueOutput) and read.messages == [] and len(read.blocks) == chips
    for chip, block in enumerate(read.blocks):
        assert block.values["Error Information"].split("\n") == [text.strip() for text in told]
        assert (block.values["Error Code"], block.values["Chip ID"]) == (codes, str(chip))
    assert [row["health"] for row in read.normalised] == ["Warning"] * chips


def test_text_below_a_value_belongs_to_it() -> None:
    first = f"\t{'Error Information':<30} : node type=SoC,"
    read = output_parser.parse_output(f"{first}\n{' ' * 41}sensor type=Temperature\n    No process in device.\n")
    assert isinstance(read, KeyValueOutput) and read.messages == ["No process in device."]
    assert read.blocks[0].values == {"Error Information": "node type=SoC,\nsensor type=Temperature"}


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(1, 16),
    prefix=st.sampled_from(["NPU", "Phy-ID"]),
    near=st.sampled_from([None, "", "NA", "-", "0-23", "0-23,96-119", "0-23, 96-119"]),
    nics=st.integers(0, 2),
    header=st.booleans(),
)
def test_a_topology_says_of_every_device_which_cpus_are_near(
    number: int, prefix: str, near: str | None, nics: int, header: bool
) -> None:
    """The A3 with ARM has no such column, drivers of 2026 have columns of NICs, and a list may be empty."""
    names = [f"{prefix}{index}" for index in range(number)]
    ports = [f"NIC{index}" for index in range(nics)]
    told = near is not None and header
    top = "\t   " + "".join(f"{name:<11}" for name in [*names, *ports]) + ("CPU Affinity" if told else "")
    rows = []
    for row in names:
        joined = "".join(f"{'X' if row == column else 'HCCS':<11}" for column in [*names, *ports])
        rows.append(f"{row:<11}{joined}{near if told else ''}")
    rows += [f"{port:<11}" + "".join(f"{'SYS':<11}" for _ in [*names, *ports]) for port in ports]
    read = output_parser.parse_output("\n".join([top, *rows, "", "Legend:", "", "  X    = Self"]))
    assert isinstance(read, Topology) and read.devices == names and list(read.matrix) == names
    cpus = near.replace(" ", "") if told and near not in (None, "", "NA", "-") else None
    assert read.cpu_affinity == dict.fromkeys(names, cpus)
    assert read.matrix[names[0]] == {column: "X" if column == names[0] else "HCCS" for column in [*names, *ports]}
