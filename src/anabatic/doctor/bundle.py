"""`anabatic doctor --bundle`: what support asks for, in one archive, secrets removed.

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
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_size
from anabatic.core.paths import write_atomic
from anabatic.doctor import check_report, redaction
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.machine_facts import LiveFacts
from anabatic.doctor.root_files import RootFiles
from anabatic.doctor.target_machine import BUNDLE_FOLDER, TargetMachine

ARCHIVE_FOLDER = "anabatic-bundle"
_EXTRA_FILES = ("/etc/os-release", "/proc/version", "/proc/loadavg", "/proc/modules", "/etc/ascend_install.info",
         "/usr/local/Ascend/firmware/version.info", "/etc/hccn.conf", "/proc/cmdline")  # fmt: skip
"""Files that no check reads and every supporter asks for."""
_SOCKET_TABLES, _LISTENING_ROW = (
    ("/proc/net/tcp", "/proc/net/tcp6"),
    re.compile(r"local_address|^\s*\d+:\s+\S+\s+\S+\s+0A\b"),
)
"""Of these tables only what listens here leaves the machine, not who is connected."""
_PLOG_FOLDER = "ascend/log/debug/plog"
_MAX_PLOGS, _MAX_PLOG_LINES = 8, 200
_OTHER_FILE_HINT = "choose another file with --bundle"


def write_bundle(path: Path, machine: TargetMachine, lines: Sequence[CheckResult]) -> None:
    """Write the archive.

    Raises:
        ConfigError: the name is that of another kind of file.
        Failure: it cannot be written.
    """
    if not path.name.endswith((".tar.gz", ".tgz")):
        raise ConfigError(f"--bundle is {str(path)!r}, and what is written is a .tar.gz", "--bundle doctor.tar.gz")
    members = collect_members(machine, lines)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(f"{ARCHIVE_FOLDER}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    write_atomic(path, packed.getvalue(), _OTHER_FILE_HINT)
    log.info(
        f"{path}: {len(members)} files, {format_size(len(packed.getvalue()))}; tokens, keys, passwords and user names "
        f"are "
        f"removed; look into it before you send it: tar tzf {path}"
    )


def collect_members(machine: TargetMachine, lines: Sequence[CheckResult]) -> dict[str, bytes]:
    """Return path in the archive -> content, all of it redacted."""
    names = redaction.find_person_names(machine.env)
    for extra in _EXTRA_FILES:
        machine.files.read_text(extra)
    members = {
        f"{BUNDLE_FOLDER[1:]}/environ": _encode_environ(redaction.redact_environ(machine.env, names)),
        f"{BUNDLE_FOLDER[1:]}/facts.json": _encode_json(redaction.redact_values(_collect_facts(machine), names)),
        f"{BUNDLE_FOLDER[1:]}/report.json": _encode_json(
            redaction.redact_values(json.loads(check_report.render_json(lines, "en", __version__, "/")), names)
        ),
        f"{BUNDLE_FOLDER[1:]}/report.txt": redaction.redact_text(
            check_report.render_report(lines, "en", 100, False), names
        ).encode("utf-8", "replace"),
    }
    if errors := _extract_plog_errors(machine):
        members[f"{BUNDLE_FOLDER[1:]}/plog-errors.txt"] = redaction.redact_text(errors, names).encode(
            "utf-8", "replace"
        )
    return {**_collect_read_files(machine.files, names), **members}


def _encode_environ(variables: dict[str, str]) -> bytes:
    rows = (f"{name}={value}" for name, value in sorted(variables.items()))
    return ("\n".join(row.replace("\n", " ") for row in rows) + "\n").encode("utf-8", "replace")


def _encode_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=True, indent=1) + "\n").encode()


def _collect_facts(machine: TargetMachine) -> dict[str, Any]:
    facts = machine.facts
    known = facts.list_fact_names() if isinstance(facts, LiveFacts) else _RECORDED_FACTS
    return {name: value for name in known if (value := facts.get(name)) is not None}


_RECORDED_FACTS = ("packages", "python", "cpu", "limits", "npu-smi", "disk", "interfaces", "denied", "hccn", "ecc",
             "nvidia-smi", "import", "sandbox")  # fmt: skip


def _collect_read_files(files: RootFiles, names: set[str]) -> dict[str, bytes]:
    """Every path that was asked for and is there; a folder is left to the files in it."""
    found: dict[str, bytes] = {}
    for path, data in list(files.reads.items()):
        inside = posixpath.normpath("/" + redaction.redact_text(path, names)).strip("/")
        if not inside or inside.startswith((BUNDLE_FOLDER[1:] + "/", "proc/1/environ")):
            continue
        if data is None and files.is_dir(path):
            inside = f"{inside}/.folder"
        content = (data or b"").decode("utf-8", "replace")
        if path in _SOCKET_TABLES:
            content = "".join(row for row in content.splitlines(True) if _LISTENING_ROW.search(row))
        found[inside] = redaction.redact_text(content, names).encode("utf-8", "replace")
    return {path: data for path, data in found.items() if not any(other.startswith(f"{path}/") for other in found)}


def _extract_plog_errors(machine: TargetMachine) -> str:
    """The ERROR lines of the newest logs of CANN (their place: hicann/runtime, ASCEND_PROCESS_LOG_PATH)."""
    env, files = machine.env, machine.files
    work, home = env.get("ASCEND_WORK_PATH", ""), env.get("HOME", "")
    places = [
        env.get("ASCEND_PROCESS_LOG_PATH", "") + "/debug/plog",
        f"{work}/log/debug/plog",
        f"{home}/{_PLOG_FOLDER}",
    ]
    folder = next((place for place in places if place.startswith("/") and files.list_names(place, "plog-*")), None)
    if folder is None:
        return ""
    found = []
    for name in files.list_names(folder, "plog-*")[-_MAX_PLOGS:]:
        rows = [row for row in (files.read_text(f"{folder}/{name}") or "").splitlines() if "[ERROR]" in row]
        files.reads[f"{folder}/{name}"] = b""  # its other lines stay here
        found += [f"== {name}", *rows[:_MAX_PLOG_LINES]]
    return "\n".join(found) + "\n"
