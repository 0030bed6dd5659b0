"""The kernel's calls that Python has no name for, through the C library; every failure is an `OSError`.

Numbers from the kernel's headers: linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h, linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)
# The same numbers on both machines: calls since Linux 5.1.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _check_result(_LIBC.unshare(flags), "unshare")


def enter_namespace(handle: int, kind: int) -> None:
    """Enter the namespace that an open file of /proc/self/ns stands for."""
    _check_result(_LIBC.setns(handle, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or change a mount."""
    words = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check_result(_LIBC.mount(*words), f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount away, at once; who still uses it keeps it."""
    _check_result(_LIBC.umount2(target.encode(), _DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root, and put the old one at `old`, a folder in it."""
    _check_result(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()), "pivot_root")


def die_with_parent() -> None:
    """Be killed when the parent ends; gone after a change of user or of privileges."""
    _check_result(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def forbid_inspection() -> None:
    """No process of the same user may read or stop this one any more (prctl(2), PR_SET_DUMPABLE)."""
    _check_result(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def allow_inspection() -> None:
    """Undo what a change of user did: /proc shows this process to others of its user again."""
    _check_result(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def forbid_new_privileges() -> None:
    """No program that is started from here gains anything: set-user-id bits do nothing."""
    _check_result(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Give up every capability, for good (capabilities(7))."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # the kernel has no more of them, or we have none to drop
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check_result(_LIBC.syscall(_CAPSET[os.uname().machine], header, bytes(24)), "capset")


def install_filter(program: bytes) -> None:
    """Let a BPF program judge every call from now on (seccomp(2), SECCOMP_MODE_FILTER)."""
    code = ctypes.create_string_buffer(program, len(program))
    length, address = len(program) // 8, ctypes.addressof(code)
    _check_result(_LIBC.prctl(22, 2, struct.pack("=H6xQ", length, address), 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0: this kernel has none, or it is switched off."""
    return max(0, int(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock_create(attributes: bytes) -> int:
    """Return a new set of rules, an open file."""
    return _check_result(_LIBC.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")


def landlock_allow(rules: int, access: int, folder: int) -> None:
    """Allow `access` below an open folder."""
    _check_result(_LIBC.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, folder), 0), "landlock")


def landlock_restrict(rules: int) -> None:
    """Obey the rules from now on, with everything that is started from here."""
    _check_result(_LIBC.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
