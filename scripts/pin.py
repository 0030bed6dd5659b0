"""Write constraints.txt anew: resolve pyproject.toml with several interpreters and merge what pip chose.

usage: python scripts/pin.py python3.10 python3.11     constraints.txt, then the locks
       python scripts/pin.py --hashes                  only the locks, for the versions that constraints.txt has

The newest interpreter named decides for all newer ones; an older one gets its own line where it needs one.
torch is pinned by hand (TORCH): it must agree with the wheels that set-up looks for.
The locks are requirements-dev.txt and requirements-serve.txt (pin_hashes.py), for `pip install --require-hashes`.
Needs Python 3.11 or newer, with pip.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pin_hashes

TORCH = "2.13.0"
OWN = {"anabatic", "torch"}
OF_TORCH = ("cuda-", "nvidia-", "triton")
"""What the CUDA build of torch brings: each of its versions asks for certain ones by itself."""
ROOT = Path(__file__).resolve().parent.parent
HEAD = f"""\
# What set-up installs, the same everywhere; written by scripts/pin.py. pyproject.toml says what is supported.
torch=={TORCH}
"""
LOCKS = {
    "dev": "what scripts/setup.sh installs",
    "serve": "what the images of containers/ install",
}
"""The extra of each lock, requirements-EXTRA.txt, and its use."""
HEAD_OF_LOCK = """\
# The pins of constraints.txt with checksums of their files, for {use}; written by scripts/pin.py --hashes.
# pip install --require-hashes --no-deps -r requirements-{extra}.txt
# torch is not here: its file, and so its checksum, depends on the build (CPU, CUDA) and on where it comes from.
"""


def requirements(extra: str) -> list[str]:
    """Return what pyproject.toml asks for (package, extra, build), with the pinned torch, and what torch asks for."""
    import tomllib

    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"][extra],
        *document["build-system"]["requires"],
    ]
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
    run = subprocess.run([*command, "--report", "-", *requirements("dev")], check=True, capture_output=True, text=True)
    chosen = (item["metadata"] for item in json.loads(run.stdout)["install"])
    named = {item["name"].lower().replace("_", "-"): item["version"] for item in chosen}
    return {name: pin for name, pin in named.items() if name not in OWN and not name.startswith(OF_TORCH)}


def version(python: str) -> str:
    """Return `3.11` for an interpreter."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def write_constraints(pythons: list[str]) -> None:
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


def write_locks() -> None:
    """Write the locks for the versions that constraints.txt has."""
    pins = pin_hashes.parse_pins((ROOT / "constraints.txt").read_text())
    index = pin_hashes.Index()
    texts = {}
    for extra, use in LOCKS.items():
        head = HEAD_OF_LOCK.format(extra=extra, use=use)
        texts[extra] = pin_hashes.write_lock(head, requirements(extra), pins, index)
    for extra, text in texts.items():
        (ROOT / f"requirements-{extra}.txt").write_text(text)
        print(f"requirements-{extra}.txt: {text.count('==')} versions, {text.count('--hash=')} files")


def main(words: list[str]) -> None:
    """Write what the words ask for."""
    if not words:
        sys.exit(f"error: no interpreter is named\nhint: {str(__doc__).partition('usage: ')[2].splitlines()[0]}")
    if words != ["--hashes"]:
        write_constraints(words)
    write_locks()


if __name__ == "__main__":
    main(sys.argv[1:])
