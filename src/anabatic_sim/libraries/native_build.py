"""Compile csrc/ and stubs of missing symbols with the system's compiler into the cache, once per torch, wheel, compiler
and source.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic.core.paths import get_cache_root, make_write_error, open_atomic_folder
from anabatic_sim.libraries import prebuilt_libraries
from anabatic_sim.libraries.torch_npu_wheel import (
    PYTHON_TAG,
    TorchInstallation,
    TorchNpuWheel,
    fetch_wheel,
    find_installed_torch,
    find_unpacked_wheel,
)
from anabatic_sim.machine_spec import INTERPRETER_VARIABLE, OTHER_CACHE_HINT, PACKAGE_VARIABLE
from anabatic_sim.program_name import PROGRAM

_HEADER_SECONDS, _TORCH_SECONDS, _PLAIN_SECONDS = 12, 4, 1
"""CPU time of compiling torch's headers, a file that uses them, and one without (measured, g++ 12)."""
_PROGRESS_SECONDS = 15.0

CSRC = prebuilt_libraries.CSRC
_TORCH_HEADER = CSRC / "torch_headers.h"


@dataclass(frozen=True)
class NativeLibrary:
    """A folder of csrc/ is one library."""

    name: str
    folder: str
    linked_libraries: tuple[str, ...] = ()
    uses_torch: bool = False


LIBRARIES = (
    NativeLibrary("ascendcl", "runtime"),
    NativeLibrary("acl_op_compiler", "compiler", ("ascendcl",)),
    NativeLibrary("ascend_hal", "hal", ("ascendcl",)),
    NativeLibrary("hccl", "hccl", ("ascendcl",)),
    NativeLibrary("mspti", "profiler"),
    NativeLibrary("anabatic_sim_ops", "ops", ("ascendcl", "hccl"), uses_torch=True),
    NativeLibrary("opapi", "opapi", ("ascendcl", "anabatic_sim_ops"), uses_torch=True),
)
EMPTY_LIBRARIES = ("graph", "acl_tdt_channel", "ascend_protobuf")
"""Named by torch_npu, nothing of them is used, or what is used is in another library of ours."""
LIBRARY_ALIASES = {"hcomm": "hccl", "msprofiler": "ascendcl", "ms_tools_ext": "ascendcl"}
"""Libraries that torch_npu opens under their own name, for functions that ours has under another."""
STUB_LIBRARY = "ge_runner"
"""Holds what `generate_stub_source` writes."""
ATB_LIBRARY, ATB_OPERATORS = "atb", "libop_plugin_atb.so"
"""The acceleration library, and torch_npu's library that needs it. Ours holds stubs: with them torch_npu defines its
operators of ATB, whose kernels the simulator then replaces."""
GRAPH_LIBRARY, GRAPH_USERS = "fmk_parser", "dynamo/torchair/core/*.so"
"""CANN's graph engine, and torch_npu's libraries that need it. Ours raises by name: importing torchair works, graphs do
not."""
SIMULATED_COMMANDS = {"npu-smi": "anabatic_sim.fake_npu_smi", "msprof": "anabatic_sim.profiling.fake_msprof"}
"""Programs of the simulated machine: name -> module."""
_MSPROF = Path("tools/profiler/bin/msprof")
_MSPROF_SCRIPT = Path("tools/profiler/profiler_tool/analysis/msprof/msprof.py")
"""Location in a CANN installation: torch_npu's profiler looks for the script next to the program."""
LAUNCHER_COMMANDS = {"torchrun": "anabatic.launch.local.simulated_torchrun"}
"""Programs of the environment with a faster start on a simulated machine: name -> module."""


@dataclass(frozen=True)
class _CompileUnit:
    """A file to compile."""

    command: list[str]
    target: Path
    uses_torch: bool


