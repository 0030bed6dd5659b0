"""The package anabatic-sim: everything of the simulator is in it, under its own names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "src"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as the build hook makes it."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("sim_build_hook", ROOT / "packaging/anabatic-sim/hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    target = tmp_path_factory.mktemp("distribution") / "anabatic_sim"
    hook.make_package(SOURCES, target)
    return target


def test_every_source_of_the_simulator_is_in_it(package: Path) -> None:
    suffixes = (".py", ".cpp", ".h")
    expected, found = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in suffixes}
        for folder in (SOURCES / "anabatic" / "sim", package / "sim")
    )
    assert found == expected
    assert Path("cann_python/anabatic_sim_torch.py") in found


def test_it_imports_without_anabatic(package: Path) -> None:
    modules = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in package.rglob("*.py")
        if path.name != "__main__.py" and "cann_python" not in path.parts and "pytest" not in path.name
    ]
    imports = f"for name in {modules!r}: importlib.import_module(name)"
    code = f"import importlib, sys\n{imports}\nprint('anabatic' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
