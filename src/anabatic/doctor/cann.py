"""Checks of CANN: where it is, whether its variables are set, whether it is whole."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from anabatic.doctor import chips, hardware, versions
from anabatic.doctor.line import Line
from anabatic.doctor.machine import Machine
from anabatic.doctor.verdicts import say

_BASE = "/usr/local/Ascend"
_DEFAULTS = (f"{_BASE}/ascend-toolkit/latest", f"{_BASE}/cann", f"{_BASE}/latest")
_MOST = 50
"""Installations of a layout that are looked at."""
_PARTS = ("runtime", "compiler", "opp", "hccl")
_NEEDED = ("runtime", "compiler")
"""torch_npu looks for these folders (`_cann_package_check` of 2.13.0)."""
TBE_PACKAGES = ("attrs", "numpy", "decorator", "sympy", "cffi", "pyyaml", "pathlib2", "psutil", "protobuf", "scipy",
                "requests", "absl-py")  # fmt: skip
"""What the operator compiler imports (requirements of the ascendai/cann images)."""


@dataclass(frozen=True)
class Cann:
    """An installation."""

    root: str
    version: str
    """Empty: it does not say."""

    @property
    def key(self) -> tuple[int, ...] | None:
        """Its version, sortable."""
        return versions.key(self.version)


def version_of(machine: Machine, root: str) -> str:
    """Return the version of the CANN in `root`, in either layout; empty when it does not say."""
    files = machine.files
    for folder in ("aarch64-linux", "x86_64-linux", "."):
        for name in files.names(f"{root}/{folder}", "ascend_*_install.info"):
            text = files.text(f"{root}/{folder}/{name}") or ""
            if (found := re.search(r"^\s*version\s*=\s*(\S+)", text, re.M)) and versions.key(found[1]):
                return found[1]
    for part in ("runtime", "compiler", "opp"):
        if found_part := part_version(machine, root, part):
            return found_part
    index = files.text(f"{root}/version.cfg") or ""
    found = re.search(r"_running_version=\[[^:\]]*:([^\]\s]+)\]", index)
    return found[1] if found and versions.key(found[1]) else ""


def part_version(machine: Machine, root: str, part: str) -> str:
    """Return the CANN version that a part of it says (`version_dir`; `Version` counts otherwise)."""
    for path in (f"{root}/{part}/version.info", f"{root}/share/info/{part}/version.info"):
        text = machine.files.text(path) or ""
        for name in ("version_dir", "Version"):
            found = re.search(rf"^\s*{name}\s*=\s*(\S+)", text, re.M)
            key = versions.key(found[1].removeprefix("cann-")) if found else None
            if found and key and (name == "version_dir" or key >= (8, 5, 0, 0)):
                return found[1].removeprefix("cann-")
    return ""


def roots(machine: Machine) -> list[str]:
    """Return where CANN is installed, each place once, the environment's first."""
    files = machine.files
    home = machine.env.get("HOME", "")
    named = [machine.env.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    places = [*named, *_DEFAULTS]
    places += [f"{_BASE}/{name}" for name in files.names(_BASE, "cann-*")[:_MOST]]
    places += [f"{_BASE}/ascend-toolkit/{name}" for name in files.names(f"{_BASE}/ascend-toolkit", "[0-9]*")[:_MOST]]
    places += [f"{home}/Ascend/ascend-toolkit/latest", f"{home}/Ascend/cann"] if home else []
    found: dict[str, str] = {}
    for place in places:
        if place.startswith("/") and files.folder(place):
            found.setdefault(files.real(place) or place, place)
    return list(found.values())


def installed(machine: Machine) -> Cann | None:
    """Return the CANN that the environment names, else the first that is installed."""
    if "cann" not in machine.notes:
        machine.notes["cann"] = _find(machine)
    found: Cann | None = machine.notes["cann"]
    return found


def _find(machine: Machine) -> Cann | None:
    places = roots(machine)
    good = [Cann(place, version) for place in places if (version := version_of(machine, place))]
    home = machine.env.get("ASCEND_HOME_PATH", "")
    if home in places:
        return Cann(home, version_of(machine, home))
    return good[0] if good else (Cann(places[0], "") if places else None)


def script(machine: Machine) -> str:
    """Return the set_env.sh to source."""
    found = installed(machine)
    root = found.root if found else f"{_BASE}/ascend-toolkit/latest"
    near = (f"{root}/set_env.sh", f"{posixpath.dirname(root)}/set_env.sh", f"{_BASE}/ascend-toolkit/set_env.sh")
    return next((one for one in near if machine.files.exists(one)), near[-1])


def cann(machine: Machine) -> Iterator[Line]:
    """Where it is and which."""
    home, found = machine.env.get("ASCEND_HOME_PATH", ""), installed(machine)
    if home and not machine.files.folder(home):
        yield say("cann.gone", root=home, script=script(machine))
    if found is None:
        if not machine.has_npu:
            yield say("cann.unneeded")
        elif not home:
            yield say("cann.none", soc=hardware.soc(machine) or "your chip")
        return
    if not found.version:
        yield say("cann.no_version", root=found.root)
        return
    yield say("cann.ok" if machine.has_npu else "cann.without_npu", version=found.version, root=found.root)
    all_versions = {version_of(machine, root) for root in roots(machine)} - {"", found.version}
    if all_versions and machine.has_npu:
        yield say("cann.other", version=found.version, root=found.root, others=", ".join(sorted(all_versions)))


def _entries(machine: Machine, name: str) -> list[str]:
    return [entry for entry in machine.env.get(name, "").split(":") if entry]


def set_env(machine: Machine) -> Iterator[Line]:
    """Whether the variables of its set_env.sh are there."""
    found = installed(machine)
    if machine.simulated:
        yield say("set_env.simulated")
        return
    home = machine.env.get("ASCEND_HOME_PATH", "")
    if found is None or not machine.has_npu or not machine.env_known or (home and not machine.files.folder(home)):
        return
    wrong = list(_variables(machine, home))
    yield from wrong or [say("set_env.ok")]


def _variables(machine: Machine, home: str) -> Iterator[Line]:
    source = script(machine)
    if not home:
        yield say("set_env.not_sourced", script=source)
        return
    if "ASCEND_OPP_PATH" not in machine.env:
        yield say("set_env.partial", missing="ASCEND_OPP_PATH", script=source)
    libraries = _entries(machine, "LD_LIBRARY_PATH")
    real = machine.files.real
    if all(real(entry) != real(f"{home}/lib64") for entry in libraries):
        yield say("set_env.library_path", folder=f"{home}/lib64", script=source)
    modules = _entries(machine, "PYTHONPATH")
    if all(real(entry) != real(f"{home}/python/site-packages") for entry in modules):
        yield say("set_env.python_path", folder=f"{home}/python/site-packages", script=source)
    used = {real(entry): entry.removesuffix("/lib64") for entry in libraries if re.search(_CANN_LIBRARY, entry)}
    if len(used) > 1:
        yield say("set_env.two", count=len(used), roots=", ".join(used.values()), script=source)
    if blank := next((entry for entry in libraries if re.search(r"\s", entry)), None):
        yield say("set_env.blank", entry=blank)


_CANN_LIBRARY = r"(/ascend-toolkit/[^/]+|/cann(-[^/]+)?)/lib64$"


def toolkit(machine: Machine) -> Iterator[Line]:
    """Whether it is whole and of one version."""
    found = installed(machine)
    if found is None or not machine.has_npu:
        return
    missing = [part for part in _NEEDED if not machine.files.folder(f"{found.root}/{part}")]
    if missing:
        yield say("toolkit.incomplete", root=found.root, missing=", ".join(missing))
        return
    told = {part: part_version(machine, found.root, part) for part in _PARTS}
    seen = {part: version for part, version in told.items() if version}
    if len(set(seen.values())) > 1:
        yield say("toolkit.mixed", versions=", ".join(f"{part} {version}" for part, version in seen.items()))
    elif seen:
        yield say("toolkit.ok", version=next(iter(seen.values())))


def kernels(machine: Machine) -> Iterator[Line]:
    """Whether the operators for this chip are installed."""
    found = installed(machine)
    if not machine.has_npu or machine.simulated:
        return
    if found is None:
        yield say("kernels.unknown")
        return
    opp = machine.env.get("ASCEND_OPP_PATH") or f"{found.root}/opp"
    folder = f"{opp}/built-in/op_impl/ai_core/tbe/kernel"
    there = [name for name in machine.files.names(folder, "ascend*") if machine.files.folder(f"{folder}/{name}")]
    wanted = hardware.package(machine)
    if wanted in there or chips.SAME.get(wanted) in there:
        yield say("kernels.ok", soc=wanted)
    elif there and not wanted:
        yield say("kernels.some", soc=", ".join(there))
    else:
        soc = wanted or "ascend910b"
        others = f" ({', '.join(there)})" if there else ""
        package = chips.ops_package(soc, found.key)
        yield say("kernels.missing", soc=soc, folder=folder, others=others, package=package, version=found.version)


def tbe(machine: Machine) -> Iterator[Line]:
    """The Python packages that CANN's operator compiler imports."""
    found, packages = installed(machine), machine.packages
    if found is None or not machine.has_npu or machine.simulated or not packages:
        return
    missing = [name for name in TBE_PACKAGES if name not in packages]
    numpy = packages.get("numpy", "")
    old = found.key is not None and found.key[:2] <= (8, 2)
    if missing:
        yield say("tbe.missing", missing=" ".join(missing))
    if old and (versions.key(numpy) or (0,))[0] >= 2:
        yield say("tbe.numpy", numpy=numpy)
    elif not missing:
        yield say("tbe.ok")
