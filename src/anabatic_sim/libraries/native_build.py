"""The build of the simulator in the cache, made once for each torch, wheel, compiler and source."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anabatic.core import log
from anabatic.core.paths import make_write_error, open_atomic_folder
from anabatic_sim.libraries import prebuilt_libraries
from anabatic_sim.libraries.build_layout import (
    EMPTY_LIBRARIES,
    LIBRARIES,
    LIBRARY_ALIASES,
    SimulatorBuild,
    list_sources,
    simulator_folder,
)
from anabatic_sim.libraries.cann_folder import write_cann_folder, write_entry_point, write_programs
from anabatic_sim.libraries.compilation import (
    build_shared_library,
    compile_units,
    find_compiler,
    get_compiler_version,
    link_library,
    plan_header,
    plan_unit,
)
from anabatic_sim.libraries.stub_libraries import build_stub_libraries
from anabatic_sim.libraries.torch_npu_wheel import (
    PYTHON_TAG,
    TorchInstallation,
    TorchNpuWheel,
    fetch_wheel,
    find_installed_torch,
    find_unpacked_wheel,
)
from anabatic_sim.machine_spec import OTHER_CACHE_HINT


@contextmanager
def _lock_folder(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = open(root / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed by the with below
    except OSError as error:
        raise make_write_error(root, error, OTHER_CACHE_HINT) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares the simulator")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_build() -> SimulatorBuild | None:
    """Return the build for the installed torch if it is complete; fetch and compile nothing.

    Raises:
        UserError: no compiler, no CPU torch.
    """
    torch, root = find_installed_torch(), simulator_folder()
    choice = prebuilt_libraries.choose_prebuilt(torch)
    compiler = "" if choice.libraries else find_compiler(choice.reason)
    wheel = find_unpacked_wheel(root / "wheels", torch, choice.libraries.torch_npu if choice.libraries else "")
    build = _locate_build(root, torch, wheel, compiler) if wheel else None
    return build if build and build.is_complete else None


def prepare_build() -> SimulatorBuild:
    """Return the build for the installed torch; fetch and compile what is missing, under a lock.

    Raises:
        UserError: no compiler, no matching wheel, no CPU torch.
        Failure: the download or the compiler failed.
    """
    if build := find_build():
        return build  # nothing to wait for
    torch = find_installed_torch()
    root = simulator_folder()
    choice = prebuilt_libraries.choose_prebuilt(torch)
    prebuilt = choice.libraries
    compiler = "" if prebuilt else find_compiler(choice.reason)
    version, modules = (prebuilt.torch_npu, prebuilt.modules) if prebuilt else ("", ())
    with _lock_folder(root):
        _remove_unfinished(root)
        wheel = fetch_wheel(root / "wheels", torch, version, modules)
        build = _locate_build(root, torch, wheel, compiler)
        if not build.is_complete and prebuilt:
            _copy_prebuilt(build, choice.folder)
        elif not build.is_complete:
            if choice.reason:
                log.info(choice.reason)
            _compile_simulator(build, compiler)
    return build


def _remove_unfinished(root: Path) -> None:
    """Remove what a killed first use left: with the lock held, nobody else works on these."""
    for pattern in ("builds/.*.tmp", "builds/.*.old", "wheels/.*.tmp", "wheels/.*.old"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _locate_build(root: Path, torch: TorchInstallation, wheel: TorchNpuWheel, compiler: str) -> SimulatorBuild:
    return SimulatorBuild(torch, wheel, root / "builds" / _build_key(torch, wheel, compiler))


def _copy_prebuilt(build: SimulatorBuild, folder: Path) -> None:
    """Make a build of compiled libraries."""
    build.root.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic_folder(build.root, OTHER_CACHE_HINT) as root:
        shutil.copytree(folder / "lib", root / "lib")
        write_cann_folder(root / "cann", build.wheel.cann_release)
        write_programs(root)
    log.debug(f"the simulator is that of {folder}, nothing was compiled")


def _build_key(torch: TorchInstallation, wheel: TorchNpuWheel, compiler: str) -> str:
    # No paths: every environment of this machine with the same torch and Python uses the same build.
    size = (torch.folder / "lib/libtorch_cpu.so").stat().st_size  # differs between builds of one version
    version = get_compiler_version(compiler) if compiler else "prebuilt"
    what = (torch.version, str(size), wheel.version, PYTHON_TAG, version)
    digest = hashlib.sha256("\0".join(what).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(prebuilt_libraries.digest_sources().encode())
    return f"{wheel.version}-{digest.hexdigest()[:16]}"


def _compile_simulator(build: SimulatorBuild, compiler: str) -> None:
    started = time.monotonic()
    files = [(library, path) for library in LIBRARIES for path in list_sources(library)]
    build.root.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic_folder(build.root, OTHER_CACHE_HINT) as root:
        for name in ("lib", "bin"):
            (root / name).mkdir()
        header = plan_header(build, compiler)
        units = {path: plan_unit(build, compiler, library, path, header.target) for library, path in files}
        compile_units(build, header, [unit for unit in units.values() if not unit.target.is_file()])
        shutil.rmtree(header.target.parent, ignore_errors=True)  # 400 MB
        for library in LIBRARIES:
            link_library(build, compiler, library, root, [units[path].target for path in list_sources(library)])
        for name in EMPTY_LIBRARIES:
            build_shared_library(compiler, root, name, [])
        for name, target in LIBRARY_ALIASES.items():
            build_shared_library(compiler, root, name, ["-Wl,--no-as-needed", f"-L{root / 'lib'}", f"-l{target}"])
        build_stub_libraries(build, compiler, root)
        write_cann_folder(root / "cann", build.wheel.cann_release)
        write_programs(root)
        write_entry_point(root / "python")
    log.info(f"compiled in {time.monotonic() - started:.0f} s into {build.root}")
