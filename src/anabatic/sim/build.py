"""Compiles csrc/ with the system's compiler into the cache, once per torch, wheel, compiler and source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic.core.paths import cache_root, cannot_write, folder_atomic
from anabatic.sim import stubs
from anabatic.sim.machine import OTHER_CACHE, PACKAGE
from anabatic.sim.wheel import Torch, Wheel, fetch, found, installed_torch

_TORCH_SECONDS, _PLAIN_SECONDS = 9, 1
"""CPU time of compiling a file with torch's headers, and one without (measured, g++ 12)."""
_PROGRESS_SECONDS = 15.0

CSRC = Path(__file__).parent / "csrc"


@dataclass(frozen=True)
class Library:
    """A folder of csrc/ is one library."""

    name: str
    folder: str
    needs: tuple[str, ...] = ()
    torch: bool = False


LIBRARIES = (
    Library("ascendcl", "runtime"),
    Library("acl_op_compiler", "compiler", ("ascendcl",)),
    Library("ascend_hal", "hal", ("ascendcl",)),
    Library("hccl", "hccl", ("ascendcl",)),
    Library("mspti", "profiler"),
    Library("anabatic_sim_ops", "ops", ("ascendcl",), torch=True),
    Library("opapi", "opapi", ("ascendcl", "anabatic_sim_ops"), torch=True),
)
EMPTY = ("graph", "acl_tdt_channel")
"""Named by torch_npu, nothing of them is used."""
SECOND_NAMES = {"hcomm": "hccl", "msprofiler": "ascendcl"}
"""Libraries that torch_npu opens under a name of their own, for functions that ours has under another."""
STUBS = "ge_runner"
"""Holds what `stubs.source` writes."""
COMMANDS = {"npu-smi": "anabatic.sim.smi"}
"""Programs of the simulated machine: name -> module."""


@dataclass(frozen=True)
class _Unit:
    """A file to compile."""

    words: list[str]
    target: Path
    torch: bool


@dataclass(frozen=True)
class Build:
    """A finished build."""

    torch: Torch
    wheel: Wheel
    root: Path

    @property
    def whole(self) -> bool:
        """True when all of it is there: renamed into place, and nothing was removed since."""
        names = (*(library.name for library in LIBRARIES), *EMPTY, *SECOND_NAMES, STUBS)
        files = [*(self.libraries / f"lib{name}.so" for name in names), *(self.programs / name for name in COMMANDS)]
        return self.cann.is_dir() and all(file.is_file() for file in files)

    @property
    def libraries(self) -> Path:
        """What goes on LD_LIBRARY_PATH."""
        return self.root / "lib"

    @property
    def programs(self) -> Path:
        """What goes on PATH."""
        return self.root / "bin"

    @property
    def cann(self) -> Path:
        """What ASCEND_HOME_PATH names."""
        return self.root / "cann"


