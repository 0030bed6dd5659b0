"""`npu-smi` as a source: one process at a time, with a time limit and a limit of output."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from anabatic.monitor.snapshot import Snapshot

if TYPE_CHECKING:  # imported where there are NPUs
    from anabatic.monitor.npu_smi.unframed_tables import ChipMapping

TIMEOUT_SECONDS = 10.0
"""As gpustat's Ascend reader allows; one call takes 0.3 to 3 seconds on a full machine."""
MAX_OUTPUT_BYTES = 1 << 20
_NPU_SMI_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/Ascend/driver/tools")

_ERROR_HINTS = (
    ("-8020", "another container owns the devices: start this one with `--privileged`, or stop the other"),
    ("-8002", "reading the devices is not permitted: run as root or as a user of the group HwHiAiUser"),
    ("-8005", "the driver is not loaded, or its device nodes are not in this container: `ls /dev/davinci*`"),
    ("-8006", "the driver did not answer in time: look at `dmesg`, and at another `npu-smi` that hangs"),
    ("libdrvdsmi_host", "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:$LD_LIBRARY_PATH"),
    ("libc_sec", "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/common:$LD_LIBRARY_PATH"),
    ("There is no NPU card", "`lspci | grep -i d80` shows whether the cards are on the bus"),
    ("ermission denied", "run as root, or as a user of the group HwHiAiUser"),
)

_running_children: set[subprocess.Popen[bytes]] = set()
"""At most one: a program that ends while npu-smi hangs must not leave it behind."""
_call_lock = threading.Lock()  # the vendor: no concurrent use


def find_npu_smi() -> str | None:
    """Return the path of npu-smi; a service's PATH often lacks its folder."""
    return shutil.which("npu-smi") or shutil.which("npu-smi", path=os.pathsep.join(_NPU_SMI_FOLDERS))


def run_command(command: list[str], timeout: float = TIMEOUT_SECONDS) -> tuple[str, int]:
    """Return what a command prints, errors included, and its exit code.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it took longer than `timeout` seconds, or printed more than `MAX_OUTPUT_BYTES`; it was killed.
    """
    with _call_lock:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        _running_children.add(child)
        try:
            output = _read_output(child, Path(command[0]).name, timeout)
        finally:
            _end_child(child)
            _running_children.discard(child)
        return output.decode("utf-8", "replace"), child.returncode


def _read_output(child: subprocess.Popen[bytes], name: str, timeout: float) -> bytes:
    assert child.stdout is not None
    output, deadline = bytearray(), time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError(f"{name} did not answer within {timeout:g} s")
            chunk = os.read(child.stdout.fileno(), 1 << 16)
            if not chunk:
                return bytes(output)
            output += chunk
            if len(output) > MAX_OUTPUT_BYTES:
                raise TimeoutError(f"{name} printed more than {MAX_OUTPUT_BYTES >> 20} MiB")


def _end_child(child: subprocess.Popen[bytes]) -> None:
    """Leave no process behind; one that waits in the driver cannot be killed and is not waited for."""
    if child.stdout is not None:
        child.stdout.close()
    try:
        child.wait(0.5 if child.poll() is None else None)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(1)
        except subprocess.TimeoutExpired:
            child.returncode = -signal.SIGKILL  # keeps Python from warning of it; the kernel reaps it with us


@atexit.register
def _kill_running_children() -> None:
    """End what a thread is still waiting for when the program ends."""
    for child in list(_running_children):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, signal.SIGKILL)


def parse_snapshot(text: str) -> Snapshot:
    """Return the devices and processes of `npu-smi info`; text without devices is an error."""
    from anabatic.monitor.npu_smi import output_parser

    table = output_parser.parse_info_table(text)
    found = Snapshot("npu-smi", driver_version=table.driver_version, notes=list(table.warnings))
    found.devices, found.processes = table.devices, table.processes
    if table.unparsed_lines and found.devices:
        found.notes.append(
            f"npu-smi: lines that are not understood ({len(table.unparsed_lines)}), the first: "
            f"{table.unparsed_lines[0].strip()[:60]}"
        )
    if not found.devices:
        first = table.error if table.error is not None else next(iter(table.unparsed_lines), "")
        excerpt = "".join(letter if letter.isprintable() else "?" for letter in first.strip()[:200])
        found.error = f"npu-smi lists no device: {excerpt or 'no output'}"
        found.hint = suggest_fix(text)
    return found


def suggest_fix(text: str) -> str:
    """Return what to do about an error that the driver's tools print."""
    return next(
        (what for word, what in _ERROR_HINTS if word in text), "run `npu-smi info` by hand, and look at `dmesg`"
    )


class NpuSmiSource:
    """Reads by running `npu-smi info`."""

    def __init__(self, path: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self.path = path
        self._timeout = timeout
        self._logic_ids: dict[tuple[int, int], int] | None = None

    def read(self) -> Snapshot:
        """Return the devices now; a call that fails or hangs is a snapshot with an error."""
        try:
            text, code = run_command([self.path, "info"], self._timeout)
            found = parse_snapshot(text)
            if found.devices and self._logic_ids is None:
                self._logic_ids = self._read_logic_ids()
        except (OSError, TimeoutError) as error:
            return Snapshot("npu-smi", error=str(error), hint=suggest_fix(str(error)))
        if found.error is not None and code:
            found.error += f" ({_describe_exit(code)})"
        elif code:
            found.notes.append(f"npu-smi: {_describe_exit(code)}: devices may be missing")
        for device in found.devices:
            if device.logic_id is None and self._logic_ids:
                device.logic_id = self._logic_ids.get((device.npu_id, device.chip_id or 0))
        return found

    def _read_logic_ids(self) -> dict[tuple[int, int], int]:
        """Return (card, chip) -> logic id from `npu-smi info -m`, which does not change while the machine is up."""
        from anabatic.monitor.npu_smi import output_parser, unframed_tables

        try:
            parsed = output_parser.parse_output(run_command([self.path, "info", "-m"], self._timeout)[0])
        except (OSError, TimeoutError):
            return {}  # the devices are then taken in the order of the table
        return extract_logic_ids(parsed) if isinstance(parsed, unframed_tables.ChipMapping) else {}


def _describe_exit(code: int) -> str:
    """Return `exit code 3`, or the name of the signal."""
    if code >= 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"ended by {known.get(-code, f'signal {-code}')}"


def extract_logic_ids(table: ChipMapping) -> dict[tuple[int, int], int]:
    """Return (card, chip) -> logic id; a 950 has a physical one instead."""
    found = {}
    for row in table.rows:
        logic = row.get("Chip Logic ID", row.get("Chip Phy-ID"))
        npu, chip = row.get("NPU ID"), row.get("Chip ID")
        if isinstance(logic, int) and isinstance(npu, int):
            found[npu, chip if isinstance(chip, int) else 0] = logic
    return found


def open_source() -> NpuSmiSource | str | None:
    """Return the source, None where there is no npu-smi, or why the one that is here is of no use."""
    path = find_npu_smi()
    if path is not None:
        return NpuSmiSource(path)
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *_NPU_SMI_FOLDERS]
    binary = next(
        (place for folder in folders if os.path.isfile(place := os.path.join(folder or ".", "npu-smi"))), None
    )
    return binary and f"{binary} may not be run by this user: become root, or join the group HwHiAiUser"