@dataclass(frozen=True)
class SimulatorBuild:
    """A finished build."""

    torch: TorchInstallation
    wheel: TorchNpuWheel
    root: Path

    @property
    def is_complete(self) -> bool:
        """True when all of it is there: renamed into place, and nothing was removed since."""
        names = [*(library.name for library in LIBRARIES), *EMPTY_LIBRARIES, *LIBRARY_ALIASES]
        names += [STUB_LIBRARY, ATB_LIBRARY, GRAPH_LIBRARY]
        files = [
            *(self.library_folder / f"lib{name}.so" for name in names),
            *(self.program_folder / name for name in SIMULATED_COMMANDS),
            *(self.launcher_folder / name for name in LAUNCHER_COMMANDS),
        ]
        return self.cann_folder.is_dir() and all(file.is_file() for file in files)

    @property
    def library_folder(self) -> Path:
        """Addition to LD_LIBRARY_PATH."""
        return self.root / "lib"

    @property
    def program_folder(self) -> Path:
        """Addition to PATH."""
        return self.root / "bin"

    @property
    def launcher_folder(self) -> Path:
        """Entry before it in PATH if all of `anabatic` is installed."""
        return self.root / "launchers"

    @property
    def cann_folder(self) -> Path:
        """Value of ASCEND_HOME_PATH."""
        return self.root / "cann"

    @property
    def entry_point_folder(self) -> Path:
        """Part of PYTHONPATH that makes torch load cann_python/anabatic_sim_torch.py."""
        return self.root / "python"


def simulator_folder() -> Path:
    """Everything of the simulator outside the package: wheels, builds, lock."""
    return get_cache_root() / "sim"


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
    compiler = "" if choice.libraries else _find_compiler(choice.reason)
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
    compiler = "" if prebuilt else _find_compiler(choice.reason)
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
        _write_cann_folder(root / "cann", build.wheel.cann_release)
        _write_programs(root)
    log.debug(f"the simulator is that of {folder}, nothing was compiled")


def _find_compiler(reason: str = "") -> str:
    name = os.environ.get("CXX") or next((word for word in ("g++", "c++", "clang++") if shutil.which(word)), None)
    if name is None or not shutil.which(name):
        raise UserError(
            f"no C++ compiler: {name or 'g++'} is not on the PATH" + (f"; {reason}" if reason else ""),
            "install one: apt install g++, or dnf install gcc-c++ (CXX names another)",
        )
    return name


def list_sources(library: NativeLibrary) -> list[Path]:
    """Return the C++ files of a library."""
    return sorted((CSRC / library.folder).glob("*.cpp"))


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def _build_key(torch: TorchInstallation, wheel: TorchNpuWheel, compiler: str) -> str:
    # No paths: every environment of this machine with the same torch and Python uses the same build.
    size = (torch.folder / "lib/libtorch_cpu.so").stat().st_size  # differs between builds of one version
    version = _compiler_version(compiler) if compiler else "prebuilt"
    what = (torch.version, str(size), wheel.version, PYTHON_TAG, version)
    digest = hashlib.sha256("\0".join(what).encode())
    for name in ("native_build.py",):
        digest.update((CSRC.parent / name).read_bytes())
    digest.update(prebuilt_libraries.digest_sources().encode())
    return f"{wheel.version}-{digest.hexdigest()[:16]}"


def _compile_simulator(build: SimulatorBuild, compiler: str) -> None:
    started = time.monotonic()
    files = [(library, path) for library in LIBRARIES for path in list_sources(library)]
    build.root.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic_folder(build.root, OTHER_CACHE_HINT) as root:
        for name in ("lib", "bin"):
            (root / name).mkdir()
        header = _plan_header(build, compiler)
        units = {path: _plan_unit(build, compiler, library, path, header.target) for library, path in files}
        _compile_units(build, header, [unit for unit in units.values() if not unit.target.is_file()])
        shutil.rmtree(header.target.parent, ignore_errors=True)  # 400 MB
        for library in LIBRARIES:
            _link_library(build, compiler, library, root, [units[path].target for path in list_sources(library)])
        for name in EMPTY_LIBRARIES:
            _build_shared_library(compiler, root, name, [])
        for name, target in LIBRARY_ALIASES.items():
            _build_shared_library(compiler, root, name, ["-Wl,--no-as-needed", f"-L{root / 'lib'}", f"-l{target}"])
        _build_stub_libraries(build, compiler, root)
        _write_cann_folder(root / "cann", build.wheel.cann_release)
        _write_programs(root)
        _write_entry_point(root / "python")
    log.info(f"compiled in {time.monotonic() - started:.0f} s into {build.root}")


