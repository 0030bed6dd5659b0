"""What torch.compile needs on a machine, and where it keeps what it has compiled."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import tempfile
from pathlib import Path

import torch

from anabatic.core import cpu_info, log
from anabatic.core.paths import get_cache_root
from anabatic.device.compiled_code import CompiledCode

_COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang", "cc"))}
"""Device type -> variable that names the compiler, and names that are tried: Inductor writes C++ for a processor, and
Triton compiles the code that starts its kernels on CUDA."""
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class _DamageFilter(logging.Filter):
    """Says in one line, once, what torch says with a traceback for each damaged file at every start.

    `torch/_inductor/codecache.py` skips a file that it cannot read, compiles anew, and leaves the file where it is.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.is_reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if not self.is_reported:
            self.is_reported = True
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warn(f"compiled code in {self.folder} cannot be read or written ({reason}); it is compiled again")
            log.info(f"hint: rm -r {shlex.quote(self.folder)} if this comes again")
        return False


def find_missing_compiler(device_type: str) -> str | None:
    """Return what is missing to compile for a device, None if nothing is or it is not known what is needed."""
    if device_type == "npu" and importlib.util.find_spec("triton") is None:  # the module that triton-ascend installs
        return "triton-ascend is not installed"
    if device_type not in _COMPILERS:
        return None
    variable, names = _COMPILERS[device_type]
    given = os.environ.get(variable)
    if given:
        return None if shutil.which(given) else f"{variable} is {given}, which is no program here"
    if any(shutil.which(name) for name in names):
        return None
    return f"there is no compiler here ({', '.join(names)}, or the variable {variable})"


def use_cached_code() -> CompiledCode | None:
    """Give torch the code that earlier starts have compiled; None: the user has set torch's folder, which stays.

    Torch's own default is below the temporary folder, which a new container does not have. A store belongs to one
    version of torch, one kind of processor and one user: the C++ is compiled for its instructions, homes are shared
    among machines, and nobody runs what another has compiled. What torch says of damaged files is one line from then
    on.
    """
    global _CODE
    given = get_torch_folder()
    if given and not (_is_torch_default(Path(given)) or (_CODE is not None and given == str(_CODE.work))):
        _report_damage_once(given)
        return None
    store = _choose_store()
    if _CODE is None or _CODE.store != store:
        _CODE = CompiledCode(store, _CODE.work if _CODE is not None else None)
    _CODE.load_files()
    os.environ[_FOLDER_VARIABLE] = str(_CODE.work)
    _report_damage_once(str(_CODE.work))
    return _CODE


def get_torch_folder() -> str:
    """Return the folder in which torch keeps compiled code, as the variable names it; empty: it has not been set."""
    return os.environ.get(_FOLDER_VARIABLE, "")


_CODE: CompiledCode | None = None
"""Of this process: torch's folder is the process's, too."""


def _report_damage_once(folder: str) -> None:
    logger = logging.getLogger("torch._inductor.codecache")
    for old in [one for one in logger.filters if isinstance(one, _DamageFilter)]:
        logger.removeFilter(old)
    logger.addFilter(_DamageFilter(folder))


def _choose_store() -> Path:
    facts = cpu_info.read_cpuinfo()
    kind = f"{platform.machine()} {facts.get('flags', '')} {facts.get('Features', '')} {os.getuid()}"
    name = f"{torch.__version__}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    return get_cache_root() / "compiled" / name


def _is_torch_default(folder: Path) -> bool:
    """Torch sets the variable itself, to a folder of the user's below the temporary one, when it looks for it first."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")