def folder() -> Path:
    """Everything of the simulator outside the package: wheels, builds, lock."""
    return cache_root() / "sim"


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = open(root / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed by the with below
    except OSError as error:
        raise cannot_write(root, error, OTHER_CACHE) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares the simulator")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ready() -> Build:
    """Return the build for the installed torch; fetch and compile what is missing, under a lock.

    Raises:
        UserError: no compiler, no matching wheel, no CPU torch.
        Failure: the download or the compiler failed.
    """
    torch = installed_torch()
    root = folder()
    compiler = _compiler()
    wheel = found(root / "wheels", torch)
    if wheel and (build := _build(root, torch, wheel, compiler)).whole:
        return build  # nothing to wait for
    with _locked(root):
        _sweep(root)
        wheel = fetch(root / "wheels", torch)
        build = _build(root, torch, wheel, compiler)
        if not build.whole:
            _compile(build, compiler)
    return build


def _sweep(root: Path) -> None:
    """Remove what a killed first use left: with the lock held, nobody else works on these."""
    for pattern in ("builds/.*.tmp", "builds/.*.old", "wheels/.*.tmp", "wheels/.*.old"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _build(root: Path, torch: Torch, wheel: Wheel, compiler: str) -> Build:
    return Build(torch, wheel, root / "builds" / _key(torch, wheel, compiler))


def _compiler() -> str:
    name = os.environ.get("CXX") or next((word for word in ("g++", "c++", "clang++") if shutil.which(word)), None)
    if name is None or not shutil.which(name):
        raise UserError(
            f"no C++ compiler: {name or 'g++'} is not on the PATH",
            "install one: apt install g++, or dnf install gcc-c++ (CXX names another)",
        )
    return name


def sources(library: Library) -> list[Path]:
    """Return the C++ files of a library."""
    return sorted((CSRC / library.folder).glob("*.cpp"))


@functools.cache
def _told(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def _key(torch: Torch, wheel: Wheel, compiler: str) -> str:
    what = (torch.version, str(torch.folder), wheel.version, _told(compiler), sys.executable)
    digest = hashlib.sha256("\0".join(what).encode())
    for name in ("build.py", "stubs.py"):
        digest.update((CSRC.parent / name).read_bytes())
    for path in sorted(CSRC.rglob("*.*")):
        digest.update(path.relative_to(CSRC).as_posix().encode() + path.read_bytes())
    return f"{wheel.version}-{digest.hexdigest()[:16]}"


def _compile(build: Build, compiler: str) -> None:
    started = time.monotonic()
    files = [(library, path) for library in LIBRARIES for path in sources(library)]
    build.root.parent.mkdir(parents=True, exist_ok=True)
    with folder_atomic(build.root, OTHER_CACHE) as root:
        for name in ("lib", "bin"):
            (root / name).mkdir()
        units = {path: _unit(build, compiler, library, path) for library, path in files}
        _compile_missing(build, [unit for unit in units.values() if not unit.target.is_file()])
        for library in LIBRARIES:
            _link(build, compiler, library, root, [units[path].target for path in sources(library)])
        for name in EMPTY:
            _shared(compiler, root, name, [])
        for name, target in SECOND_NAMES.items():
            _shared(compiler, root, name, ["-Wl,--no-as-needed", f"-L{root / 'lib'}", f"-l{target}"])
        _stubs(build, compiler, root)
        _programs(root / "bin")
        _cann(root / "cann", build.wheel.cann)
    log.info(f"compiled in {time.monotonic() - started:.0f} s into {build.root}")


def _compile_missing(build: Build, units: list[_Unit]) -> None:
    cores = len(os.sched_getaffinity(0))
    # Those that read torch's headers first: the last one to end decides.
    units.sort(key=lambda unit: not unit.torch)
    seconds = sum(_TORCH_SECONDS if unit.torch else _PLAIN_SECONDS for unit in units) / cores
    log.info(
        f"compiling the simulator for torch {build.torch.version}: {len(units)} files, once; "
        f"about {max(seconds, 5):.0f} s on {cores} cores"
    )
    with ThreadPoolExecutor(cores) as pool:
        futures = [pool.submit(_run_unit, unit) for unit in units]
        _show_progress(futures)
        for future in futures:
            future.result()


def _show_progress(futures: Sequence[Future[None]]) -> None:
    """Say every few seconds how far the compiler is; stop at its first error."""
    left: set[Future[None]] = set(futures)
    while left:
        done, left = wait(left, timeout=_PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            for future in left:
                future.cancel()
            return
        if left:
            log.info(f"compiled {len(futures) - len(left)} of {len(futures)} files")


def _includes(build: Build, library: Library) -> list[str]:
    headers = build.wheel.folder / "torch_npu" / "include"
    folders = [headers / "third_party" / "acl" / "inc", headers / "third_party" / "hccl" / "inc"]
    folders.append(headers)  # HCCL's headers name each other from here
    if library.torch:
        folders += [build.torch.folder / "include", build.torch.folder / "include/torch/csrc/api/include"]
    return [f"-isystem{path}" for path in folders]


def _old_abi(torch: Torch) -> bool:
    """True for a torch that was compiled with libstdc++'s old strings (some wheels up to 2.6)."""
    return b"torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_string" not in (torch.folder / "lib/libc10.so").read_bytes()


def _unit(build: Build, compiler: str, library: Library, path: Path) -> _Unit:
    """Return how to compile one file; its object is named after everything that goes into it."""
    words = [compiler, "-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-deprecated-declarations", f"-I{CSRC}"]
    words += [*_includes(build, library), "-c", str(path)]
    if library.torch and _old_abi(build.torch):
        words.append("-D_GLIBCXX_USE_CXX11_ABI=0")
    digest = hashlib.sha256("\0".join([_told(compiler), build.torch.version, build.wheel.version, *words]).encode())
    # Headers in the middle are everybody's, those of a folder its own; libraries on libtorch share the operators'.
    shared = [CSRC, CSRC / library.folder, *([CSRC / "ops"] if library.torch else [])]
    for file in (path, *sorted(file for folder in shared for file in folder.glob("*.h"))):
        digest.update(file.read_bytes())
    target = folder() / "objects" / f"{library.name}-{path.stem}-{digest.hexdigest()[:16]}.o"
    return _Unit(words, target, library.torch)


def _run_unit(unit: _Unit) -> None:
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    part = unit.target.with_suffix(".part")
    _run([*unit.words, "-o", str(part)], str(Path(unit.words[-1]).relative_to(CSRC)))
    os.replace(part, unit.target)


def _link(build: Build, compiler: str, library: Library, root: Path, objects: list[Path]) -> None:
    extra = [f"-L{root / 'lib'}", *(f"-l{name}" for name in library.needs)] if objects else []
    if library.torch and objects:
        extra += [f"-L{build.torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    _shared(compiler, root, library.name, [*map(str, objects), *extra, "-lpthread", "-ldl", "-lrt"])


def _shared(compiler: str, root: Path, name: str, words: list[str]) -> None:
    target = root / "lib" / f"lib{name}.so"
    soname = f"-Wl,-soname,{target.name}"
    _run([compiler, "-shared", "-fPIC", "-o", str(target), *words, soname], target.name)


def _stubs(build: Build, compiler: str, root: Path) -> None:
    package = build.wheel.folder / "torch_npu"
    needing = [*(package / "lib").glob("*.so"), *package.glob("_C*.so")]
    needing = [path for path in needing if path.name != "libop_plugin_atb.so"]  # loaded on demand, needs ATB
    text = stubs.source(needing, (root / "lib").glob("*.so"))
    file = root / "stubs.c"
    file.write_text(text, encoding="utf-8")
    _shared(compiler, root, STUBS, ["-x", "c", str(file)])


def _programs(folder: Path) -> None:
    for name, module in COMMANDS.items():
        # No site packages and no PYTHON* variables: it starts fast, whatever COMMAND's environment is.
        run = (
            f"import os, sys; sys.path.insert(0, os.environ['{PACKAGE}']); from {module} import main; sys.exit(main())"
        )
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E -c "{run}" "$@"\n', encoding="utf-8")
        script.chmod(0o755)


def _cann(root: Path, release: str) -> None:
    """Write the parts of a CANN installation that programs read: folders and version files."""
    arch = root / f"{platform.machine()}-linux"
    for name in ("runtime", "compiler", "opp", "hccl", "opp_kernel"):
        (root / name).mkdir(parents=True)
        (root / name / "version.info").write_text(f"Version={release}\nversion_dir={release}\n", encoding="utf-8")
    arch.mkdir()
    lines = f"package_name=Ascend-cann-toolkit\nversion={release}\narch={platform.machine()}\nos=linux\npath={root}\n"
    (arch / "ascend_toolkit_install.info").write_text(lines, encoding="utf-8")


def _run(words: list[str], what: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        log.debug(done.stderr)
        if done.returncode < 0:
            number = signal.Signals(-done.returncode).name
            raise Failure(
                f"the simulator does not compile ({what}): {words[0]} was ended by {number}",
                "out of memory? `taskset -c 0 anabatic sim …` compiles on one core, for good",
            )
        raise Failure(
            f"the simulator does not compile ({what}): {first}", "add --debug for the compiler's whole output"
        )
