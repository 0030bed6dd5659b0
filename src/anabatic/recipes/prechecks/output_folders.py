"""Where a command writes, looked at before anything heavy is loaded. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table
from anabatic.core.errors import ConfigError
from anabatic.core.paths import RunFolder, require_place

_NEW_OUTPUT_COMMANDS = ("merge", "checkpoint export")
"""Commands that write a folder which must not be there."""
_RUN_FOLDER_COMMANDS = ("chat", "eval", "classify eval")
"""Commands besides the trainings that write into a run folder."""


def require_writable_output(command: str, job: Any, alone: bool) -> None:
    """Make sure that a command can write to its output.

    Args:
        alone: it is no stage of a pipeline, which looks at its own folder and moves aside what an earlier run has left.

    Raises:
        ConfigError: a file is in the place of a folder, or what is there is not to be replaced.
        Failure: the place refuses writes.
    """
    out = getattr(job, "out", None)
    if not out:
        return
    path = Path(out)
    if (
        command_table.get_command(command).is_training
        or command in _RUN_FOLDER_COMMANDS
        or command.startswith("bench ")
    ):
        RunFolder(path).require_no_file()
        if alone:
            require_place(path)
        return
    path = path.expanduser()
    if not alone:
        return
    if command in _NEW_OUTPUT_COMMANDS:
        require_new_output(path)
    if command == "export":
        require_replaceable_output(path, job.overwrite)
    require_place(path.parent, path)


def require_new_output(out: Path) -> None:
    """Refuse to write over what is there.

    Raises:
        ConfigError: it exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", "choose another --out")


def require_replaceable_output(out: Path, overwrite: bool) -> None:
    """Only a model folder is ever replaced: a wrong -o must not cost anybody a run or a home.

    Raises:
        ConfigError: it exists, and is not to be replaced or is none.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConfigError(f"{out} exists already", "choose another -o FOLDER, or add --overwrite")
    if out.is_symlink() or not (out / "config.json").is_file() or any(out.glob("checkpoint-*")):
        raise ConfigError(f"{out} is no folder of a model, and is not replaced", "choose another -o FOLDER")
