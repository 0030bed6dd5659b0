"""Atomic writes of files and folders, the layout of a run folder, and suggestions for a mistyped run or model."""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO

from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.core.formatting import format_size

OTHER_OUT_HINT = "choose a folder you own with --out DIR"


class RunFolder:
    """Paths inside `runs/<name>/`: configuration, metrics, events, checkpoints, models, report."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.events = self.root / "events.jsonl"
        self.summary = self.root / "summary.json"
        self.report = self.root / "report.html"
        self.best_model = self.root / "best_model"
        self.final_model = self.root / "final_model"

    def log_path(self, rank: int) -> Path:
        """Return the log file of one rank."""
        return self.root / f"rank-{rank}.log"

    def checkpoint_path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` optimizer steps."""
        return self.root / f"checkpoint-{step}"

    def create_folder(self, remedy: str = OTHER_OUT_HINT) -> None:
        """Create the folder and check that it is writable.

        Args:
            remedy: how the user chooses another folder.

        Raises:
            Failure: the folder cannot be created or written.
        """
        self.require_no_file()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-test-{uuid.uuid4().hex}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise make_write_error(self.root, error, remedy) from error

    def require_no_file(self) -> None:
        """Check that the path of the folder is not a file.

        Raises:
            ConfigError: it is a file.
        """
        if self.root.is_file():
            raise ConfigError(f"out is {self.root}, which is a file", "choose a folder with --out")


def require_place(folder: Path, path: Path | None = None) -> None:
    """Check that a folder, which need not exist yet, can be written; the check leaves no files behind.

    Args:
        path: what is to be written in it, for the message; default: the folder itself.

    Raises:
        Failure: the folder is not writable.
    """
    parent = folder
    while not os.path.lexists(parent) and parent != parent.parent:
        parent = parent.parent
    probe = parent / f".write-test-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise make_write_error(path or folder, error) from error


