"""The torch_npu wheel that matches the installed torch, in the cache: `import torch` elsewhere stays as it is.

torch loads every installed torch_npu by itself and fails without CANN, so the wheel may never enter the environment.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import log
from anabatic.core.errors import Failure, UserError
from anabatic.core.paths import make_write_error, open_atomic_folder
from anabatic_sim.machine_spec import OTHER_CACHE_HINT

SUPPORTED_ARCHITECTURES = ("x86_64", "aarch64")
"""Platforms that have wheels (PyPI)."""
CANN_RELEASES = {
    "2.6.0": "8.5.0",
    "2.7.1": "9.2.0",
    "2.8.0": "9.0.0",
    "2.9.0": "9.2.0",
    "2.10.0": "9.2.0",
    "2.11.0": "9.2.0",
    "2.12.0": "9.2.0",
    "2.13.0": "9.2.0",
    "2.14.0": "9.2.0",
}
"""torch -> CANN of its newest wheel (TorchNPU release notes up to 26.2.0)."""


@dataclass(frozen=True)
class TorchInstallation:
    """The installed torch, found without importing it."""

    version: str
    folder: Path
    is_cuda_build: bool = False
    """torch_npu loads beside it only where no GPU is visible (`_check_device_conflict` in its __init__.py)."""

    @property
    def base_version(self) -> str:
        """`2.13.0` of `2.13.0+cpu`."""
        return self.version.partition("+")[0]

    @property
    def uses_old_abi(self) -> bool:
        """True for a torch that was compiled with libstdc++'s old strings (some wheels up to 2.6)."""
        needle = b"torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_string"
        return needle not in (self.folder / "lib/libc10.so").read_bytes()


@dataclass(frozen=True)
class TorchNpuWheel:
    """An unpacked wheel."""

    version: str
    folder: Path
    """Addition to PYTHONPATH."""
    cann_release: str


def find_installed_torch() -> TorchInstallation:
    """Return the torch of this interpreter.

    Raises:
        UserError: there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("torch is not installed", "pip install torch into this environment; the CPU build is smaller")
    folder = Path(spec.submodule_search_locations[0])
    text = (folder / "version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda(: [^=]*)? = '", text, re.M) is not None
    return TorchInstallation(importlib.metadata.version("torch"), folder, cuda)


_REQUIRED_FILES = ("torch_npu/__init__.py", "torch_npu/lib/libtorch_npu.so")
"""Without these something has removed parts of an unpacked wheel: it is fetched again."""
PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def find_unpacked_wheel(root: Path, torch: TorchInstallation, version: str = "") -> TorchNpuWheel | None:
    """Return the wheel of this version, or else the newest matching one, that is already unpacked below `root`."""
    patterns = [version] if version else [torch.base_version, f"{torch.base_version}.post*"]
    folders = [folder for pattern in patterns for folder in root.glob(f"torch_npu-{pattern}-{PYTHON_TAG}")]
    complete = [folder for folder in folders if all((folder / part).is_file() for part in _REQUIRED_FILES)]
    return max(map(_wheel_of_folder, complete), key=_post_release, default=None)


def _post_release(wheel: TorchNpuWheel) -> int:
    return int(wheel.version.partition(".post")[2] or 0)


def fetch_wheel(root: Path, torch: TorchInstallation, version: str = "", modules: Sequence[str] = ()) -> TorchNpuWheel:
    """Return the matching wheel, unpacked below `root`; download it when it is not there.

    Args:
        version: take this one; default: the newest for this torch.
        modules: files to compile to bytecode; default: all.

    Raises:
        UserError: no wheel matches this machine or this torch.
        Failure: it cannot be downloaded.
    """
    if wheel := find_unpacked_wheel(root, torch, version):
        return wheel
    if platform.system() != "Linux" or platform.machine() not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"there is no torch_npu for {platform.system()} {platform.machine()}",
            f"the simulated NPU needs Linux on {' or '.join(SUPPORTED_ARCHITECTURES)}",
        )
    root.mkdir(parents=True, exist_ok=True)
    log.info(f"fetching torch_npu for torch {torch.base_version} into {root} (about 45 MB, once)")
    with open_atomic_folder(root / "download", OTHER_CACHE_HINT) as download:
        _download_wheel(download, torch, version)
        file = next(download.glob("torch_npu-*.whl"))
        target = root / f"torch_npu-{file.name.split('-')[1]}-{PYTHON_TAG}"
        with open_atomic_folder(target, OTHER_CACHE_HINT) as unpacked, zipfile.ZipFile(file) as archive:
            archive.extractall(unpacked)
            _compile_modules(unpacked, modules)
    shutil.rmtree(root / "download", ignore_errors=True)
    return _wheel_of_folder(target)


def _compile_modules(folder: Path, modules: Sequence[str]) -> None:
    """Compile to bytecode: every start would do it otherwise, and show the warnings of old escape sequences."""
    if modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in modules:
                py_compile.compile(str(folder / name), doraise=False, quiet=2)
        return
    words = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(folder / "torch_npu")]
    subprocess.run(words, capture_output=True)


def _wheel_of_folder(folder: Path) -> TorchNpuWheel:
    version = folder.name.split("-")[1]
    return TorchNpuWheel(version, folder, CANN_RELEASES.get(version.partition(".post")[0], "9.2.0"))


def _download_wheel(target: Path, torch: TorchInstallation, version: str) -> None:
    requirement = f"torch_npu=={version or torch.base_version + '.*'}"
    words = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(target),
        requirement,
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 0:
        return
    text = done.stdout + done.stderr
    if "No module named pip" in text:
        raise UserError("pip is not installed in this environment", "python -m ensurepip")
    if os.strerror(errno.ENOSPC) in text:
        raise make_write_error(target, OSError(errno.ENOSPC, ""), OTHER_CACHE_HINT)
    if re.search(r"^WARNING: Retrying .*(onnection|timed out)", text, re.M):
        raise Failure(
            f"torch_npu {torch.base_version} cannot be downloaded: pip's index does not answer",
            "check the network, proxy and index (`pip config list`)",
        )
    if "No matching distribution" in text and "(from versions: none)" in text and torch.base_version in CANN_RELEASES:
        # Also what pip says of a package whose wheels are all for other interpreters.
        raise UserError(
            f"pip's index has no torch_npu at all for Python {platform.python_version()}",
            "check the network and the index (`pip config list`): PyPI has wheels for Python 3.10 to 3.14",
        )
    if "No matching distribution" in text:
        raise UserError(
            f"there is no torch_npu wheel for torch {torch.version} and Python {platform.python_version()}",
            f"torch versions with a wheel: {', '.join(CANN_RELEASES)}",
        )
    last = next((line for line in reversed(text.splitlines()) if line.startswith("ERROR")), "no message")
    raise Failure(
        f"torch_npu cannot be downloaded: {last.removeprefix('ERROR: ')}", "check the network and pip's index"
    )