def _compile_units(build: SimulatorBuild, header: _CompileUnit, units: list[_CompileUnit]) -> None:
    cores = len(os.sched_getaffinity(0))
    units.sort(key=lambda unit: unit.uses_torch)  # the others while torch's headers are compiled
    seconds = sum(_TORCH_SECONDS if unit.uses_torch else _PLAIN_SECONDS for unit in units) / cores
    needs_header = any(unit.uses_torch for unit in units) and not header.target.is_file()
    seconds += _HEADER_SECONDS / cores * needs_header
    log.info(
        f"compiling the simulator for torch {build.torch.version}: {len(units)} files, once; "
        f"about {max(seconds, 5):.0f} s on {cores} cores"
    )
    with ThreadPoolExecutor(cores) as pool:
        headers = [pool.submit(_compile_header, header)] if needs_header else []
        futures = [pool.submit(_compile_unit, unit, headers if unit.uses_torch else []) for unit in units]
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


def _include_flags(build: SimulatorBuild, library: NativeLibrary) -> list[str]:
    headers = build.wheel.folder / "torch_npu" / "include"
    folders = [headers / "third_party" / "acl" / "inc", headers / "third_party" / "hccl" / "inc"]
    folders.append(headers)  # HCCL's headers name each other from here
    if library.uses_torch:
        folders += [build.torch.folder / "include", build.torch.folder / "include/torch/csrc/api/include"]
    return [f"-isystem{path}" for path in folders]


def _make_compile_flags(build: SimulatorBuild, library: NativeLibrary) -> list[str]:
    words = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-deprecated-declarations", f"-I{CSRC}"]
    words.append(f"-ffile-prefix-map={CSRC}=csrc")
    if library.uses_torch and build.torch.uses_old_abi:
        words.append("-D_GLIBCXX_USE_CXX11_ABI=0")
    return words + _include_flags(build, library)


def _start_digest(build: SimulatorBuild, compiler: str, words: Sequence[str]) -> Any:
    """Start the digest that names a compiled file: everything but where this environment and checkout are."""
    text = "\0".join([_compiler_version(compiler), build.torch.version, build.wheel.version, *words])
    for folder in (CSRC, build.torch.folder, build.wheel.folder, simulator_folder()):
        text = text.replace(str(folder), "")
    return hashlib.sha256(text.encode())


def _plan_header(build: SimulatorBuild, compiler: str) -> _CompileUnit:
    """Return how to compile torch's headers once: `-include NAME.h` finds NAME.h.gch (g++ and clang++)."""
    library = next(library for library in LIBRARIES if library.uses_torch)
    words = [compiler, *_make_compile_flags(build, library), "-x", "c++-header", str(_TORCH_HEADER)]
    digest = _start_digest(build, compiler, words)
    digest.update(_TORCH_HEADER.read_bytes())
    folder = simulator_folder() / "objects" / f"torch-{digest.hexdigest()[:16]}"
    return _CompileUnit(words, folder / f"{_TORCH_HEADER.name}.gch", uses_torch=True)


def _plan_unit(build: SimulatorBuild, compiler: str, library: NativeLibrary, path: Path, header: Path) -> _CompileUnit:
    """Return how to compile one file; its object is named after everything that goes into it."""
    words = [compiler, *_make_compile_flags(build, library)]
    if library.uses_torch:
        words += ["-include", str(header.with_suffix(""))]
    words += ["-c", str(path)]
    digest = _start_digest(build, compiler, words)
    # Headers in the middle are everybody's, those of a folder its own; libraries on libtorch share the operators'.
    shared = [CSRC, CSRC / library.folder, *([CSRC / "ops"] if library.uses_torch else [])]
    for file in (path, *sorted(file for folder in shared for file in folder.glob("*.h"))):
        digest.update(file.read_bytes())
    target = simulator_folder() / "objects" / f"{library.name}-{path.stem}-{digest.hexdigest()[:16]}.o"
    return _CompileUnit(words, target, library.uses_torch)


