"""Outputs of `npu-smi` out of mails, issues and logs are read as those of the tool itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.monitor.npu_smi import output_parser
from anabatic_sim import fake_npu_smi, npu_smi_layout
from anabatic_sim.npu_smi_layout import SmiReading
from suite import smi_values

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "npu-smi"
PREFIXES: dict[str, Callable[[int], str]] = {
    "mail": lambda row: "> ",
    "mail of a mail": lambda row: "> > ",
    "mail without blanks": lambda row: ">",
    "html": lambda row: "&gt; ",
    "comment": lambda row: "# ",
    "diff": lambda row: "+",
    "time and bar": lambda row: f"2026-11-20 10:42:{row % 60:02d} | ",
    "time alone": lambda row: f"10:42:{row % 60:02d} ",
    "seconds since 1970": lambda row: f"{1_763_628_154 + row // 3} ",
    "kubectl": lambda row: f"2026-11-20T10:42:34.{row * 987_654_321 % 10**9}Z ",
    "kubectl with the pod": lambda row: f"[pod/train-0/main] 2026-11-20T10:42:34.{row:09d}+08:00 ",
    "compose": lambda row: "worker-1  | ",
    "logging": lambda row: "INFO:root:",
    "logging with the time": lambda row: f"2026-11-20 10:42:34,{row:03d} - root - INFO - ",
    "logging in brackets": lambda row: f"[2026-11-20 10:42:34,{row:03d}] [INFO] [runner.py:12:main] ",
    "loguru": lambda row: f"2026-11-20 10:42:34.{row:03d} | INFO     | __main__:<module>:12 - ",
    "glog": lambda row: f"I1120 10:42:34.{row:06d}  1234 a.cc:12] ",
    "syslog": lambda row: f"Nov 20 10:42:{row % 60:02d} host-1 train[1234]: ",
    "kernel": lambda row: f"[{12 + row * 0.01:12.6f}] ",
    "level": lambda row: "INFO ",
    "rank": lambda row: "[rank0]: ",
    "torchrun": lambda row: "[default0]:",
    "srun": lambda row: "0: ",
    "mpirun": lambda row: "[1,0]<stdout>:",
    "ray": lambda row: "(pid=1234, ip=10.0.0.1) ",
    "pdsh": lambda row: "node1: ",
    "host": lambda row: "host1 ",
    "grep": lambda row: f"{row + 1}:",
    "cat": lambda row: f"{row + 1:6d}\t",
    "green": lambda row: "\x1b[32m",
    "green, written out": lambda row: "^[[1;32m",
    "cleared": lambda row: "\x1b[K" if row else "\x1b[H\x1b[2J",
}


ONE = SmiReading(0, 0, 0, "910B3", "OK", 93.5, 40, "0000:C1:00.0", 7, 1, 65536)


def _put(before: Callable[[int], str], text: str, trailing: bool = True) -> str:
    rows = [before(row) + line for row, line in enumerate(text.splitlines())]
    return "".join((row if trailing else row.rstrip()) + "\n" for row in rows)


def _values(text: str) -> dict[str, Any]:
    """What is read; of lines that no layout has, the words."""
    read = smi_values.output_to_dict(output_parser.parse_output(text))
    for name in ("unparsed_lines", "messages", "warnings"):
        read[name] = [" ".join(line.split()) for line in read.get(name, [])]
    return read


@pytest.mark.parametrize(
    "path", sorted(SAMPLES.glob("*.txt")) or [None], ids=lambda path: path.stem if path else "none"
)
def test_a_collected_output_is_read_behind_every_prefix(path: Path | None) -> None:
    if path is None:
        pytest.skip("the collected outputs of npu-smi are not here")
    text = path.read_text(encoding="utf-8")
    assert output_parser.strip_line_prefixes(text) == text.splitlines()
    expected = _values(text)
    if expected["kind"] == "error":
        return
    for name, before in PREFIXES.items():
        for trailing in (True, False):
            assert _values(_put(before, text, trailing)) == expected, name


stamps = st.builds(
    lambda day, clock, fraction, zone: f"2026-11-{day:02d}{clock}{fraction}{zone}",
    st.integers(1, 30),
    st.sampled_from([" 10:42:34", "T10:42:34"]),
    st.sampled_from(["", ".1", ".123", ",123", ".123456789"]),
    st.sampled_from(["", "Z", "+08:00"]),
)
labels = st.text(st.sampled_from("abkxyz0159-_/"), min_size=1, max_size=12).filter(lambda text: text[0].isalpha())
written = st.builds(
    lambda opens, parts, closes: opens + " ".join(parts) + closes,
    st.sampled_from(["", "[", "(", "> ", "# "]),
    st.lists(st.one_of(stamps, labels, st.sampled_from(["INFO", "[rank3]", "[12]"])), min_size=1, max_size=3),
    st.sampled_from([": ", "] ", ") ", " | ", " - ", ">"]),
)
machines = st.lists(
    st.builds(
        SmiReading,
        npu=st.just(0),
        chip=st.just(0),
        logic_id=st.just(0),
        name=st.just("910B3"),
        health=st.just("OK"),
        watt=st.integers(0, 9999).map(lambda tenth: tenth / 10),
        celsius=st.integers(0, 120),
        bus=st.just("0000:C1:00.0"),
        aicore=st.integers(0, 100),
        used_mib=st.integers(0, 60_000),
        total_mib=st.just(65_536),
    ),
    min_size=1,
    max_size=3,
)


def _outputs(drawn: list[SmiReading]) -> list[str]:
    typed = [fake_npu_smi._format_type(kind, drawn, "A2", drawn[0].npu, None) for kind in ("usages", "common", "power")]
    tables = [
        npu_smi_layout.format_info(drawn, "25.5.1", "A2"),
        npu_smi_layout.format_mapping(drawn, "Ascend 910B3", "A2"),
    ]
    return [
        *tables,
        npu_smi_layout.format_watch_heading() + npu_smi_layout.format_watch(drawn),
        npu_smi_layout.format_topology(drawn, "A2", 192),
        *typed,
    ]


@settings(max_examples=40, deadline=None)
@given(drawn=machines, before=written)
def test_any_time_and_label_may_stand_before_the_lines(drawn: list[SmiReading], before: str) -> None:
    for text in _outputs(drawn):
        assert _values(_put(lambda row: before, text)) == _values(text)


@pytest.mark.parametrize("form", ["[rank{}]: ", "{}: ", "node{}: ", "(pid={}) ", "2026-11-20 10:42:34 [rank{}]: "])
def test_lines_of_other_processes_between_them_are_left_out(form: str) -> None:
    for text in _outputs([ONE]):
        both = "".join(form.format(rank) + line + "\n" for line in text.splitlines() for rank in (0, 1))
        assert _values(both) == _values(text)


def test_text_around_a_quoted_table_does_not_hide_it() -> None:
    table = npu_smi_layout.format_info([ONE], "25.5.1", "A2")
    mail = "Hello,\nthis is what it prints:\n\n" + _put(lambda row: "> ", table) + "\nWhat could it be?\n" * 90
    assert output_parser.parse_info_table(mail).devices == output_parser.parse_info_table(table).devices != []
    log = _put(lambda row: f"2026-11-20 10:42:{row % 60:02d} INFO ", "start\n" + table + "step 1\nstep 2\n" * 50)
    assert output_parser.parse_info_table(log).devices == output_parser.parse_info_table(table).devices


def test_a_colour_within_a_cell_is_no_part_of_the_value() -> None:
    table = npu_smi_layout.format_info([ONE], "25.5.1", "A2")
    assert (
        output_parser.parse_info_table(table.replace(" OK ", " \x1b[1;32mOK\x1b[0m ")).devices
        == output_parser.parse_info_table(table).devices
    )


@pytest.mark.parametrize(
    "told",
    [
        "2026-11-20 10:42:34 | nothing of a table\n2026-11-20 10:42:35 | here\n",
        "[rank0]: RuntimeError: NPU out of memory\n",
        "NPU ID 3 is not exist.\n",
        "There is no NPU card on this server.\n",
        "> \n> \n",
    ],
)
def test_text_without_a_table_stays_as_it_is(told: str) -> None:
    assert output_parser.strip_line_prefixes(told) == told.splitlines()
