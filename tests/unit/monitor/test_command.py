"""The command as it is typed: forms, filters, bad options, and the live screen in a terminal of 40 columns."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.cli.app import main
from anabatic.monitor.sources import dcmi
from unit.monitor import fake

pytestmark = pytest.mark.process


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 dies."""
    folder = fake.printing(tmp_path / "bin", fake.table(16))
    monkeypatch.setattr(dcmi, "LIBRARY_PATHS", ())
    monkeypatch.setenv("PATH", fake.on_path(folder))
    monkeypatch.setenv("COLUMNS", "100")
    return folder


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["monitor", *words])
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, captured.out, captured.err


def test_one_look_at_sixteen_dies(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "--once")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert out.count(" OK ") == 16 and "16 devices  npu-smi 26.0.rc1" in out


def test_json_and_csv_and_filters(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--json", "--device", "0,7.1")
    assert code == 0
    assert [(each["npu_id"], each["chip_id"]) for each in json.loads(out)["devices"]] == [(0, 0), (0, 1), (7, 1)]
    code, out, _ = _run(capsys, "--csv", "--device", "7")
    assert code == 0 and len(out.splitlines()) == 3


def test_a_log_is_written_and_played(machine: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert _run(capsys, "--once", "--log", str(log))[0] == 0
    assert _run(capsys, "--once", "--log", str(log))[0] == 0
    assert len(log.read_text().splitlines()) == 2
    code, out, _ = _run(capsys, "--replay", str(log), "--once")
    assert code == 0 and out.count(" OK ") == 16
    code, out, _ = _run(capsys, "--replay", str(log), "--csv")
    assert code == 0 and len(out.splitlines()) == 33


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "9"], "no device 9 here"),
        (["--device", "x"], '--device is "x"'),
        (["--interval", "0"], "--interval is 0"),
        (["--interval", "often"], "interval"),
        (["--json", "--csv"], "two forms"),
        (["--once", "--prom", "0"], "--prom serves until"),
        (["--prom", "web"], "expected PORT"),
        (["--replay", "absent.jsonl"], "absent.jsonl is no file"),
        (["--replay", "absent.jsonl", "--prom", "1"], "--replay shows a recording"),
        (["nowhere"], "nowhere is no folder"),
        (["--once", "--log", "/proc/nothing/log"], "/proc/nothing/log"),
    ],
)
def test_what_is_refused(machine: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    code, out, err = _run(capsys, *words)
    assert code in (1, 2) and out == "" and says in err and "hint: " in err


def test_a_driver_that_refuses_is_one_line_and_json_says_it_too(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.install(machine, "echo 'dcmi model initialized failed, because the device is used. ret is -8020'; exit 1")
    code, out, err = _run(capsys, "--once")
    assert (
        (code, out) == (1, "")
        and err.startswith("error: npu-smi lists no device: dcmi")
        and "hint: another container" in err
    )
    code, out, _ = _run(capsys, "--json")
    assert code == 1 and "-8020" in json.loads(out)["error"]


def _start(words: list[str], columns: int, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "PATH": fake.on_path(folder), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR"):
        environment.pop(name, None)
    child = subprocess.Popen(
        [sys.executable, "-m", "anabatic", "monitor", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    return child, ours


def _read(terminal: int, until: str, seconds: float = 120.0) -> str:
    text, end = "", time.monotonic() + seconds
    while until not in text:
        if time.monotonic() > end or not select.select([terminal], [], [], 1.0)[0]:
            if time.monotonic() > end:
                pytest.fail(f"{until!r} did not come: {text[-500:]!r}")
            continue
        try:
            text += os.read(terminal, 1 << 16).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            break
    return text


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The live screen on 40 columns, begun."""
    child, terminal = _start(["--interval", "0.1"], 40, fake.printing(tmp_path / "bin", fake.table(4)))
    try:
        yield child, terminal
    finally:
        child.kill()
        child.wait()
        os.close(terminal)


def test_the_live_screen_draws_ends_and_leaves_the_terminal_as_it_was(
    narrow: tuple[subprocess.Popen[bytes], int],
) -> None:
    child, terminal = narrow
    text = _read(terminal, "OK") + _read(terminal, "\x1b[J")
    assert "\x1b[?1049h\x1b[?25l" in text
    screen = next(frame for frame in text.split("\x1b[H") if "OK" in frame)
    assert not termios.tcgetattr(terminal)[3] & termios.ICANON  # keys come one by one
    assert screen.count("OK") == 4 and "\x1b[32m" in screen
    os.write(terminal, b"\x1b[A")  # an arrow key does nothing
    _read(terminal, "\x1b[H")
    os.write(terminal, b"q")
    assert "\x1b[?25h\x1b[?1049l" in _read(terminal, "\x1b[?1049l")
    assert child.wait(60) == 0
    assert termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO


def test_a_first_reading_that_hangs_can_be_left_and_leaves_nothing_behind(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child, terminal = _start([], 60, fake.install(tmp_path / "bin", f"echo $$ > {note}; exec sleep 60"))
    try:
        assert "waiting for the first reading" in _read(terminal, "q ends it")
        os.write(terminal, b"q")
        _read(terminal, "\x1b[?1049l")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    left = Path("/proc") / note.read_text().strip() / "stat"
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_live_screen_that_is_ended_leaves_the_terminal_as_it_was(
    narrow: tuple[subprocess.Popen[bytes], int],
) -> None:
    child, terminal = narrow
    _read(terminal, "\x1b[J")
    child.send_signal(signal.SIGTERM)
    _read(terminal, "\x1b[?25h\x1b[?1049l")
    assert child.wait(60) == 130
