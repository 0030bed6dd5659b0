"""segment.py is the mirror of csrc/segment.h."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from anabatic.core import process_info
from anabatic_sim import machine_spec, shared_memory
from anabatic_sim.libraries import build_layout

PAIRS = (
    ("SimFault", shared_memory.SimFault),
    ("SimDevice", shared_memory.SimDevice),
    ("SimProcess", shared_memory.SimProcess),
    ("SimRates", shared_memory.SimRates),
    ("SimSegment", shared_memory.SimSegment),
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_offsets_are_those_of_the_header(tmp_path: Path) -> None:
    lines, expected = [], []
    for name, mirror in PAIRS:
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        expected.append(ctypes.sizeof(mirror))
        for field, *_ in mirror._fields_:
            lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
            expected.append(getattr(mirror, field).offset)
    code = f'#include <stddef.h>\n#include <stdio.h>\n#include "segment.h"\nint main(void) {{ {" ".join(lines)} }}\n'
    (tmp_path / "layout.c").write_text(code)
    words = ["cc", f"-I{build_layout.CSRC}", "-o", str(tmp_path / "layout"), str(tmp_path / "layout.c")]
    subprocess.run(words, check=True, capture_output=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_a_machine_is_made_read_and_removed() -> None:
    name = shared_memory.create_segment(machine_spec.build_machine(3, "910B4", "1GiB"))
    try:
        assert name in shared_memory.list_machine_names()
        with shared_memory.attach_segment(name) as found:
            assert (found.devices, found.soc, found.cube_cores) == (3, b"Ascend910B4", 20)
            assert [found.device[i].hbm_total for i in range(4)] == [2**30] * 3 + [0]
            assert process_info.is_alive(os.getpid(), int(found.owner_started))
    finally:
        shared_memory.remove_segment(name)
    assert name not in shared_memory.list_machine_names()


def test_a_reused_pid_is_somebody_else() -> None:
    assert not process_info.is_alive(os.getpid(), process_info.read_start_time(os.getpid()) - 1)
    assert not process_info.is_alive(2**22 - 1, 0)
