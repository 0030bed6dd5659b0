"""Packs `anabatic_sim`, and the few modules of `anabatic` that it imports, as they are in the repository.

A source archive holds them below `src`, so it builds without the repository. The distributions `anabatic-sim` and
`anabatic` have the shared files under the same names: install one of them.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SUFFIXES = (".py", ".cpp", ".h", ".typed")
PREBUILT_VARIABLE = "ANABATIC_SIM_PREBUILT"
"""A folder of compiled libraries (scripts/build_sim_wheels.py): the wheel is one of a platform then."""
TAG_VARIABLE = "ANABATIC_SIM_TAG"
"""The platform tag of that wheel."""
TORCH_NPU_NEEDS = ("numpy", "pyyaml")
"""What torch_npu's metadata requires besides torch: its wheel is unpacked into a cache, where pip does not see it."""
SHARED = (
    *("__init__.py", "core/__init__.py", "core/errors.py", "core/formatting.py", "core/json_reader.py", "core/log.py"),
    *("core/paths.py", "core/process_info.py", "device/__init__.py", "device/table.py", "plan/__init__.py"),
    *("plan/cost_model.py", "py.typed"),
)
"""Files of `anabatic` that the simulator imports; a test follows its imports."""
LEFT_OUT = ("command_package.py", "commands.py")
"""Of the simulator: the command of the program `anabatic`."""


class ProjectMetadata(MetadataHookInterface):
    """Fills what depends on the sources: version, description, addresses, the range of torch."""

    def update(self, metadata: dict[str, Any]) -> None:
        sources = find_sources(Path(self.root))
        metadata["version"] = read_version(sources)
        metadata["dependencies"] = [f"torch{make_torch_range(sources)}", *TORCH_NPU_NEEDS]
        metadata["readme"] = "README.md"
        repository = os.environ.get("ANABATIC_REPOSITORY", "")
        if not repository and os.environ.get("GITHUB_REPOSITORY"):
            server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
            repository = f"{server}/{os.environ['GITHUB_REPOSITORY']}"
        page = f"{repository}/blob/main/docs/en/guides/test-your-project.md"
        metadata["urls"] = {"Repository": repository, "Documentation": page} if repository else {}


class PackedSources(BuildHookInterface):
    """Adds the sources, and where a folder of compiled libraries is named also those."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sources = find_sources(Path(self.root))
        folder = "" if self.target_name == "wheel" else "src/"
        for name in list_files(sources):
            build_data["force_include"][str(sources / name)] = folder + name
        prebuilt = os.environ.get(PREBUILT_VARIABLE)
        if prebuilt and self.target_name == "wheel":
            build_data["force_include"][prebuilt] = "anabatic_sim/prebuilt"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{os.environ[TAG_VARIABLE]}"


def find_sources(root: Path) -> Path:
    """Return the folder `src`: of an unpacked source archive, or of the repository."""
    return root / "src" if (root / "src").is_dir() else root.parents[1] / "src"


def list_files(sources: Path) -> list[str]:
    """Return what the distribution holds, relative to `sources`."""
    package = sources / "anabatic_sim"
    files = [path.relative_to(package) for path in sorted(package.rglob("*")) if path.suffix in SUFFIXES]
    own = [path.as_posix() for path in files if path.parts[0] not in (*LEFT_OUT, "prebuilt")]
    return [*(f"anabatic_sim/{name}" for name in own), *(f"anabatic/{name}" for name in SHARED)]


def read_version(sources: Path) -> str:
    """Return the version that the package itself names."""
    text = (sources / "anabatic" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.*)"$', text, re.M)[1]  # type: ignore[index]


def make_torch_range(sources: Path) -> str:
    """Return the range of torch versions that have a torch_npu: pip would choose a newer one, which has none."""
    text = (sources / "anabatic_sim" / "libraries" / "torch_npu_wheel.py").read_text(encoding="utf-8")
    table = ast.literal_eval(re.search(r"^CANN_RELEASES = (\{.*?\})", text, re.M | re.S)[1])  # type: ignore[index]
    minors = [int(version.split(".")[1]) for version in table]
    return f">=2.7.1,<2.{max(minors) + 1}"
