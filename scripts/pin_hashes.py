"""Checksums for the pins: what `scripts/pin.py` writes into requirements-dev.txt and requirements-serve.txt.

Versions and their markers are those of constraints.txt; nothing is resolved here. Of each package that a set needs, the
index says which files there are and their checksums, and a file's metadata says what else the package needs. The index,
its certificate and its password are those of pip's own configuration: pip's classes ask it, and they belong to pip
(tried with pip 23.0 to 24.2).
"""

from __future__ import annotations

import functools
import io
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from itertools import product
from typing import Any

PYTHONS = (10, 11, 12, 13, 14)
"""Minor versions of Python 3, those of pyproject.toml's requires-python."""
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 60
"""manylinux_2_N: of any N that a machine may have. Those of musl are left out: torch has no wheel for them."""
OLD_MANYLINUX = {"x86_64": ("manylinux1", "manylinux2010", "manylinux2014"), "aarch64": ("manylinux2014",)}


@dataclass(frozen=True)
class Pin:
    """A line of constraints.txt."""

    name: str
    version: str
    marker: str = ""


@dataclass(frozen=True)
class File:
    """A file of a release, as the index lists it. `read_metadata` fetches the text of its METADATA."""

    name: str
    sha256: str
    read_metadata: Callable[[], str]


