"""What looking at the devices costs: 16 dies printed by a fake `npu-smi`.

    python benchmarks/monitor.py [once] [live] [parse]

`once`: CPU time of `anabatic monitor --once` beyond npu-smi's own, the median and the least of 15. `live`: share of a
core of the live screen at one second, over 30 seconds, in a pseudo terminal of 120 x 40. `parse`: one table.
"""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from anabatic.monitor.npu_smi import output_parser
from anabatic_sim import npu_smi_layout
from anabatic_sim.npu_smi_layout import SmiProcess, SmiReading

ANABATIC = [sys.executable, "-m", "anabatic"]


def table() -> str:
    readings = [
        SmiReading(
            npu=die // 2,
            chip=die % 2,
            logic_id=die,
            name="Ascend910",
            health="OK",
            watt=None if die % 2 else 300.5,
            celsius=45,
            bus=f"0000:{die:02X}:00.0",
            aicore=5 * die,
            used_mib=3000 * die,
            total_mib=65536,
            processes=(SmiProcess(os.getpid() if die == 0 else 4_000_000 + die, "python3.11", 2000),),
        )
        for die in range(16)
    ]
    return npu_smi_layout.format_info(readings, "26.0.rc1", "A3")


def fake(folder: Path) -> Path:
    (folder / "table").write_text(table(), encoding="utf-8")
    tool = folder / "npu-smi"
    tool.write_text(f"#!/bin/sh\nexec cat {folder}/table\n", encoding="utf-8")
    tool.chmod(0o755)
    return tool


def cpu(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def once(tool: Path, environment: dict[str, str]) -> None:
    cpu([*ANABATIC, "monitor", "--once"], environment)  # writes the byte code
    for name, words in (("--version", ["--version"]), ("monitor --once", ["monitor", "--once"])):
        whole = [cpu([*ANABATIC, *words], environment) for _ in range(15)]
        own = statistics.median(cpu([str(tool), "info"], environment) for _ in range(15))
        calls = 2 if "monitor" in name else 0  # info, info -m
        beyond = [1000 * (seconds - calls * own) for seconds in whole]
        print(f"anabatic {name}: {statistics.median(beyond):.0f} ms of CPU, least {min(beyond):.0f} ms")
        print(f"  npu-smi itself: {1000 * own:.1f} ms a call")


def live(environment: dict[str, str], seconds: float = 30.0) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    screen = subprocess.Popen([*ANABATIC, "monitor"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.set_blocking(ours, False)

    def used() -> float:
        words = Path(f"/proc/{screen.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def drain(until: float) -> int:
        drawn = 0
        while time.monotonic() < until:
            time.sleep(0.05)
            try:
                drawn += os.read(ours, 1 << 20).count(b"\x1b[H")
            except BlockingIOError:
                continue
        return drawn

    try:
        drain(time.monotonic() + 3)
        start, before = time.monotonic(), used()
        frames = drain(start + seconds)
        share = (used() - before) / (time.monotonic() - start)
    finally:
        screen.terminate()
        screen.wait()
        os.close(ours)
    print(f"live at 1 s: {share:.2%} of a core, {frames} frames in {seconds:.0f} s (npu-smi's own time not counted)")


def parse() -> None:
    text, times = table(), 300
    start = time.process_time()
    for _ in range(times):
        output_parser.parse_output(text)
    print(f"parsing 16 dies and their processes: {1000 * (time.process_time() - start) / times:.2f} ms")


def main() -> None:
    wanted = sys.argv[1:] or ["once", "live", "parse"]
    with tempfile.TemporaryDirectory() as name:
        tool = fake(Path(name))
        environment = {**os.environ, "PATH": f"{name}:{os.environ['PATH']}", "COLUMNS": "120"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if "once" in wanted:
            once(tool, environment)
        if "live" in wanted:
            environment.pop("COLUMNS")
            live(environment)
        if "parse" in wanted:
            parse()


if __name__ == "__main__":
    main()
