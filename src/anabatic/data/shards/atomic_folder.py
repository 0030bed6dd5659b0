"""A folder of the cache that appears under its name when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anabatic.core import log
from anabatic.core.paths import fsync_folder, make_write_error

CACHE_HINT = "choose another folder with --data.cache DIR or ANABATIC_CACHE"
_STALE_SECONDS = 24 * 3600


@contextmanager
def atomic_folder(path: Path, advance: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield a temporary folder that takes `path`'s place, unless another process was there first.

    `advance` is called after each file that was synced.

    Raises:
        Failure: the cache cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        _remove_stale_builds(path)
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
            if advance is not None:
                advance()
        _rename_unless_exists(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise make_write_error(path, error, CACHE_HINT) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_unless_exists(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        log.debug(f"{path}: built by another process meanwhile")


def _remove_stale_builds(path: Path) -> None:
    """Remove what builds of the same key left behind when they were killed more than a day ago."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