def _compile_header(unit: _CompileUnit) -> None:
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(_TORCH_HEADER, unit.target.with_suffix(""))  # a compiler that cannot use the result reads this one
    _compile_unit(unit)


def _compile_unit(unit: _CompileUnit, headers: Sequence[Future[None]] = ()) -> None:
    for future in headers:
        future.result()
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    part = unit.target.with_suffix(".part")
    _run_compiler([*unit.command, "-o", str(part)], str(Path(unit.command[-1]).relative_to(CSRC)))
    os.replace(part, unit.target)


def _link_library(
    build: SimulatorBuild, compiler: str, library: NativeLibrary, root: Path, objects: list[Path]
) -> None:
    extra = [f"-L{root / 'lib'}", *(f"-l{name}" for name in library.linked_libraries)] if objects else []
    if library.uses_torch and objects:
        extra += [f"-L{build.torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    _build_shared_library(compiler, root, library.name, [*map(str, objects), *extra, "-lpthread", "-ldl", "-lrt"])


def _build_shared_library(compiler: str, root: Path, name: str, words: list[str]) -> None:
    target = root / "lib" / f"lib{name}.so"
    soname = f"-Wl,-soname,{target.name}"
    _run_compiler([compiler, "-shared", "-fPIC", "-o", str(target), *words, soname], target.name)


def _build_stub_libraries(build: SimulatorBuild, compiler: str, root: Path) -> None:
    package = build.wheel.folder / "torch_npu"
    wheel_libraries = [*(package / "lib").glob("*.so"), *package.glob("_C*.so")]
    needing_atb = [path for path in wheel_libraries if path.name == ATB_OPERATORS]  # not in every wheel
    needing_cann = [path for path in wheel_libraries if path.name != ATB_OPERATORS]
    having = list((root / "lib").glob("*.so"))
    sources = {
        STUB_LIBRARY: generate_stub_source(needing_cann, having),
        ATB_LIBRARY: generate_stub_source(needing_atb, having, _ATB_SYMBOL),
    }
    for name, text in sources.items():
        file = root / f"stubs_{name}.c"
        file.write_text(text, encoding="utf-8")
        _build_shared_library(compiler, root, name, ["-x", "c", str(file)])
    having = list((root / "lib").glob("*.so"))
    file = root / f"stubs_{GRAPH_LIBRARY}.cpp"
    text = generate_stub_source(package.glob(GRAPH_USERS), having, _CANN_SYMBOL, _RAISING_STUBS)
    file.write_text(text, encoding="utf-8")
    _build_shared_library(compiler, root, GRAPH_LIBRARY, [str(file)])


def _write_programs(root: Path) -> None:
    folder, cann = root / "bin", root / "cann"
    folder.mkdir(exist_ok=True)
    (root / "launchers").mkdir()
    for name, module in SIMULATED_COMMANDS.items():
        # No site packages and no PYTHON* variables: it starts fast, whatever COMMAND's environment is.
        run = (
            f"import os, sys; sys.path.insert(0, os.environ['{PACKAGE_VARIABLE}']); from {module} import "
            f"main; sys.exit(main())"
        )
        _write_script(folder / name, f'"${INTERPRETER_VARIABLE}" -S -E -c "{run}"')
        if name == "msprof":
            for path in (_MSPROF, _MSPROF_SCRIPT):
                (cann / path).parent.mkdir(parents=True)
            (folder / name).rename(cann / _MSPROF)
            (folder / name).symlink_to(Path("..") / cann.name / _MSPROF)
            (cann / _MSPROF_SCRIPT).write_text("".join(f"{line}\n" for line in run.split("; ")), encoding="utf-8")
    for name, module in LAUNCHER_COMMANDS.items():
        _write_script(root / "launchers" / name, f'"${INTERPRETER_VARIABLE}" -m {module}')


def _write_script(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def _write_cann_folder(root: Path, release: str) -> None:
    """Write the parts of a CANN installation that programs read: folders, version files, libraries to link against."""
    arch = root / f"{platform.machine()}-linux"
    for name in ("runtime", "compiler", "opp", "hccl", "opp_kernel"):
        (root / name).mkdir(parents=True)
        (root / name / "version.info").write_text(f"Version={release}\nversion_dir={release}\n", encoding="utf-8")
    arch.mkdir()
    lines = f"package_name=Ascend-cann-toolkit\nversion={release}\narch={platform.machine()}\nos=linux\npath={root}\n"
    (arch / "ascend_toolkit_install.info").write_text(lines, encoding="utf-8")
    (root / "lib64").symlink_to("../lib")  # extensions are linked with -L$ASCEND_HOME_PATH/lib64 -lascendcl


def _write_entry_point(root: Path) -> None:
    """Write the metadata of a package with an entry point of torch, which our own wheel must not contain twice."""
    folder = root / "anabatic_sim_torch-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: anabatic-sim-torch\nVersion: 1\n", encoding="utf-8")
    entry = "[torch.backends]\nanabatic_sim_torch = anabatic_sim_torch:prepare\n"
    (folder / "entry_points.txt").write_text(entry, encoding="utf-8")


def _run_compiler(words: list[str], what: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        log.debug(done.stderr)
        if done.returncode < 0:
            number = signal.Signals(-done.returncode).name
            raise Failure(
                f"the simulator does not compile ({what}): {words[0]} was ended by {number}",
                f"out of memory? `taskset -c 0 {PROGRAM} …` compiles on one core, for good",
            )
        raise Failure(
            f"the simulator does not compile ({what}): {first}", "add --debug for the compiler's whole output"
        )


_CANN_SYMBOL = re.compile(r"(acl|Acl|Hccl|Msprof|rt[A-Z]|hal[A-Z]|drv[A-Z]|_ZNK?2ge)\w*")
"""Names of CANN: everything else that is undefined belongs to Python, torch or the C library."""

_ATB_SYMBOL = re.compile(r"_ZNK?3atb\w*")
"""Mangled names of the namespace atb. All of torch_npu's uses return a status or nothing."""


@dataclass(frozen=True)
class _StubLanguage:
    """Head of the stubs' source, and the text of one stub; `@` is its symbol."""

    prologue: str
    function: str


_RETURNING_STUBS = _StubLanguage(
    """#include <stdio.h>

static int refuse(const char* name, int* told) {
  if (!*told) fprintf(stderr, "anabatic sim: %s is not simulated\\n", name);
  *told = 1;
  return 200001;
}
""",
    'int @(void) { static int told; return refuse("@", &told); }',
)
"""For functions that return a status."""

_RAISING_STUBS = _StubLanguage(
    """#include <cxxabi.h>

#include <stdexcept>
#include <string>

[[noreturn]] static void refuse(const char* symbol) {
  char* name = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr);
  throw std::runtime_error("anabatic sim: " + std::string(name ? name : symbol) +
                           " of CANN's graph engine is not simulated; the backends eager, aot_eager and npugraphs are");
}
""",
    'extern "C" void @() { refuse("@"); }',
)
"""For C++ that returns objects; Python gets a RuntimeError."""


def _list_symbols(library: Path, kind: str) -> set[str]:
    if shutil.which("nm") is None:
        raise UserError("nm is not on the PATH", "install binutils, as with the compiler: apt install g++")
    done = subprocess.run(["nm", "-D", f"--{kind}-only", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"nm cannot read {library}: {done.stderr.strip()}", "install binutils")
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()}


def generate_stub_source(
    needing: Iterable[Path],
    having: Iterable[Path],
    wanted: re.Pattern[str] = _CANN_SYMBOL,
    language: _StubLanguage = _RETURNING_STUBS,
) -> str:
    """Return source that defines what libraries of the wheel need and ours do not have."""
    symbols: set[str] = set()
    present: set[str] = set()
    for library in needing:
        symbols |= _list_symbols(library, "undefined")
        present |= _list_symbols(library, "defined")
    for library in having:
        present |= _list_symbols(library, "defined")
    names = sorted(name for name in symbols - present if wanted.fullmatch(name))
    return "\n".join([language.prologue, *(language.function.replace("@", name) for name in names), ""])