def find_os_error(error: Exception) -> OSError | None:
    """Return the `OSError` that `error` is or mentions: Rust libraries (safetensors) only print the error number."""
    if isinstance(error, OSError):
        return error
    # `Os { code: 28, ...` is the format of safetensors 0.5.
    match = re.search(r"(?:\(os error |Os \{ code: )(\d+)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


@contextmanager
def lock_folder(root: Path, owner: str, remedy: str = "choose --out DIR") -> Iterator[None]:
    """Lock a folder for one writer; the system releases the lock when the process ends.

    Args:
        remedy: how the user chooses another folder.

    Raises:
        Failure: another process holds the lock, or the folder cannot be written.
    """
    try:
        file = open(root / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed by the with below
    except OSError as error:
        raise make_write_error(root, error, remedy) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Failure(f"another {owner} works in {root}", f"wait for it, or {remedy}") from error
        yield


def make_write_error(path: Path, error: OSError, remedy: str = OTHER_OUT_HINT) -> Failure:
    """Return the error for a failed write, with the numbers the user needs.

    Args:
        path: the file or folder that was written.
        error: the error of the system.
        remedy: how the user chooses another path.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(_find_existing_parent(path)).free
        return Failure(
            f"no space left while writing {path}: {format_size(free)} free",
            "free some space or choose another disk; everything saved before is still whole",
        )
    if error.errno == errno.EFBIG:
        return Failure(f"cannot write {path}: a file may not grow that large", "raise the limit: `ulimit -f unlimited`")
    return Failure(f"cannot write {path}: {error.strerror or error}", f"{remedy}, or change its permissions")


def _find_existing_parent(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def require_space(path: Path, num_bytes: float, remedy: str = OTHER_OUT_HINT) -> None:
    """Check that the disk of `path` has `num_bytes` free before anything is written.

    Raises:
        Failure: it has less.
    """
    free = shutil.disk_usage(_find_existing_parent(path.resolve())).free
    if free < num_bytes:
        raise Failure(
            f"{path} needs {format_size(num_bytes)}, but {format_size(free)} are free", f"free some space, or {remedy}"
        )


def fsync_folder(path: Path) -> None:
    """Make renames inside `path` durable (POSIX: a rename is durable once its directory is synced)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes, remedy: str = OTHER_OUT_HINT, is_synced: bool = True) -> None:
    """Write a file under a temporary name, sync it and rename it over `path`.

    Args:
        path: the file.
        content: the whole content; text is encoded as UTF-8.
        remedy: how the user chooses another path.
        is_synced: as of `open_atomic_file`.

    Raises:
        Failure: the disk is full, the folder refuses writes, or `path` is a folder, a device or a pipe; an older
            `path` is untouched.
    """
    with open_atomic_file(path, remedy, is_synced) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def open_atomic_file(path: Path, remedy: str = OTHER_OUT_HINT, is_synced: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file under a temporary name; when the block succeeds, sync it and rename it to `path`.

    When the block raises, the temporary file is removed and an older `path` is untouched.

    Args:
        path: the file.
        remedy: how the user chooses another path.
        is_synced: false: not on the disk yet, for entries of a cache that whoever reads them checks.

    Raises:
        Failure: the disk is full, the folder refuses writes, or `path` is a folder, a device or a pipe.
    """
    path = _require_regular_file(path, remedy)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if is_synced:
            fsync_folder(path.parent)
    except OSError as error:
        raise make_write_error(path, error, remedy) from error
    finally:
        with suppress(OSError):  # if nothing could be written, there is nothing to remove
            temporary.unlink()


def resolve_output_file(out: str, name: str) -> Path:
    """Return the output file: `out` if it has the suffix of `name`, else `name` in the folder `out`.

    The folder is created.

    Raises:
        ConfigError: `out` is a file of another format.
        Failure: the folder cannot be created.
    """
    path, suffix = Path(out).expanduser(), Path(name).suffix
    if path.suffix != suffix:
        if path.is_file() or path.suffix in (".csv", ".json", ".jsonl", ".html", ".txt", ".parquet"):
            raise ConfigError(f"out is {out}", f"give a file NAME{suffix} or a folder")
        path = path / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_write_error(path, error) from error
    return path


def _require_regular_file(path: Path, remedy: str) -> Path:
    """Return the target of `path`, links resolved: a rename would replace a device by a file."""
    target = path.resolve()
    # A link of the system, such as /dev/stdout or /proc/self/fd/1, names an open file and must not be replaced.
    is_system_link = path.is_symlink() and path.parent.resolve().parts[:2] in (("/", "dev"), ("/", "proc"))
    if is_system_link or (target.exists() and not target.is_file()):
        raise Failure(f"cannot write {path}: it is no regular file", remedy)
    return target


@contextmanager
def open_atomic_folder(path: Path, remedy: str = OTHER_OUT_HINT) -> Iterator[Path]:
    """Yield a temporary folder next to `path`; when the block succeeds, rename it to `path`.

    Every file is synced before the rename. When the block raises, the temporary folder is removed and an older
    `path` is untouched.

    Args:
        path: the folder.
        remedy: how the user chooses another path.

    Raises:
        Failure: the disk is full or the folder refuses writes.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        replace_folder(temporary, path)
    except Exception as error:
        cause = find_os_error(error)
        if cause is None:
            raise
        raise make_write_error(path, cause, remedy) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Rename folder `new` to `path`; an existing `path` is moved aside first and removed last."""
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex}.old")
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    fsync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def get_cache_root() -> Path:
    """Return `$ANABATIC_CACHE`, else `$XDG_CACHE_HOME/anabatic`, else `~/.cache/anabatic`."""
    if override := os.environ.get("ANABATIC_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "anabatic"


def get_state_root() -> Path:
    """Return `$XDG_STATE_HOME/anabatic`, else `~/.local/state/anabatic`: what belongs to a user, never to a cache.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "anabatic"


HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Id of a model on a hub, `OWNER/NAME`."""
LOCAL_FOLDERS = ("runs", "output", "outputs", "saves", "checkpoints", "exported")
"""First path components that always mean a local folder."""
_MARKER_FILES = ("config.json", "adapter_config.json", "best_model", "final_model", "metrics.jsonl", "pipeline.json")
_MAX_FOLDERS = 2000
"""Maximum folders to inspect."""
_MIN_SIMILARITY = 0.85
"""Minimum similarity to a local folder at which a name of the form of a hub id counts as a typo."""


def is_hub_id(name: str | Path, hub: str | None = None) -> bool:
    """Return whether `name` is `OWNER/NAME` and not a local path; never if it starts with `.`, `/` or `~`.

    A name whose first component is a local folder, or that is similar to the name of a run, is not a hub id unless
    `hub` is given: a typo must not be sent to a hub.
    """
    if HUB_ID_PATTERN.fullmatch(str(name)) is None or os.path.lexists(name):
        return False
    if str(name).partition("/")[0] in LOCAL_FOLDERS:
        return False
    return hub is not None or not is_local_name(str(name))


def is_local_name(name: str) -> bool:
    """Return whether `OWNER/NAME` means a missing local folder: `OWNER` exists, or a run has a similar name."""
    owner = name.partition("/")[0]
    return (
        owner in LOCAL_FOLDERS
        or os.path.isdir(owner)
        or bool(difflib.get_close_matches(name, list(iter_run_folders(name)), 1, _MIN_SIMILARITY))
    )


def find_nearest_folders(name: str) -> list[str]:
    """Return up to three run and model folders with the most similar names, the nearest first."""
    folders = list(iter_run_folders(name))
    basename = name.rstrip("/").rpartition("/")[2]
    exact_matches = [folder for folder in folders if folder.rpartition("/")[2] == basename]
    close_matches = difflib.get_close_matches(name, folders, 3, 0.6)
    folder_by_basename = {folder.rpartition("/")[2]: folder for folder in reversed(folders)}
    close_matches += [
        folder_by_basename[folder] for folder in difflib.get_close_matches(basename, folder_by_basename, 3, 0.75)
    ]
    return list(dict.fromkeys([*exact_matches, *close_matches]))[:3]


def suggest_folder(name: str) -> str:
    """Return ` Did you mean "runs/mine"?`, or an empty string."""
    suggestions = [f'"{folder}"' for folder in find_nearest_folders(name)]
    return f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""


def make_missing_model_error(name: str) -> DataError:
    """Return the error for a missing model folder, with suggestions."""
    others = [folder for folder in iter_run_folders(name) if folder not in find_nearest_folders(name)]
    hint = (
        f"runs and models here: {', '.join(others[:6])}"
        if others
        else "give a Hugging Face folder or a finished run folder"
    )
    if is_hub_id(name, "huggingface"):
        hint += f"; a hub is asked for {name} from another folder, or with --hub in a training"
    return DataError(
        f"model folder {os.path.expanduser(name)} does not exist.{suggest_folder(name)}".removesuffix("."), hint
    )


def iter_run_folders(name: str = "") -> Iterator[str]:
    """Yield the folders with a run or a model: here, in `LOCAL_FOLDERS`, and in the parent folder of `name`."""
    parent = os.path.dirname(os.path.expanduser(name.rstrip("/")))
    roots = [".", *LOCAL_FOLDERS, *([parent] if parent and parent not in LOCAL_FOLDERS else [])]
    for folder in islice(_iter_folders(roots), _MAX_FOLDERS):
        if any((folder / marker).exists() for marker in _MARKER_FILES):
            yield str(folder)


def _iter_folders(roots: list[str]) -> Iterator[Path]:
    """Yield the subfolders of `roots`; for roots of `LOCAL_FOLDERS` also one level below."""
    seen: set[Path] = set()
    for root in roots:
        for folder in _list_subfolders(Path(root)):
            for path in (folder, *(_list_subfolders(folder) if root in LOCAL_FOLDERS else ())):
                if path not in seen:
                    seen.add(path)
                    yield path


def _list_subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return []
    with os.scandir(folder) as entries:
        return sorted(
            Path(folder, entry.name) for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )
