"""Write constraints.txt anew: resolve pyproject.toml with several interpreters and merge what pip chose.

usage: python scripts/pin.py python3.10 python3.11

The newest interpreter named decides for all newer ones; an older one gets its own line where it needs one.
torch is pinned by hand (TORCH): it must agree with the wheels that set-up looks for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"
OWN = {"anabatic", "torch"}
OF_TORCH = ("cuda-", "nvidia-", "triton")
"""What the CUDA build of torch brings: each of its versions asks for certain ones by itself."""
ROOT = Path(__file__).resolve().parent.parent
HEAD = f"""\
# What set-up installs, the same everywhere; written by scripts/pin.py. pyproject.toml says what is supported.
torch=={TORCH}
"""


def requirements() -> list[str]:
    """Return what pyproject.toml asks for (package, dev), with the pinned torch, and what torch asks for."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"]]
    of_torch = [
        "filelock",
        "typing-extensions",
        "setuptools>=77.0.3",
        "sympy",
        "networkx",
        "jinja2",
        "fsspec",
    ]
    return [line for line in wanted if not line.startswith("torch>")] + [f"torch=={TORCH}", *of_torch]


def resolve(python: str) -> dict[str, str]:
    """Return name -> version as the pip of `python` resolves them, wheels only.

    For the first release of its version: Debian 12 has Python 3.11.2, and packages ask for 3.11.5.
    """
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--only-binary",
        ":all:",
        "--python-version",
        f"{version(python)}.0",
        "--target",  # which pip asks for beside --python-version
        "unused",
    ]
    run = subprocess.run([*command, "--report", "-", *requirements()], check=True, capture_output=True, text=True)
    chosen = (item["metadata"] for item in json.loads(run.stdout)["install"])
    named = {item["name"].lower().replace("_", "-"): item["version"] for item in chosen}
    return {name: pin for name, pin in named.items() if name not in OWN and not name.startswith(OF_TORCH)}


def version(python: str) -> str:
    """Return `3.11` for an interpreter."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main(pythons: list[str]) -> None:
    """Resolve for each interpreter, oldest first, and write constraints.txt."""
    ranges = sorted(((version(python), resolve(python)) for python in pythons), key=lambda row: row[0].split("."))
    newest_version, newest = ranges[-1]
    lines = []
    for name in sorted({name for _, pins in ranges for name in pins}):
        if all(pins.get(name) == newest.get(name) for _, pins in ranges):
            lines.append(f"{name}=={newest[name]}")
            continue
        for upper, (_, pins) in zip(ranges[1:], ranges, strict=False):
            if name in pins:
                lines.append(f'{name}=={pins[name]}; python_version < "{upper[0]}"')
        if name in newest:
            lines.append(f'{name}=={newest[name]}; python_version >= "{newest_version}"')
    (ROOT / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
