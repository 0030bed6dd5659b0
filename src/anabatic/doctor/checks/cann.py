"""Checks of CANN: where it is, whether its variables are set, whether it is whole."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from anabatic.doctor import chip_names
from anabatic.doctor.checks import hardware, version_matrix
from anabatic.doctor.findings.catalog import make_result
from anabatic.doctor.findings.check_result import CheckResult
from anabatic.doctor.target_machine import TargetMachine

_ASCEND_FOLDER = "/usr/local/Ascend"
_DEFAULT_ROOTS = (f"{_ASCEND_FOLDER}/ascend-toolkit/latest", f"{_ASCEND_FOLDER}/cann", f"{_ASCEND_FOLDER}/latest")
_MAX_INSTALLATIONS = 50
"""Installations of a layout that are looked at."""
_COMPONENTS = ("runtime", "compiler", "opp", "hccl")
_REQUIRED_COMPONENTS = ("runtime", "compiler")
"""torch_npu looks for these folders (`_cann_package_check` of 2.13.0)."""
TBE_PACKAGES = ("attrs", "numpy", "decorator", "sympy", "cffi", "pyyaml", "pathlib2", "psutil", "protobuf", "scipy",
                "requests", "absl-py")  # fmt: skip
"""Modules that the operator compiler imports (requirements of the ascendai/cann images)."""


@dataclass(frozen=True)
class CannInstallation:
    """An installation."""

    root: str
    version: str
    """Empty: it does not say."""

    @property
    def version_key(self) -> tuple[int, ...] | None:
        """Its version, sortable."""
        return version_matrix.parse_version(self.version)


def read_cann_version(machine: TargetMachine, root: str) -> str:
    """Return the version of the CANN in `root`, in either layout; empty when it does not say."""
    files = machine.files
    for folder in ("aarch64-linux", "x86_64-linux", "."):
        for name in files.list_names(f"{root}/{folder}", "ascend_*_install.info"):
            text = files.read_text(f"{root}/{folder}/{name}") or ""
            if (found := re.search(r"^\s*version\s*=\s*(\S+)", text, re.M)) and version_matrix.parse_version(found[1]):
                return found[1]
    for part in ("runtime", "compiler", "opp"):
        if found_part := read_component_version(machine, root, part):
            return found_part
    index = files.read_text(f"{root}/version.cfg") or ""
    found = re.search(r"_running_version=\[[^:\]]*:([^\]\s]+)\]", index)
    return found[1] if found and version_matrix.parse_version(found[1]) else ""


def read_component_version(machine: TargetMachine, root: str, part: str) -> str:
    """Return the CANN version that a part of it says (`version_dir`; `Version` counts otherwise)."""
    for path in (f"{root}/{part}/version.info", f"{root}/share/info/{part}/version.info"):
        text = machine.files.read_text(path) or ""
        for name in ("version_dir", "Version"):
            found = re.search(rf"^\s*{name}\s*=\s*(\S+)", text, re.M)
            key = version_matrix.parse_version(found[1].removeprefix("cann-")) if found else None
            if found and key and (name == "version_dir" or key >= (8, 5, 0, 0)):
                return found[1].removeprefix("cann-")
    return ""


def find_cann_roots(machine: TargetMachine) -> list[str]:
    """Return where CANN is installed, each place once, the environment's first."""
    files = machine.files
    home = machine.env.get("HOME", "")
    env_roots = [machine.env.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    places = [*env_roots, *_DEFAULT_ROOTS]
    places += [f"{_ASCEND_FOLDER}/{name}" for name in files.list_names(_ASCEND_FOLDER, "cann-*")[:_MAX_INSTALLATIONS]]
    places += [
        f"{_ASCEND_FOLDER}/ascend-toolkit/{name}"
        for name in files.list_names(f"{_ASCEND_FOLDER}/ascend-toolkit", "[0-9]*")[:_MAX_INSTALLATIONS]
    ]
    places += [f"{home}/Ascend/ascend-toolkit/latest", f"{home}/Ascend/cann"] if home else []
    found: dict[str, str] = {}
    for place in places:
        if place.startswith("/") and files.is_dir(place):
            found.setdefault(files.resolve_path(place) or place, place)
    return list(found.values())


def find_active_cann(machine: TargetMachine) -> CannInstallation | None:
    """Return the CANN that the environment names, else the first that is installed."""
    if "cann" not in machine.notes:
        machine.notes["cann"] = _select_cann(machine)
    found: CannInstallation | None = machine.notes["cann"]
    return found


def _select_cann(machine: TargetMachine) -> CannInstallation | None:
    places = find_cann_roots(machine)
    good = [CannInstallation(place, version) for place in places if (version := read_cann_version(machine, place))]
    home = machine.env.get("ASCEND_HOME_PATH", "")
    if home in places:
        return CannInstallation(home, read_cann_version(machine, home))
    return good[0] if good else (CannInstallation(places[0], "") if places else None)


def find_set_env_script(machine: TargetMachine) -> str:
    """Return the set_env.sh to source."""
    found = find_active_cann(machine)
    root = found.root if found else f"{_ASCEND_FOLDER}/ascend-toolkit/latest"
    near = (
        f"{root}/set_env.sh",
        f"{posixpath.dirname(root)}/set_env.sh",
        f"{_ASCEND_FOLDER}/ascend-toolkit/set_env.sh",
    )
    return next((one for one in near if machine.files.exists(one)), near[-1])


def check_cann(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check location and version."""
    home, found = machine.env.get("ASCEND_HOME_PATH", ""), find_active_cann(machine)
    if home and not machine.files.is_dir(home):
        yield make_result("cann.gone", root=home, script=find_set_env_script(machine))
    if found is None:
        if not machine.has_npu:
            yield make_result("cann.unneeded")
        elif not home:
            yield make_result("cann.none", soc=hardware.detect_soc_name(machine) or "your chip")
        return
    if not found.version:
        yield make_result("cann.no_version", root=found.root)
        return
    yield make_result("cann.ok" if machine.has_npu else "cann.without_npu", version=found.version, root=found.root)
    all_versions = {read_cann_version(machine, root) for root in find_cann_roots(machine)} - {"", found.version}
    if all_versions and machine.has_npu:
        yield make_result("cann.other", version=found.version, root=found.root, others=", ".join(sorted(all_versions)))


def _split_path_variable(machine: TargetMachine, name: str) -> list[str]:
    return [entry for entry in machine.env.get(name, "").split(":") if entry]


def check_set_env(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check that the variables of its set_env.sh are set."""
    found = find_active_cann(machine)
    if machine.is_simulated:
        yield make_result("set_env.simulated")
        return
    home = machine.env.get("ASCEND_HOME_PATH", "")
    if found is None or not machine.has_npu or not machine.is_env_known or (home and not machine.files.is_dir(home)):
        return
    wrong = list(_check_set_env_variables(machine, home))
    yield from wrong or [make_result("set_env.ok")]


def _check_set_env_variables(machine: TargetMachine, home: str) -> Iterator[CheckResult]:
    source = find_set_env_script(machine)
    if not home:
        yield make_result("set_env.not_sourced", script=source)
        return
    if "ASCEND_OPP_PATH" not in machine.env:
        yield make_result("set_env.partial", missing="ASCEND_OPP_PATH", script=source)
    libraries = _split_path_variable(machine, "LD_LIBRARY_PATH")
    real = machine.files.resolve_path
    if all(real(entry) != real(f"{home}/lib64") for entry in libraries):
        yield make_result("set_env.library_path", folder=f"{home}/lib64", script=source)
    modules = _split_path_variable(machine, "PYTHONPATH")
    if all(real(entry) != real(f"{home}/python/site-packages") for entry in modules):
        yield make_result("set_env.python_path", folder=f"{home}/python/site-packages", script=source)
    used = {real(entry): entry.removesuffix("/lib64") for entry in libraries if re.search(_CANN_LIBRARY_PATTERN, entry)}
    if len(used) > 1:
        yield make_result("set_env.two", count=len(used), roots=", ".join(used.values()), script=source)
    if blank := next((entry for entry in libraries if re.search(r"\s", entry)), None):
        yield make_result("set_env.blank", entry=blank)


_CANN_LIBRARY_PATTERN = r"(/ascend-toolkit/[^/]+|/cann(-[^/]+)?)/lib64$"


def check_toolkit(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check that it is complete and of one version."""
    found = find_active_cann(machine)
    if found is None or not machine.has_npu:
        return
    missing = [part for part in _REQUIRED_COMPONENTS if not machine.files.is_dir(f"{found.root}/{part}")]
    if missing:
        yield make_result("toolkit.incomplete", root=found.root, missing=", ".join(missing))
        return
    versions = {part: read_component_version(machine, found.root, part) for part in _COMPONENTS}
    seen = {part: version for part, version in versions.items() if version}
    if len(set(seen.values())) > 1:
        yield make_result("toolkit.mixed", versions=", ".join(f"{part} {version}" for part, version in seen.items()))
    elif seen:
        yield make_result("toolkit.ok", version=next(iter(seen.values())))


def check_kernels(machine: TargetMachine) -> Iterator[CheckResult]:
    """Check that the operators for this chip are installed."""
    found = find_active_cann(machine)
    if not machine.has_npu or machine.is_simulated:
        return
    if found is None:
        yield make_result("kernels.unknown")
        return
    opp = machine.env.get("ASCEND_OPP_PATH") or f"{found.root}/opp"
    folder = f"{opp}/built-in/op_impl/ai_core/tbe/kernel"
    installed = [
        name for name in machine.files.list_names(folder, "ascend*") if machine.files.is_dir(f"{folder}/{name}")
    ]
    needed = hardware.detect_ops_folder(machine)
    if needed in installed or chip_names.OLD_OPS_FOLDERS.get(needed) in installed:
        yield make_result("kernels.ok", soc=needed)
    elif installed and not needed:
        yield make_result("kernels.some", soc=", ".join(installed))
    else:
        soc = needed or "ascend910b"
        others = f" ({', '.join(installed)})" if installed else ""
        package = chip_names.name_ops_package(soc, found.version_key)
        yield make_result(
            "kernels.missing", soc=soc, folder=folder, others=others, package=package, version=found.version
        )


def check_tbe_packages(machine: TargetMachine) -> Iterator[CheckResult]:
    """The Python packages that CANN's operator compiler imports."""
    found, packages = find_active_cann(machine), machine.package_versions
    if found is None or not machine.has_npu or machine.is_simulated or not packages:
        return
    missing = [name for name in TBE_PACKAGES if name not in packages]
    numpy = packages.get("numpy", "")
    old = found.version_key is not None and found.version_key[:2] <= (8, 2)
    if missing:
        yield make_result("tbe.missing", missing=" ".join(missing))
    if old and (version_matrix.parse_version(numpy) or (0,))[0] >= 2:
        yield make_result("tbe.numpy", numpy=numpy)
    elif not missing:
        yield make_result("tbe.ok")
