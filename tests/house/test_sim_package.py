"""The distribution anabatic-sim: made from these sources, without files of anabatic or anything it does not need."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import anabatic
from anabatic_sim.libraries import prebuilt_libraries
from anabatic_sim.libraries.prebuilt_libraries import PrebuiltLibraries
from anabatic_sim.libraries.torch_npu_wheel import TorchInstallation
from house import tree

PROJECT = tree.ROOT / "packaging" / "anabatic-sim"
SOURCES = tree.ROOT / "src" / "anabatic_sim"
SHARED = {
    *("__init__", "core.__init__", "device.__init__", "plan.__init__"),
    *("core.errors", "core.formatting", "core.json_reader", "core.log", "core.paths", "core.process_info"),
    *("device.table", "plan.cost_model"),
}
"""Modules of anabatic in it. A new import of the simulator adds one: decide whether other projects need it."""
MODULES = {f"anabatic.{name}" for name in SHARED} | {
    ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
    for path in SOURCES.rglob("*.py")
    if path.name not in ("command_package.py", "commands.py")
}
CANN_MODULES = {path.name for path in (SOURCES / "cann_python").iterdir() if path.is_dir()}


def build(words: str, out: Path, **variables: str) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed (it is in the dev extra)")
    code = f"import sys, hatchling.build as b; print(b.{words}(sys.argv[1]))"
    outer = {**os.environ, "ANABATIC_REPOSITORY": "https://example.org/owner/anabatic", **variables}
    done = subprocess.run([sys.executable, "-c", code, out], cwd=PROJECT, capture_output=True, text=True, env=outer)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled libraries."""
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.process
def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        texts = {name: file.read(name) for name in names}
    kernels = {path.relative_to(SOURCES.parent).as_posix() for path in (SOURCES / "csrc").rglob("*.*")}
    modules = {f"{name.replace('.', '/')}.py" for name in MODULES}
    assert names == kernels | modules | {"anabatic/py.typed", "anabatic_sim/py.typed"}
    for name, text in texts.items():
        assert text == (SOURCES.parent / name).read_bytes(), "no source is rewritten"
        if name.endswith(".py"):
            check_imports(name, text.decode())


@pytest.mark.process
def test_every_module_imports_without_the_rest(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    modules = sorted(
        name.removesuffix(".__init__") for name in MODULES if "cann_python" not in name and "pytest" not in name
    )
    imports = f"for name in {modules!r}: importlib.import_module(name)"
    code = f"import importlib, sys\n{imports}\nprint(sys.modules['anabatic'].__file__)"
    line = [sys.executable, "-S", "-c", code]
    outer = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, env=outer, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "anabatic/__init__.py")), done.stderr


def check_imports(name: str, text: str) -> None:
    """Standard library, torch and pytest, and what is in it: nothing else that must be installed."""
    for node in ast.walk(ast.parse(text)):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in found:
            package = module.partition(".")[0]
            known = package in sys.stdlib_module_names or package in ("anabatic_sim", "__future__")
            known |= package == "anabatic" and _holds(module)
            known |= "/cann_python/" in name and package in CANN_MODULES
            assert known or (package == "pytest" and "/pytest_" in name), f"{name} imports {module}"


def _holds(module: str) -> bool:
    """A module that it has, or a name of one."""
    return bool({module, f"{module}.__init__", module.rpartition(".")[0]} & MODULES)


