"""`anabatic doctor --bundle`: what a supporter asks for, in one archive, secrets removed.

Unpacked it is a root folder for `anabatic doctor --root`: every file that a check read lies in its place, what was only
looked for is an empty file, and what is no file is in `anabatic-doctor/`.
"""

from __future__ import annotations

import gzip
import io
import json
import posixpath
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabatic import __version__
from anabatic.core import log
from anabatic.core.paths import write_atomic
from anabatic.core.text import size
from anabatic.doctor import redact, report
from anabatic.doctor.facts import Live
from anabatic.doctor.files import Files
from anabatic.doctor.line import Line
from anabatic.doctor.machine import OWN, Machine

FOLDER = "anabatic-bundle"
_MORE = ("/etc/os-release", "/proc/version", "/proc/loadavg", "/proc/modules", "/etc/ascend_install.info",
         "/usr/local/Ascend/firmware/version.info", "/etc/hccn.conf", "/proc/cmdline")  # fmt: skip
"""Files that no check reads and every supporter asks for."""
_SOCKETS, _OURS = ("/proc/net/tcp", "/proc/net/tcp6"), re.compile(r"local_address|^\s*\d+:\s+\S+\s+\S+\s+0A\b")
"""Of these tables only what listens here leaves the machine, not who is connected."""
_PLOG = "ascend/log/debug/plog"
_PLOGS, _PLOG_LINES = 8, 200
_OTHER_FILE = "choose another file with --bundle"


def write(path: Path, machine: Machine, lines: Sequence[Line]) -> None:
    """Write the archive.

    Raises:
        Failure: it cannot be written.
    """
    members = contents(machine, lines)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    write_atomic(path, packed.getvalue(), _OTHER_FILE)
    log.info(
        f"{path}: {len(members)} files, {size(len(packed.getvalue()))}; tokens, keys, passwords and user names are "
        f"removed; look into it before you send it: tar tzf {path}"
    )


def contents(machine: Machine, lines: Sequence[Line]) -> dict[str, bytes]:
    """Return path in the archive -> content, all of it redacted."""
    names = redact.people(machine.env)
    for extra in _MORE:
        machine.files.text(extra)
    members = {
        f"{OWN[1:]}/environ": _lines(redact.environ(machine.env, names)),
        f"{OWN[1:]}/facts.json": _json(redact.values(_facts(machine), names)),
        f"{OWN[1:]}/report.json": _json(
            redact.values(json.loads(report.as_json(lines, "en", __version__, "/")), names)
        ),
        f"{OWN[1:]}/report.txt": redact.text(report.text(lines, "en", 100, False), names).encode("utf-8", "replace"),
    }
    if errors := _plog(machine):
        members[f"{OWN[1:]}/plog-errors.txt"] = redact.text(errors, names).encode("utf-8", "replace")
    return {**_seen(machine.files, names), **members}


def _lines(variables: dict[str, str]) -> bytes:
    rows = (f"{name}={value}" for name, value in sorted(variables.items()))
    return ("\n".join(row.replace("\n", " ") for row in rows) + "\n").encode("utf-8", "replace")


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=True, indent=1) + "\n").encode()


def _facts(machine: Machine) -> dict[str, Any]:
    facts = machine.facts
    known = facts.names() if isinstance(facts, Live) else _RECORDED
    return {name: value for name in known if (value := facts.get(name)) is not None}


_RECORDED = ("packages", "python", "cpu", "limits", "npu-smi", "disk", "interfaces", "denied", "hccn", "ecc",
             "nvidia-smi", "import", "sandbox")  # fmt: skip


def _seen(files: Files, names: set[str]) -> dict[str, bytes]:
    """Every path that was asked for and is there; a folder is left to the files in it."""
    found: dict[str, bytes] = {}
    for path, data in list(files.seen.items()):
        inside = posixpath.normpath("/" + redact.text(path, names)).strip("/")
        if not inside or inside.startswith((OWN[1:] + "/", "proc/1/environ")):
            continue
        if data is None and files.folder(path):
            inside = f"{inside}/.folder"
        content = (data or b"").decode("utf-8", "replace")
        if path in _SOCKETS:
            content = "".join(row for row in content.splitlines(True) if _OURS.search(row))
        found[inside] = redact.text(content, names).encode("utf-8", "replace")
    return {path: data for path, data in found.items() if not any(other.startswith(f"{path}/") for other in found)}


def _plog(machine: Machine) -> str:
    """The ERROR lines of the newest logs of CANN (their place: hicann/runtime, ASCEND_PROCESS_LOG_PATH)."""
    env, files = machine.env, machine.files
    work, home = env.get("ASCEND_WORK_PATH", ""), env.get("HOME", "")
    places = [env.get("ASCEND_PROCESS_LOG_PATH", "") + "/debug/plog", f"{work}/log/debug/plog", f"{home}/{_PLOG}"]
    folder = next((place for place in places if place.startswith("/") and files.names(place, "plog-*")), None)
    if folder is None:
        return ""
    found = []
    for name in files.names(folder, "plog-*")[-_PLOGS:]:
        rows = [row for row in (files.text(f"{folder}/{name}") or "").splitlines() if "[ERROR]" in row]
        files.seen[f"{folder}/{name}"] = b""  # its other lines stay here
        found += [f"== {name}", *rows[:_PLOG_LINES]]
    return "\n".join(found) + "\n"
