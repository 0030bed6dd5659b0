"""What torch.compile needs on a machine, and where it keeps what it has compiled."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

import torch

from anabatic.core import cpu_info
from anabatic.core.paths import get_cache_root

_COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang", "cc"))}
"""Device type -> variable that names the compiler, and names that are tried: Inductor writes C++ for a processor, and
Triton compiles the code that starts its kernels on CUDA."""
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def find_missing_compiler(device_type: str) -> str | None:
    """Return what is missing to compile for a device, None if nothing is or it is not known what is needed."""
    if device_type not in _COMPILERS:
        return None
    variable, names = _COMPILERS[device_type]
    given = os.environ.get(variable)
    if given:
        return None if shutil.which(given) else f"{variable} is {given}, which is no program here"
    if any(shutil.which(name) for name in names):
        return None
    return f"there is no compiler here ({', '.join(names)}, or the variable {variable})"


def use_cache_folder() -> str:
    """Make torch keep compiled code in our cache, so that the next start finds it; return the folder.

    Torch's own default is below the temporary folder, which a new container does not have. A folder belongs to one
    version of torch and one kind of processor: the C++ is compiled for its instructions, and homes are shared among
    machines. A folder that the user has set stays.
    """
    given = os.environ.get(_FOLDER_VARIABLE)
    if given and not _is_torch_default(Path(given)):
        return given
    facts = cpu_info.read_cpuinfo()
    kind = f"{platform.machine()} {facts.get('flags', '')} {facts.get('Features', '')}"
    name = f"{torch.__version__}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    os.environ[_FOLDER_VARIABLE] = folder = str(get_cache_root() / "compiled" / name)
    return folder


def _is_torch_default(folder: Path) -> bool:
    """Torch sets the variable itself, to a folder of the user's below the temporary one, when it looks for it first."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")