@pytest.mark.process
def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        (entry,) = (name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt"))
        (licence,) = (name for name in file.namelist() if name.endswith("/licenses/LICENSE"))
        text, commands = file.read(metadata).decode(), file.read(entry).decode()
        assert file.read(licence) == (tree.ROOT / "LICENSE").read_bytes()
    needed = [line.removeprefix("Requires-Dist: ") for line in text.splitlines() if line.startswith("Requires-Dist")]
    assert needed == ["numpy", "pyyaml", "torch<2.15,>=2.7.1", "pytest>=8.3; extra == 'test'"]
    assert f"\nVersion: {anabatic.__version__}\n" in text and "License-Expression: Apache-2.0" in text
    assert "Project-URL: Repository, https://example.org/owner/anabatic" in text
    assert "anabatic-sim = anabatic_sim.standalone_command:main" in commands
    assert "[pytest11]\nnpu_sim = anabatic_sim.pytest_plugin" in commands


@pytest.mark.process
def test_wheel_of_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    archive = build("build_sdist", tmp_path)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (root,) = (path for path in tmp_path.iterdir() if path.is_dir())
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    outer = {**os.environ, "ANABATIC_REPOSITORY": "https://example.org/owner/anabatic"}
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, check=True, capture_output=True, env=outer)
    (other,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as two:
        assert {name: one.getinfo(name).CRC for name in one.namelist()} == {
            name: two.getinfo(name).CRC for name in two.namelist()
        }


@pytest.mark.process
def test_it_starts_without_anabatic_and_without_torch(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    outer = {**os.environ, "PYTHONPATH": str(tmp_path), "ANABATIC_CACHE": str(tmp_path / "cache")}
    outer.pop("PYTHONSAFEPATH", None)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-S", "-m", "anabatic_sim", *words]  # -S: neither anabatic nor torch is there
        return subprocess.run(line, capture_output=True, text=True, env=outer, cwd=tmp_path)

    assert run("--version").stdout == f"anabatic-sim {anabatic.__version__}\n"
    assert "anabatic-sim --npus 8 --chip 910B3 -- torchrun" in run("--help").stdout
    assert run("clean").stdout.startswith("removed ")
    for words, message in {
        ("--", "true"): "error: torch is not installed",
        ("--npu", "2", "--", "true"): "error: unrecognized arguments: --npu",
        ("--npus", "0", "--", "true"): "error: --npus is 0, expected 1 to 64",
        (): "error: which command?",
        ("--chip", "910B", "true"): 'error: --chip is "910B"',
    }.items():
        done = run(*words)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)


def write_prebuilt(root: Path, **changed: object) -> Path:
    values = {
        "torch": "2.13.0",
        "torch_npu": "2.13.0",
        "machine": os.uname().machine,
        "uses_old_abi": False,
        "sources": prebuilt_libraries.digest_sources(),
        "modules": ("torch_npu/__init__.py",),
    }
    made = PrebuiltLibraries(**{**values, **changed})  # type: ignore[arg-type]
    (root / made.folder_name / "lib").mkdir(parents=True)
    made.write(root / made.folder_name)
    return root / made.folder_name


def fake_torch(folder: Path, version: str, symbol: bytes) -> TorchInstallation:
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libc10.so").write_bytes(b"\0" + symbol)
    return TorchInstallation(version, folder)


NEW_ABI = b"_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_string"


@pytest.mark.parametrize(
    ("changed", "version", "symbol", "reason"),
    [
        ({}, "2.13.0+cpu", NEW_ABI, ""),
        ({}, "2.13.0", NEW_ABI, ""),
        ({}, "2.12.0", NEW_ABI, "this package has compiled libraries for torch 2.13.0, not 2.12.0"),
        ({"machine": "riscv64"}, "2.13.0", NEW_ABI, "they are for riscv64"),
        ({}, "2.13.0", b"", "this torch has another C++ ABI"),
        ({"sources": "0"}, "2.13.0", NEW_ABI, "the C++ files of this package were changed since"),
    ],
)
def test_compiled_libraries_are_used_only_where_they_fit(
    changed: dict[str, object], version: str, symbol: bytes, reason: str, tmp_path: Path
) -> None:
    folder = write_prebuilt(tmp_path / "prebuilt", **changed)
    choice = prebuilt_libraries.choose_prebuilt(fake_torch(tmp_path / "torch", version, symbol), tmp_path / "prebuilt")
    if reason:
        assert choice.libraries is None and reason in choice.reason
    else:
        assert choice.folder == folder and choice.libraries is not None
        assert choice.libraries.modules == ("torch_npu/__init__.py",)


def test_a_package_without_compiled_libraries_gives_no_reason(tmp_path: Path) -> None:
    choice = prebuilt_libraries.choose_prebuilt(TorchInstallation("2.13.0", tmp_path), tmp_path)
    assert (choice.libraries, choice.reason) == (None, "")
    assert not prebuilt_libraries.PREBUILT.exists(), "the checkout is compiled from its sources"


@pytest.mark.process
def test_platform_wheel(tmp_path: Path) -> None:
    write_prebuilt(tmp_path / "prebuilt")
    (tmp_path / "prebuilt" / f"2.13.0-{os.uname().machine}" / "lib" / "libhccl.so").write_bytes(b"x")
    found = build(
        "build_wheel",
        tmp_path,
        ANABATIC_SIM_PREBUILT=str(tmp_path / "prebuilt"),
        ANABATIC_SIM_TAG="manylinux_2_35_x86_64",
    )
    assert found.name == f"anabatic_sim-{anabatic.__version__}-py3-none-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(found) as file:
        names = file.namelist()
        (manifest,) = (name for name in names if name.endswith("/manifest.json"))
        assert json.loads(file.read(manifest))["sources"] == prebuilt_libraries.digest_sources()
        assert f"anabatic_sim/prebuilt/2.13.0-{os.uname().machine}/lib/libhccl.so" in names
        (tag,) = (name for name in names if name.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in file.read(tag).decode()


def test_platform_tag_is_the_oldest_that_allows_the_symbols() -> None:
    script = load_script(tree.ROOT / "scripts" / "build_sim_wheels.py")
    policies = [
        {"name": "manylinux_2_28", "symbol_versions": {"x86_64": {"GLIBC": ["2.17", "2.28"], "GLIBCXX": ["3.4.24"]}}},
        {"name": "manylinux_2_35", "symbol_versions": {"x86_64": {"GLIBC": ["2.17", "2.35"], "GLIBCXX": ["3.4.30"]}}},
    ]
    assert script.find_platform_tag({("GLIBC", "2.17")}, policies, "x86_64") == "manylinux_2_28_x86_64"
    assert script.find_platform_tag({("GLIBCXX", "3.4.30")}, policies, "x86_64") == "manylinux_2_35_x86_64"
    with pytest.raises(ValueError, match="no manylinux policy allows"):
        script.find_platform_tag({("GLIBCXX", "3.4.99")}, policies, "x86_64")
    assert script.list_versions()[0] == "2.7.1" and "2.6.0" not in script.list_versions()


def test_action_of_github() -> None:
    """Every input is used, and each step names its shell; words of a user reach the shell through variables only."""
    folder = tree.ROOT / "packaging" / "github-action"
    action = yaml.safe_load((folder / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite" and action["inputs"]["run"]["required"]
    text = str(action["runs"]["steps"])
    for name, row in action["inputs"].items():
        assert f"inputs.{name} " in text or f"inputs.{name}}}" in text, f"input {name} is not used"
        assert row["description"]
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert step["shell"] == "bash" and "${{" not in step["run"], step
