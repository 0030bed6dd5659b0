"""Libraries of stubs: what torch_npu's libraries need of CANN and the simulator does not have."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anabatic.core.errors import Failure, UserError
from anabatic_sim.libraries.build_layout import ATB_LIBRARY, GRAPH_LIBRARY, STUB_LIBRARY, SimulatorBuild
from anabatic_sim.libraries.compilation import build_shared_library

ATB_OPERATORS = "libop_plugin_atb.so"
"""torch_npu's library that needs the acceleration library; not in every wheel."""
GRAPH_USERS = "dynamo/torchair/core/*.so"
"""torch_npu's libraries that need the graph engine."""

_CANN_SYMBOL = re.compile(r"(acl|Acl|Hccl|Msprof|rt[A-Z]|hal[A-Z]|drv[A-Z]|_ZNK?2ge)\w*")
"""Names of CANN: everything else that is undefined belongs to Python, torch or the C library."""

_ATB_SYMBOL = re.compile(r"_ZNK?3atb\w*")
"""Mangled names of the namespace atb. All of torch_npu's uses return a status or nothing."""


@dataclass(frozen=True)
class _StubLanguage:
    """How the source of stubs begins, and how one is written; `@` is its symbol."""

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


def build_stub_libraries(build: SimulatorBuild, compiler: str, root: Path) -> None:
    """Make the libraries of stubs in `root`/lib, beside those that are compiled."""
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
        build_shared_library(compiler, root, name, ["-x", "c", str(file)])
    having = list((root / "lib").glob("*.so"))
    file = root / f"stubs_{GRAPH_LIBRARY}.cpp"
    text = generate_stub_source(package.glob(GRAPH_USERS), having, _CANN_SYMBOL, _RAISING_STUBS)
    file.write_text(text, encoding="utf-8")
    build_shared_library(compiler, root, GRAPH_LIBRARY, [str(file)])
