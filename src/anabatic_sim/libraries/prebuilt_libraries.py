"""Compiled libraries that come with a wheel of `anabatic-sim` (scripts/build_sim_wheels.py), one folder for each torch.

A folder is used only where everything that decides about the result is the same; otherwise the simulator is compiled.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from anabatic_sim.libraries.torch_npu_wheel import TorchInstallation

PREBUILT = Path(__file__).parents[1] / "prebuilt"
CSRC = Path(__file__).parents[1] / "csrc"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PrebuiltLibraries:
    """Origin and target of a folder of compiled libraries."""

    torch: str
    """`2.13.0`: CPU and CUDA builds of one version have the same ABI, which torch_npu relies on, too."""
    torch_npu: str
    """The wheel whose missing symbols have stubs; this one is fetched."""
    machine: str
    uses_old_abi: bool
    sources: str
    """`digest_sources` of the C++."""
    modules: tuple[str, ...] = ()
    """Files of the torch_npu wheel that `import torch` reads: only these are compiled to bytecode ahead."""

    @property
    def folder_name(self) -> str:
        """Below `prebuilt/`."""
        return f"{self.torch}-{self.machine}"

    def write(self, root: Path) -> None:
        """Write the manifest into the folder of the libraries."""
        (root / _MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class PrebuiltChoice:
    """The libraries for a torch, or why there are none."""

    libraries: PrebuiltLibraries | None = None
    folder: Path = PREBUILT
    reason: str = ""
    """Empty where this package has no compiled libraries at all, as anabatic itself."""


def digest_sources() -> str:
    """Return a digest of the C++ that is compiled."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*.*")):
        digest.update(path.relative_to(CSRC).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def choose_prebuilt(torch: TorchInstallation, root: Path = PREBUILT) -> PrebuiltChoice:
    """Return the libraries that fit the installed torch, this machine and the sources of this package."""
    manifests = sorted(root.glob(f"*/{_MANIFEST}"))
    if not manifests:
        return PrebuiltChoice()
    found = [(path.parent, _read_manifest(path)) for path in manifests]
    fitting = [(folder, row) for folder, row in found if row.torch == torch.base_version]
    if not fitting:
        versions = ", ".join(row.torch for _, row in found)
        return PrebuiltChoice(reason=f"this package has compiled libraries for torch {versions}, not {torch.version}")
    folder, row = fitting[0]
    checks = {
        f"they are for {row.machine}, this is {platform.machine()}": row.machine == platform.machine(),
        "this torch has another C++ ABI": row.uses_old_abi == torch.uses_old_abi,
        "the C++ files of this package were changed since": row.sources == digest_sources(),
    }
    reason = next((text for text, good in checks.items() if not good), "")
    if reason:
        return PrebuiltChoice(reason=f"the compiled libraries for torch {row.torch} are not used: {reason}")
    return PrebuiltChoice(row, folder)


def _read_manifest(path: Path) -> PrebuiltLibraries:
    values = json.loads(path.read_text(encoding="utf-8"))
    return PrebuiltLibraries(**{**values, "modules": tuple(values["modules"])})
