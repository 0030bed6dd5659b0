"""What is installed below a root folder that nothing is executed in: Python packages, by the names of their folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabatic.doctor.files import Files

PACKAGES = (
    "torch", "torch-npu", "transformers", "tokenizers", "safetensors", "numpy", "peft", "datasets", "accelerate",
    "deepspeed", "triton", "triton-ascend", "torchvision", "torchaudio", "mindspeed", "vllm", "vllm-ascend", "anabatic",
    "attrs", "cython", "decorator", "sympy", "cffi", "pyyaml", "pathlib2", "psutil", "protobuf", "scipy", "requests",
    "absl-py",
)  # fmt: skip
_PLACES = (
    "/opt/venv/lib/python3*/site-packages", "/opt/conda/lib/python3*/site-packages",
    "/opt/conda/envs/*/lib/python3*/site-packages", "/usr/local/python3*/lib/python3*/site-packages",
    "/usr/local/lib/python3*/site-packages", "/usr/local/lib/python3*/dist-packages",
    "/*/miniconda3/lib/python3*/site-packages", "/*/miniconda3/envs/*/lib/python3*/site-packages",
    "/*/*/miniconda3/envs/*/lib/python3*/site-packages", "/*/*/anaconda3/envs/*/lib/python3*/site-packages",
    "/*/.pyenv/versions/*/lib/python3*/site-packages",
    "/usr/lib/python3*/site-packages", "/usr/lib/python3/dist-packages",
)  # fmt: skip
"""Where the images of Ascend (`/usr/local/python3.x`), conda, venv, pip, pyenv and Debian put packages."""
_FOLDER = re.compile(r"([A-Za-z0-9_.]+)-(\d[^-]*)\.(?:dist|egg)-info$")
_MOST_FOLDERS = 200


def _matching(files: Files, pattern: str) -> list[str]:
    """Return the folders of a pattern, inside the root."""
    found = [""]
    for part in pattern.strip("/").split("/"):
        if "*" in part:
            found = [f"{folder}/{name}" for folder in found for name in files.names(folder or "/", part)]
        else:
            found = [f"{folder}/{part}" for folder in found if files.folder(f"{folder}/{part}")]
        if len(found) > _MOST_FOLDERS:
            files.cut[pattern] = (_MOST_FOLDERS, len(found))
            del found[_MOST_FOLDERS:]
    return found


def packages(files: Files, folder: str) -> dict[str, str]:
    """Return name -> version of those of `PACKAGES` that lie in a folder of packages."""
    found = (_FOLDER.match(name) for name in files.names(folder, "*-info*"))
    named = {match[1].replace("_", "-").replace(".", "-").lower(): match[2] for match in found if match}
    return {name: named[name] for name in PACKAGES if name in named}


def facts(files: Files, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts `packages` and `python` of a root: of the active environment, else of the first with torch."""
    active = [env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name, "").startswith("/")]
    patterns = [*(f"{folder}/lib/python3*/site-packages" for folder in active), *_PLACES]
    seen = {folder: here for one in patterns for folder in _matching(files, one) if (here := packages(files, folder))}
    if not seen:
        return {}
    chosen = next((folder for folder, here in seen.items() if "torch" in here), next(iter(seen)))
    version = re.search(r"/python(3\.\d+)/", chosen)
    told = {"python": {"version": version[1], "path": chosen}} if version else {}
    return {"packages": seen[chosen], **told}
