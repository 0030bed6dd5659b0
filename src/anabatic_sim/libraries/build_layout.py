"""The libraries of the simulator, the programs of its machine, and where a finished build has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabatic.core.paths import get_cache_root
from anabatic_sim.libraries import prebuilt_libraries
from anabatic_sim.libraries.torch_npu_wheel import (
    TorchInstallation,
    TorchNpuWheel,
)

CSRC = prebuilt_libraries.CSRC


@dataclass(frozen=True)
class NativeLibrary:
    """A folder of csrc/ is one library."""

    name: str
    folder: str
    linked_libraries: tuple[str, ...] = ()
    uses_torch: bool = False


LIBRARIES = (
    NativeLibrary("ascendcl", "runtime"),
    NativeLibrary("acl_op_compiler", "compiler", ("ascendcl",)),
    NativeLibrary("ascend_hal", "hal", ("ascendcl",)),
    NativeLibrary("hccl", "hccl", ("ascendcl",)),
    NativeLibrary("mspti", "profiler"),
    NativeLibrary("anabatic_sim_ops", "ops", ("ascendcl", "hccl"), uses_torch=True),
    NativeLibrary("opapi", "opapi", ("ascendcl", "anabatic_sim_ops"), uses_torch=True),
)
EMPTY_LIBRARIES = ("graph", "acl_tdt_channel", "ascend_protobuf")
"""Named by torch_npu, nothing of them is used, or what is used is in another library of ours."""
LIBRARY_ALIASES = {"hcomm": "hccl", "msprofiler": "ascendcl", "ms_tools_ext": "ascendcl"}
"""Libraries that torch_npu opens under their own name, for functions that ours has under another."""
STUB_LIBRARY = "ge_runner"
"""Holds what `generate_stub_source` writes."""
ATB_LIBRARY = "atb"
"""The acceleration library. Ours holds stubs: with them torch_npu defines its operators of ATB, whose kernels the
simulator then replaces."""
GRAPH_LIBRARY = "fmk_parser"
"""CANN's graph engine. Ours raises by name: importing torchair works, graphs do not."""
SIMULATED_COMMANDS = {"npu-smi": "anabatic_sim.fake_npu_smi", "msprof": "anabatic_sim.profiling.fake_msprof"}
"""Programs of the simulated machine: name -> module."""
LAUNCHER_COMMANDS = {"torchrun": "anabatic.launch.local.simulated_torchrun"}
"""Programs of the environment with a faster start on a simulated machine: name -> module."""


@dataclass(frozen=True)
class SimulatorBuild:
    """A finished build."""

    torch: TorchInstallation
    wheel: TorchNpuWheel
    root: Path

    @property
    def is_complete(self) -> bool:
        """True when all of it is there: renamed into place, and nothing was removed since."""
        names = [*(library.name for library in LIBRARIES), *EMPTY_LIBRARIES, *LIBRARY_ALIASES]
        names += [STUB_LIBRARY, ATB_LIBRARY, GRAPH_LIBRARY]
        files = [
            *(self.library_folder / f"lib{name}.so" for name in names),
            *(self.program_folder / name for name in SIMULATED_COMMANDS),
            *(self.launcher_folder / name for name in LAUNCHER_COMMANDS),
        ]
        return self.cann_folder.is_dir() and all(file.is_file() for file in files)

    @property
    def library_folder(self) -> Path:
        """What continues LD_LIBRARY_PATH."""
        return self.root / "lib"

    @property
    def program_folder(self) -> Path:
        """What continues PATH."""
        return self.root / "bin"

    @property
    def launcher_folder(self) -> Path:
        """What stands before it in PATH where the whole of `anabatic` is installed."""
        return self.root / "launchers"

    @property
    def cann_folder(self) -> Path:
        """What ASCEND_HOME_PATH names."""
        return self.root / "cann"

    @property
    def entry_point_folder(self) -> Path:
        """What tells torch to load cann_python/anabatic_sim_torch.py: part of PYTHONPATH."""
        return self.root / "python"


def simulator_folder() -> Path:
    """Everything of the simulator outside the package: wheels, builds, lock."""
    return get_cache_root() / "sim"


def list_sources(library: NativeLibrary) -> list[Path]:
    """Return the C++ files of a library."""
    return sorted((CSRC / library.folder).glob("*.cpp"))
