"""The parts of a CANN installation beside its libraries: folders, version files, programs."""

from __future__ import annotations

import platform
from pathlib import Path

from anabatic_sim.libraries.build_layout import LAUNCHER_COMMANDS, SIMULATED_COMMANDS
from anabatic_sim.machine_spec import INTERPRETER_VARIABLE, PACKAGE_VARIABLE

_MSPROF = Path("tools/profiler/bin/msprof")
_MSPROF_SCRIPT = Path("tools/profiler/profiler_tool/analysis/msprof/msprof.py")
"""Where a CANN installation has them: torch_npu's profiler looks for the script next to the program."""


def write_programs(root: Path) -> None:
    """Write the programs of the simulated machine, and those of the environment with a faster start."""
    folder, cann = root / "bin", root / "cann"
    folder.mkdir(exist_ok=True)
    (root / "launchers").mkdir()
    for name, module in SIMULATED_COMMANDS.items():
        # No site packages and no PYTHON* variables: it starts fast, whatever COMMAND's environment is.
        run = (
            f"import os, sys; sys.path.insert(0, os.environ['{PACKAGE_VARIABLE}']); from {module} import "
            f"main; sys.exit(main())"
        )
        _write_script(folder / name, f'"${INTERPRETER_VARIABLE}" -S -E -c "{run}"')
        if name == "msprof":
            for path in (_MSPROF, _MSPROF_SCRIPT):
                (cann / path).parent.mkdir(parents=True)
            (folder / name).rename(cann / _MSPROF)
            (folder / name).symlink_to(Path("..") / cann.name / _MSPROF)
            (cann / _MSPROF_SCRIPT).write_text("".join(f"{line}\n" for line in run.split("; ")), encoding="utf-8")
    for name, module in LAUNCHER_COMMANDS.items():
        _write_script(root / "launchers" / name, f'"${INTERPRETER_VARIABLE}" -m {module}')


def _write_script(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def write_cann_folder(root: Path, release: str) -> None:
    """Write the parts of a CANN installation that programs read: folders, version files, libraries to link against."""
    arch = root / f"{platform.machine()}-linux"
    for name in ("runtime", "compiler", "opp", "hccl", "opp_kernel"):
        (root / name).mkdir(parents=True)
        (root / name / "version.info").write_text(f"Version={release}\nversion_dir={release}\n", encoding="utf-8")
    arch.mkdir()
    lines = f"package_name=Ascend-cann-toolkit\nversion={release}\narch={platform.machine()}\nos=linux\npath={root}\n"
    (arch / "ascend_toolkit_install.info").write_text(lines, encoding="utf-8")
    (root / "lib64").symlink_to("../lib")  # extensions are linked with -L$ASCEND_HOME_PATH/lib64 -lascendcl


def write_entry_point(root: Path) -> None:
    """Write the metadata of a package with an entry point of torch, which our own wheel must not contain twice."""
    folder = root / "anabatic_sim_torch-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: anabatic-sim-torch\nVersion: 1\n", encoding="utf-8")
    entry = "[torch.backends]\nanabatic_sim_torch = anabatic_sim_torch:prepare\n"
    (folder / "entry_points.txt").write_text(entry, encoding="utf-8")