def normalize(name: str) -> str:
    """Return a package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_pins(text: str) -> list[Pin]:
    """Return the pins of constraints.txt, without torch: its checksum depends on the build."""
    lines = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([^\s;]+)(?:\s*;\s*(.+))?", line) for line in lines]
    pins = [Pin(normalize(match[1]), match[2], match[3] or "") for match in found if match]
    if len(pins) != len(lines):
        raise SystemExit("error: constraints.txt has a line that is no name==version\nhint: write it anew with pin.py")
    return [pin for pin in pins if pin.name != "torch"]


def list_environments() -> Iterator[tuple[int, str, dict[str, str]]]:
    """Return (minor version of Python, machine, variables of markers); the first and the last patch of each version."""
    for minor, machine, patch in product(PYTHONS, MACHINES, ("0", "99")):
        variables = {
            "python_version": f"3.{minor}",
            "python_full_version": f"3.{minor}.{patch}",
            "implementation_version": f"3.{minor}.{patch}",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": machine,
            "platform_system": "Linux",
            "platform_release": "",
            "platform_version": "",
            "sys_platform": "linux",
            "os_name": "posix",
        }
        yield minor, machine, variables


def find_pin(pins: Iterable[Pin], name: str, variables: dict[str, str]) -> Pin | None:
    """Return the pin of a package that holds in an environment."""
    from pip._vendor.packaging.markers import Marker

    for pin in pins:
        if pin.name == name and (not pin.marker or Marker(pin.marker).evaluate({**variables, "extra": ""})):
            return pin
    return None


def find_needed(
    roots: list[str], pins: list[Pin], read_requirements: Callable[[Pin], list[str]]
) -> dict[Pin, set[int]]:
    """Return the pins that `roots` need on Linux, directly and through others, each with the Pythons that need it.

    Raises:
        SystemExit: something is needed that has no pin.
    """
    from pip._vendor.packaging.requirements import Requirement

    by_name: dict[str, list[Pin]] = {}
    for pin in pins:
        by_name.setdefault(pin.name, []).append(pin)
    parsed: dict[Pin | None, list[Any]] = {None: [Requirement(line) for line in roots]}
    needed: dict[Pin, set[int]] = {}
    for minor, _, variables in list_environments():
        seen: set[tuple[Pin | None, str]] = set()
        todo: list[tuple[Pin | None, str]] = [(None, "")]
        while todo:
            asking = todo.pop()
            if asking in seen:
                continue
            seen.add(asking)
            pin, extra = asking
            if pin not in parsed:
                parsed[pin] = [Requirement(line) for line in read_requirements(pin)]
            for requirement in parsed[pin]:
                name = normalize(requirement.name)
                marker = requirement.marker
                if name == "torch" or (marker and not marker.evaluate({**variables, "extra": extra})):
                    continue
                found = find_pin(by_name.get(name, ()), name, variables)
                if found is None:
                    raise SystemExit(
                        f"error: {pin.name if pin else 'pyproject.toml'} needs {name} on Python 3.{minor}, and "
                        "constraints.txt has no pin of it\nhint: write it anew: scripts/pin.py python3.10 python3.11"
                    )
                needed.setdefault(found, set()).add(minor)
                todo += [(found, "")] + [(found, extra) for extra in requirement.extras]
    return needed


def write_marker(minors: set[int]) -> str:
    """Return the marker of a line that is for these Pythons; empty for all."""
    if minors == set(PYTHONS):
        return ""
    first, last = min(minors), max(minors)
    if minors != set(range(first, last + 1)):
        return " or ".join(f'python_version == "3.{minor}"' for minor in sorted(minors))
    bounds = [f'python_version >= "3.{first}"'] if first > PYTHONS[0] else []
    bounds += [f'python_version < "3.{last + 1}"'] if last < PYTHONS[-1] else []
    return " and ".join(bounds)


@functools.cache
def list_tags(minor: int, machine: str) -> frozenset[Any]:
    """Return the tags of wheels that a Linux with glibc installs, of any age."""
    from pip._vendor.packaging import tags

    platforms = [f"manylinux_2_{minor_glibc}_{machine}" for minor_glibc in range(NEWEST_GLIBC, 4, -1)]
    platforms += [f"{name}_{machine}" for name in OLD_MANYLINUX[machine]] + [f"linux_{machine}"]
    interpreter = f"cp3{minor}"
    return frozenset(
        [
            *tags.cpython_tags((3, minor), [interpreter], platforms),
            *tags.compatible_tags((3, minor), interpreter, platforms),
        ]
    )


def choose_files(files: list[File], minors: Iterable[int]) -> list[File]:
    """Return the wheels that these Pythons install; with the source archive where one of them has no wheel.

    Raises:
        SystemExit: there is neither.
    """
    from pip._vendor.packaging.tags import parse_tag

    wheels = [
        (file, parse_tag("-".join(file.name[:-4].split("-")[-3:]))) for file in files if file.name.endswith(".whl")
    ]
    chosen: set[File] = set()
    without = []
    for minor, machine in product(sorted(minors), MACHINES):
        fit = {file for file, its in wheels if not its.isdisjoint(list_tags(minor, machine))}
        chosen |= fit
        if not fit:
            without.append(f"Python 3.{minor} on {machine}")
    if without:
        archives = [file for file in files if file.name.endswith((".tar.gz", ".zip"))]
        if not archives:
            raise SystemExit(
                f"error: no wheel for {', '.join(without)} and no source archive among {len(files)} files, for example "
                f"{files[0].name if files else 'none'}\nhint: check that pip's index answers: pip config list"
            )
        print(f"{archives[0].name}: a source archive, for {', '.join(without)}", file=sys.stderr)
        chosen |= set(archives)
    return sorted(chosen, key=lambda file: file.name)


class Index:
    """The indexes that pip is configured for."""

    def __init__(self) -> None:
        from pip._internal.commands import create_command
        from pip._internal.index.collector import LinkCollector

        command: Any = create_command("download")
        options, _ = command.parse_args(["any"])
        self._context = command.main_context
        with self._context():
            self._session = command.get_default_session(options)
            self._collector = LinkCollector.create(self._session, options)
        self._pages: dict[str, list[Any]] = {}

    def list_files(self, pin: Pin) -> list[File]:
        """Return the files of a release with their checksums.

        Raises:
            SystemExit: a checksum is missing, or two indexes give one file different ones.
        """
        if pin.name not in self._pages:
            self._pages[pin.name] = list(self._list_links(pin.name))
        found: dict[str, File] = {}
        for link in self._pages[pin.name]:
            if read_version(link.filename, pin.name) != pin.version:
                continue
            digest = link.hash if link.hash_name == "sha256" else (getattr(link, "_hashes", None) or {}).get("sha256")
            if not digest:
                raise SystemExit(f"error: the index gives no sha256 of {link.filename}\nhint: use another index")
            known = found.setdefault(link.filename, File(link.filename, digest, self._make_reader(link)))
            if known.sha256 != digest:
                raise SystemExit(
                    f"error: {link.filename} has the checksums {known.sha256} and {digest} in two indexes\n"
                    "hint: find out which of them is right before you use either"
                )
        return list(found.values())

    def _list_links(self, name: str) -> Iterator[Any]:
        from pip._internal.index.collector import parse_links
        from pip._internal.models.link import Link

        with self._context():
            for url in self._collector.search_scope.get_index_urls_locations(name):
                page = self._collector.fetch_response(Link(url))
                yield from parse_links(page) if page else ()

    def _make_reader(self, link: Any) -> Callable[[], str]:
        def read() -> str:
            beside = link.metadata_link()
            response = self._session.get((beside or link).url_without_fragment)
            response.raise_for_status()
            if beside:
                return str(response.text)
            with zipfile.ZipFile(io.BytesIO(response.content)) as wheel:
                (name,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
                return wheel.read(name).decode()

        return read


def read_version(file: str, name: str) -> str:
    """Return the version in the name of a wheel or a source archive; empty for other files."""
    match = re.fullmatch(r"([^-]+)-([^-]+)-.+\.whl|(.+)-([^-]+)(?:\.tar\.gz|\.zip)", file)
    return (match[2] or match[4]) if match and normalize(match[1] or match[3]) == name else ""


def read_requirements(metadata: str) -> list[str]:
    """Return the lines Requires-Dist of a METADATA."""
    return HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []


def write_lock(head: str, roots: list[str], pins: list[Pin], index: Index) -> str:
    """Return the text of a lock: every package that `roots` need, with the checksums of its files."""

    def read(pin: Pin) -> list[str]:
        files = index.list_files(pin)
        wheels = [file for file in files if file.name.endswith("-none-any.whl")] or [
            file for file in files if "manylinux" in file.name
        ]
        if not wheels:
            raise SystemExit(f"error: {pin.name}=={pin.version} has no wheel\nhint: pin a version that has one")
        return read_requirements(wheels[0].read_metadata())

    blocks = []
    for pin, minors in sorted(find_needed(roots, pins, read).items(), key=lambda row: (row[0].name, min(row[1]))):
        marker = write_marker(minors)
        hashes = sorted({file.sha256 for file in choose_files(index.list_files(pin), minors)})
        first = f"{pin.name}=={pin.version}" + (f"; {marker}" if marker else "")
        blocks.append(" \\\n".join([first, *(f"    --hash=sha256:{digest}" for digest in hashes)]))
    return head + "\n".join(blocks) + "\n"
