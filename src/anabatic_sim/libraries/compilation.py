"""Compilation of csrc/ with the system's compiler; an object is named after all that goes into it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic_sim.libraries.build_layout import CSRC, LIBRARIES, NativeLibrary, SimulatorBuild, simulator_folder
from anabatic_sim.program_name import PROGRAM

_HEADER_SECONDS, _TORCH_SECONDS, _PLAIN_SECONDS = 12, 4, 1
"""CPU time of compiling torch's headers, a file that uses them, and one without (measured, g++ 12)."""
_PROGRESS_SECONDS = 15.0
_TORCH_HEADER = CSRC / "torch_headers.h"


@dataclass(frozen=True)
class CompileUnit:
    """A file to compile."""

    command: list[str]
    target: Path
    uses_torch: bool


def find_compiler(reason: str = "") -> str:
    """Return the C++ compiler: CXX, else the first one on the PATH.

    Args:
        reason: why compiled libraries cannot be used, for the error.

    Raises:
        UserError: there is none.
    """
    name = os.environ.get("CXX") or next((word for word in ("g++", "c++", "clang++") if shutil.which(word)), None)
    if name is None or not shutil.which(name):
        raise UserError(
            f"no C++ compiler: {name or 'g++'} is not on the PATH" + (f"; {reason}" if reason else ""),
            "install one: apt install g++, or dnf install gcc-c++ (CXX names another)",
        )
    return name


@functools.cache
def get_compiler_version(compiler: str) -> str:
    """Return the first line of `COMPILER --version`."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def compile_units(build: SimulatorBuild, header: CompileUnit, units: list[CompileUnit]) -> None:
    """Compile files in parallel, torch's headers first, and log the progress.

    Raises:
        Failure: the compiler failed.
    """
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
    text = "\0".join([get_compiler_version(compiler), build.torch.version, build.wheel.version, *words])
    for folder in (CSRC, build.torch.folder, build.wheel.folder, simulator_folder()):
        text = text.replace(str(folder), "")
    return hashlib.sha256(text.encode())


def plan_header(build: SimulatorBuild, compiler: str) -> CompileUnit:
    """Return how to compile torch's headers once: `-include NAME.h` finds NAME.h.gch (g++ and clang++)."""
    library = next(library for library in LIBRARIES if library.uses_torch)
    words = [compiler, *_make_compile_flags(build, library), "-x", "c++-header", str(_TORCH_HEADER)]
    digest = _start_digest(build, compiler, words)
    digest.update(_TORCH_HEADER.read_bytes())
    folder = simulator_folder() / "objects" / f"torch-{digest.hexdigest()[:16]}"
    return CompileUnit(words, folder / f"{_TORCH_HEADER.name}.gch", uses_torch=True)


def plan_unit(build: SimulatorBuild, compiler: str, library: NativeLibrary, path: Path, header: Path) -> CompileUnit:
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
    return CompileUnit(words, target, library.uses_torch)


def _compile_header(unit: CompileUnit) -> None:
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(_TORCH_HEADER, unit.target.with_suffix(""))  # a compiler that cannot use the result reads this one
    _compile_unit(unit)


def _compile_unit(unit: CompileUnit, headers: Sequence[Future[None]] = ()) -> None:
    for future in headers:
        future.result()
    unit.target.parent.mkdir(parents=True, exist_ok=True)
    part = unit.target.with_suffix(".part")
    _run_compiler([*unit.command, "-o", str(part)], str(Path(unit.command[-1]).relative_to(CSRC)))
    os.replace(part, unit.target)


def link_library(build: SimulatorBuild, compiler: str, library: NativeLibrary, root: Path, objects: list[Path]) -> None:
    """Link the objects of a library into `root`/lib."""
    extra = [f"-L{root / 'lib'}", *(f"-l{name}" for name in library.linked_libraries)] if objects else []
    if library.uses_torch and objects:
        extra += [f"-L{build.torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    build_shared_library(compiler, root, library.name, [*map(str, objects), *extra, "-lpthread", "-ldl", "-lrt"])


def build_shared_library(compiler: str, root: Path, name: str, words: list[str]) -> None:
    """Make `root`/lib/lib`name`.so; `words` are the inputs of the compiler."""
    target = root / "lib" / f"lib{name}.so"
    soname = f"-Wl,-soname,{target.name}"
    _run_compiler([compiler, "-shared", "-fPIC", "-o", str(target), *words, soname], target.name)


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
