"""Symbols that torch_npu's libraries need to load and nobody here implements.

They are read from the wheel itself, so that another release brings its own list. A stub answers with ACL's "not
supported" (ACL_ERROR_API_NOT_SUPPORT in acl_base_rt.h) and says its name once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from anabatic.core.errors import Failure, UserError

_CANN_SYMBOL = re.compile(r"(acl|Acl|Hccl|Msprof|rt[A-Z]|hal[A-Z]|drv[A-Z]|_ZNK?2ge)\w*")
"""Names of CANN: everything else that is undefined belongs to Python, torch or the C library."""

_C_PROLOGUE = """#include <stdio.h>

static int refuse(const char* name, int* told) {
  if (!*told) fprintf(stderr, "anabatic sim: %s is not simulated\\n", name);
  *told = 1;
  return 200001;
}
"""


def _list_symbols(library: Path, kind: str) -> set[str]:
    if shutil.which("nm") is None:
        raise UserError("nm is not on the PATH", "install binutils, as with the compiler: apt install g++")
    done = subprocess.run(["nm", "-D", f"--{kind}-only", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"nm cannot read {library}: {done.stderr.strip()}", "install binutils")
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()}


def generate_stub_source(needing: Iterable[Path], having: Iterable[Path]) -> str:
    """Return C that defines what libraries of the wheel need and ours do not have."""
    symbols: set[str] = set()
    present: set[str] = set()
    for library in needing:
        symbols |= _list_symbols(library, "undefined")
        present |= _list_symbols(library, "defined")
    for library in having:
        present |= _list_symbols(library, "defined")
    names = sorted(name for name in symbols - present if _CANN_SYMBOL.fullmatch(name))
    lines = [f'int {name}(void) {{ static int told; return refuse("{name}", &told); }}' for name in names]
    return "\n".join([_C_PROLOGUE, *lines, ""])
