"""Makes the package `anabatic_sim` from the sources of `anabatic`: the simulator and the few modules that it imports.

The import names change (`anabatic.sim` becomes `anabatic_sim.sim`), so that both distributions can be installed in one
environment and neither has files of the other. A source archive holds the finished package, so it builds without the
repository.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "anabatic_sim"
PREBUILT_VARIABLE = "ANABATIC_SIM_PREBUILT"
"""A folder of compiled libraries (scripts/build_sim_wheels.py): the wheel is one of a platform then."""
TAG_VARIABLE = "ANABATIC_SIM_TAG"
"""The platform tag of that wheel."""
TORCH_NPU_NEEDS = ("numpy", "pyyaml")
"""What torch_npu's metadata requires besides torch: its wheel is unpacked into a cache, where pip does not see it."""
_FOREIGN = "cann_python"
"""Folder of modules under other names (acl, tbe, torch's backend): programs import them, nothing of ours does."""
_DATA_SUFFIXES = (".cpp", ".h")
_INIT = '''"""Simulated Ascend NPUs: run and test torch_npu programs without Ascend hardware."""

__version__ = "{version}"
'''
_MAIN = """import sys

from anabatic_sim.sim.standalone_command import main

sys.exit(main())
"""
_REPLACEMENTS = (
    (re.compile(r"\banabatic\.(?=(?:core|device|plan|sim)\b)"), f"{PACKAGE}."),
    (re.compile(r"\banabatic sim\b"), "anabatic-sim"),
    (re.compile(r'getLogger\("anabatic"\)'), f'getLogger("{PACKAGE}")'),
    (re.compile(r'name = PROGRAM\.replace\(" sim", ""\)'), "name = PROGRAM"),
)


class ProjectMetadata(MetadataHookInterface):
    """Fills what depends on the sources: version, description, addresses, the range of torch."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        package = find_package(root)
        metadata["version"] = read_version(root)
        metadata["dependencies"] = [f"torch{make_torch_range(package)}", *TORCH_NPU_NEEDS]
        metadata["readme"] = "README.md"
        repository = os.environ.get("ANABATIC_REPOSITORY", "")
        if not repository and os.environ.get("GITHUB_REPOSITORY"):
            server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
            repository = f"{server}/{os.environ['GITHUB_REPOSITORY']}"
        page = f"{repository}/blob/main/docs/en/guides/test-your-project.md"
        metadata["urls"] = {"Repository": repository, "Documentation": page} if repository else {}


class MadePackage(BuildHookInterface):
    """Adds the package, and where a folder of compiled libraries is named also those."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if not (root / PACKAGE).is_dir():  # in a source archive hatchling finds it by its name
            folder = root / "build" / PACKAGE
            make_package(find_sources(root), folder)
            build_data["force_include"][str(folder)] = PACKAGE
        prebuilt = os.environ.get(PREBUILT_VARIABLE)
        if prebuilt and self.target_name == "wheel":
            build_data["force_include"][prebuilt] = f"{PACKAGE}/sim/prebuilt"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{os.environ[TAG_VARIABLE]}"


def find_sources(root: Path) -> Path:
    """Return the folder `src` of the repository."""
    return root.parents[1] / "src"


def find_package(root: Path) -> Path:
    """Return the package of the sources: made already (in a source archive) or the repository's."""
    return root / PACKAGE if (root / PACKAGE).is_dir() else find_sources(root) / "anabatic"


def read_version(root: Path) -> str:
    """Return the version that the package itself names."""
    text = (find_package(root) / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.*)"$', text, re.M)[1]  # type: ignore[index]


def make_torch_range(package: Path) -> str:
    """Return the range of torch versions that have a torch_npu: pip would choose a newer one, which has none."""
    text = (package / "sim" / "torch_npu_wheel.py").read_text(encoding="utf-8")
    table = ast.literal_eval(re.search(r"^CANN_RELEASES = (\{.*?\})", text, re.M | re.S)[1])  # type: ignore[index]
    minors = [int(version.split(".")[1]) for version in table]
    return f">=2.7.1,<2.{max(minors) + 1}"


def list_modules(sources: Path) -> list[str]:
    """Return the modules of `anabatic` that the simulator imports, itself included, in order of their names.

    Raises:
        ValueError: one imports the package `anabatic` itself, which is not in this distribution.
    """
    found: set[str] = set()
    files = sorted((sources / "anabatic" / "sim").rglob("*.py"))
    left = [".".join(file.relative_to(sources).with_suffix("").parts) for file in files if _FOREIGN not in file.parts]
    left = [module.removesuffix(".__init__") for module in left]
    while left:
        module = left.pop()
        path = _find_module(sources, module)
        if module in found or path is None:
            continue
        found.add(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if "anabatic" in names:
                raise ValueError(f"{module} imports from the package anabatic itself")
            left += [name for name in names if name.startswith("anabatic.")]
        parent = module.rpartition(".")[0]
        left += [parent] if parent != "anabatic" else []
    return sorted(found)


def _find_module(sources: Path, module: str) -> Path | None:
    base = sources.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def make_package(sources: Path, target: Path) -> None:
    """Write the package into `target`, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    for module in list_modules(sources):
        path = _find_module(sources, module)
        assert path is not None
        file = target / path.relative_to(sources / "anabatic")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rename_imports(path.read_text(encoding="utf-8")), encoding="utf-8")
    foreign = sources / "anabatic" / "sim" / _FOREIGN
    for path in sorted(foreign.rglob("*.py")):
        file = target / "sim" / _FOREIGN / path.relative_to(foreign)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rename_imports(path.read_text(encoding="utf-8")), encoding="utf-8")
    csrc = sources / "anabatic" / "sim" / "csrc"
    for path in sorted(csrc.rglob("*")):
        if path.suffix in _DATA_SUFFIXES:
            file = target / "sim" / "csrc" / path.relative_to(csrc)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, file)
    text = (sources / "anabatic" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, re.M)[1]  # type: ignore[index]
    (target / "__init__.py").write_text(_INIT.format(version=version), encoding="utf-8")
    (target / "__main__.py").write_text(_MAIN, encoding="utf-8")
    (target / "py.typed").write_text("", encoding="utf-8")


def rename_imports(text: str) -> str:
    """Return a module under its new names."""
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text
