"""Find Python packages below a root folder by the names of their folders; nothing is executed there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabatic.doctor.root_files import RootFiles

KNOWN_PACKAGES = (
    "torch", "torch-npu", "transformers", "tokenizers", "safetensors", "numpy", "peft", "datasets", "accelerate",
    "deepspeed", "triton", "triton-ascend", "torchvision", "torchaudio", "mindspeed", "vllm", "vllm-ascend", "anabatic",
    "attrs", "cython", "decorator", "sympy", "cffi", "pyyaml", "pathlib2", "psutil", "protobuf", "scipy", "requests",
    "absl-py", "anabatic-sim",
)  # fmt: skip
_SITE_PACKAGES_PATTERNS = (
    "/opt/venv/lib/python3*/site-packages", "/opt/conda/lib/python3*/site-packages",
    "/opt/conda/envs/*/lib/python3*/site-packages", "/usr/local/python3*/lib/python3*/site-packages",
    "/usr/local/lib/python3*/site-packages", "/usr/local/lib/python3*/dist-packages",
    "/*/miniconda3/lib/python3*/site-packages", "/*/miniconda3/envs/*/lib/python3*/site-packages",
    "/*/*/miniconda3/envs/*/lib/python3*/site-packages", "/*/*/anaconda3/envs/*/lib/python3*/site-packages",
    "/*/.pyenv/versions/*/lib/python3*/site-packages",
    "/usr/lib/python3*/site-packages", "/usr/lib/python3/dist-packages",
)  # fmt: skip
"""Package folders of the images of Ascend (`/usr/local/python3.x`), conda, venv, pip, pyenv and Debian."""
_INFO_FOLDER = re.compile(r"([A-Za-z0-9_.]+)-(\d[^-]*)\.(?:dist|egg)-info$")
_MAX_FOLDERS = 200


def _expand_pattern(files: RootFiles, pattern: str) -> list[str]:
    """Return the folders of a pattern, inside the root."""
    found = [""]
    for part in pattern.strip("/").split("/"):
        if "*" in part:
            found = [f"{folder}/{name}" for folder in found for name in files.list_names(folder or "/", part)]
        else:
            found = [f"{folder}/{part}" for folder in found if files.is_dir(f"{folder}/{part}")]
        if len(found) > _MAX_FOLDERS:
            files.truncated_folders[pattern] = (_MAX_FOLDERS, len(found))
            del found[_MAX_FOLDERS:]
    return found


def read_package_versions(files: RootFiles, folder: str) -> dict[str, str]:
    """Return name -> version of those of `KNOWN_PACKAGES` that lie in a folder of packages."""
    found = (_INFO_FOLDER.match(name) for name in files.list_names(folder, "*-info*"))
    versions = {match[1].replace("_", "-").replace(".", "-").lower(): match[2] for match in found if match}
    return {name: versions[name] for name in KNOWN_PACKAGES if name in versions}


def collect_root_facts(files: RootFiles, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts `packages` and `python` of a root: of the active environment, else of the first
    with torch."""
    active = [env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name, "").startswith("/")]
    patterns = [*(f"{folder}/lib/python3*/site-packages" for folder in active), *_SITE_PACKAGES_PATTERNS]
    seen = {
        folder: package_versions
        for one in patterns
        for folder in _expand_pattern(files, one)
        if (package_versions := read_package_versions(files, folder))
    }
    if not seen:
        return {}
    chosen = next(
        (folder for folder, package_versions in seen.items() if "torch" in package_versions), next(iter(seen))
    )
    version = re.search(r"/python(3\.\d+)/", chosen)
    facts = {"python": {"version": version[1], "path": chosen}} if version else {}
    return {"packages": seen[chosen], **facts}
