"""No test sees the clone's folder, the user's home, caches or variables: each has a folder and a home of its own."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

KEPT = frozenset(
    ("PATH", "TERM", "TMPDIR", "TZ", "USER", "LOGNAME", "SHELL", "COLUMNS", "LINES", "VIRTUAL_ENV")
    + ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
)
"""Variables of the caller that tests may see; the last four say how processors compute."""
KEPT_PREFIXES = ("ANABATIC_TEST_", "PYTEST_", "COV_", "COVERAGE_")
DRIVER_PREFIXES = ("ASCEND_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH", "PYTHONPATH")
"""What vendors' libraries need; kept only where there is a device, whose tests are run."""
DEVICE_FILES = ("/dev/davinci_manager", "/dev/nvidiactl")
HOME = "ANABATIC_TEST_HOME"
OUTER = "between-tests-"
"""Beginning of the name of the folder in which fixtures of modules and sessions run."""
SIM_CACHE = "ANABATIC_TEST_SIM_CACHE"
"""The user's cache, of which tests use one part: the build of the simulator, and the wheel it was built with."""
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "LC_ALL": "C.UTF-8",  # reports and messages are in the language of the locale
    "GIT_CONFIG_COUNT": "1",  # a clone of another user, as build servers have
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
"""What every test finds set."""


def clean_variables(variables: Mapping[str, str], has_device: bool) -> dict[str, str]:
    """Return the variables that tests may see."""
    prefixes = KEPT_PREFIXES + (DRIVER_PREFIXES if has_device else ())
    return {key: value for key, value in variables.items() if key in KEPT or key.startswith(prefixes)}


def isolate_process() -> None:
    """Clean this process's variables and give it an empty home; processes that tests start inherit both.

    Must run before anything imports torch or transformers. Workers of pytest-xdist find the home of their controller.
    """
    from anabatic.core.paths import get_cache_root

    os.environ.setdefault(SIM_CACHE, str(get_cache_root()))
    kept = clean_variables(os.environ, any(os.path.exists(path) for path in DEVICE_FILES))
    os.environ.clear()
    os.environ.update(kept | FIXED)
    if HOME not in os.environ:
        os.environ[HOME] = tempfile.mkdtemp(prefix="anabatic-tests-")
        atexit.register(shutil.rmtree, os.environ[HOME], ignore_errors=True)
    os.environ["HOME"] = os.environ[HOME]
    # Containers often forbid bytecode files; without them every start compiles some 2,000 modules again, 3 to 5 s each.
    sys.dont_write_bytecode = False


@contextmanager
def outer_place() -> Iterator[None]:
    """Work in an empty folder while tests run: fixtures of modules and sessions find nothing there."""
    at = os.getcwd()
    os.chdir(tempfile.mkdtemp(prefix=OUTER, dir=os.environ[HOME]))
    try:
        yield
    finally:
        os.chdir(at)


@contextmanager
def own_place(folder: Path) -> Iterator[None]:
    """Give a test a home, a cache and a working folder below `folder`; put everything back afterwards.

    A working folder that a fixture of the module has chosen stays: a server in this process may rely on it.
    """
    before, at = dict(os.environ), os.getcwd()
    for name in ("home", "work"):
        (folder / name).mkdir(parents=True)
    os.environ |= {"HOME": str(folder / "home"), "ANABATIC_CACHE": str(folder / "cache")}
    if os.path.basename(at).startswith(OUTER):
        os.chdir(folder / "work")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(at)
        shutil.rmtree(folder, ignore_errors=True)
