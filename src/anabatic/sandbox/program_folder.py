"""A program's folder on a disk, where no file system of its own limits it: what is written is counted."""

from __future__ import annotations

import os
import tempfile

from anabatic.sandbox.isolation import namespaces
from anabatic.sandbox.limits import MIB

_FILES_PER_MIB = 64
"""As in `namespaces.mount_program_folder`."""


class ProgramFolder:
    """A new, empty folder.

    Args:
        as_nobody: the program runs as `namespaces.SANDBOX_UID`, who owns it.
    """

    def __init__(self, as_nobody: bool) -> None:
        self.path = tempfile.mkdtemp(prefix="anabatic-")
        tempfile.tempdir = None  # each program finds out for itself: it may not write where this process may
        self._as_nobody, self._was_hidden = as_nobody, False
        if as_nobody:
            os.chown(self.path, namespaces.SANDBOX_UID, namespaces.SANDBOX_UID)

    def is_exceeded(self, pid: int, file_mib: int) -> bool:
        """Return whether a program has written more, in all, than `file_mib`, or made more files than fit there.

        What it has removed counts: a file that is open, or on its way through a socket, is still on the disk.

        Args:
            pid: the process of the program; it has no others.
            file_mib: the limit.
        """
        try:
            written = read_written_bytes(pid, self._as_nobody)
        except PermissionError:  # it is about to end, or has hidden itself (PR_SET_DUMPABLE)
            self._was_hidden, was_hidden = True, self._was_hidden
            return was_hidden and _has_memory(pid)
        return written > file_mib * MIB or self._has_more_files(file_mib * _FILES_PER_MIB)

    def remove_tree(self) -> None:
        """Remove it, whatever the program has made of it, trees of any depth included.

        Raises:
            OSError: the disk fails.
        """
        while entries := _list_entries(self.path):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                for inner in _list_entries(entry.path):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # a folder that may not be written cannot move
                        os.rename(inner.path, os.path.join(self.path, os.urandom(16).hex()))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(self.path)

    def _has_more_files(self, limit: int) -> bool:
        waiting, count = [self.path], 0
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        count += 1
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        if count > limit:
                            return True
            except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
                continue
            except OSError:  # hidden: it may not be read, or its path is too long
                return True
        return False


def _list_entries(folder: str) -> list[os.DirEntry[str]]:
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        return [*entries]


def _has_memory(pid: int) -> bool:
    """False for a process at its end, which a busy machine keeps for a while without memory (proc_pid_statm(5))."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return file.read(2) != "0 "
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_written_bytes(pid: int, as_nobody: bool) -> int:
    """Return what a process has passed to write(2) and its like (proc_pid_io(5), wchar); 0: it has ended.

    Args:
        pid: the process.
        as_nobody: ask as `namespaces.SANDBOX_UID`: a root without CAP_SYS_PTRACE, as in a container, sees no other's.

    Raises:
        PermissionError: this process is hidden.
    """
    try:
        if as_nobody:
            os.setegid(namespaces.SANDBOX_UID)
            os.seteuid(namespaces.SANDBOX_UID)
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return int(file.read().split("wchar:")[1].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    finally:
        if as_nobody:
            os.seteuid(0)
            os.setegid(0)
