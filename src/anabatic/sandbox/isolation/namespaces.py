"""A machine of its own for programs: no network, no processes but theirs, a file system of read-only libraries.

user_namespaces(7), mount_namespaces(7), pid_namespaces(7). The process that enters keeps its rights over the new
namespaces and none over the old ones; each program then gets a process namespace, and a folder in memory, of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from anabatic.sandbox.isolation import landlock, syscalls

SANDBOX_UID = 65534
"""The user that programs run as inside, `nobody`."""
PROGRAM_FOLDER = "/box"
"""A program's folder; it is also /tmp and /dev/shm."""
_OWN_PROCESSES = 3
"""The one that was started, the zygote, and the first one of a program's namespace."""
_NEW_ROOT = "/proc"
"""Mount point of the new root: a folder that is everywhere and not needed later."""
_KEPT_MOUNT_FLAGS = {
    "ro": syscalls.READ_ONLY,
    "nosuid": syscalls.NO_SUID,
    "nodev": syscalls.NO_DEV,
    "noexec": syscalls.NO_EXEC,
}
_PER_USER_SINCE = (5, 14)
"""Linux 5.14 counts the processes of a user in each user namespace (kernel commit 21d1c5e386bc)."""


def enter_namespaces(readable: Sequence[str]) -> tuple[int, int | None]:
    """Put this process into new namespaces with a root of `readable`, read-only.

    Returns:
        What `fork_into_namespace` needs; and how many processes of ours RLIMIT_NPROC counts beside a program's, None
        where it would count others' too, or no one's.

    Raises:
        OSError: the kernel does not let this user do so.
    """
    devices, links, root = landlock.list_devices(), landlock.list_library_links(), os.getuid() == 0
    two_users = _new_user_namespace()
    syscalls.unshare(syscalls.NEW_NS | syscalls.NEW_NET | syscalls.NEW_IPC | syscalls.NEW_UTS)
    own_namespace = become_namespace_leader()
    mounts = os.open("/proc/self/mountinfo", os.O_RDONLY)
    syscalls.mount("none", "/", "", syscalls.RECURSIVE | syscalls.PRIVATE)
    syscalls.mount("tmpfs", _NEW_ROOT, "tmpfs", syscalls.NO_SUID | syscalls.NO_DEV, "size=1m,mode=755")
    for path in (*readable, *devices):
        _bind_mount(path)
    for path, target in links.items():
        if not os.path.lexists(_NEW_ROOT + path):
            os.makedirs(os.path.dirname(_NEW_ROOT + path), exist_ok=True)
            os.symlink(target, _NEW_ROOT + path)
    for name in (".old", PROGRAM_FOLDER[1:]):
        os.mkdir(os.path.join(_NEW_ROOT, name))
    os.symlink(PROGRAM_FOLDER, f"{_NEW_ROOT}/tmp")
    os.makedirs(f"{_NEW_ROOT}/dev", exist_ok=True)
    os.symlink(PROGRAM_FOLDER, f"{_NEW_ROOT}/dev/shm")
    _make_read_only(mounts, devices)
    os.close(mounts)
    syscalls.pivot_root(_NEW_ROOT, f"{_NEW_ROOT}/.old")
    os.chdir("/")
    syscalls.unmount("/.old")
    os.rmdir("/.old")
    syscalls.mount(
        "none", "/", "", syscalls.REMOUNT | syscalls.BIND | syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEV
    )
    if two_users:
        return own_namespace, 0
    return own_namespace, None if root or not counts_processes() else _OWN_PROCESSES


def counts_processes() -> bool:
    """Return whether the kernel counts a program's processes apart from those of the user who started us."""
    release = os.uname().release.replace("-", ".").split(".")
    return tuple(int(part) for part in release[:2]) >= _PER_USER_SINCE


def become_namespace_leader() -> int:
    """Become the first process of a process namespace; return its open file.

    The process that was started only waits from here on, and ends as this one does. A process may leave for a
    namespace below its own (`fork_into_namespace`), and back only into one that belongs to its own users: hence this
    one.
    """
    syscalls.unshare(syscalls.NEW_PID)
    leader = os.fork()
    if leader:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) & 0xFF)
    syscalls.die_with_parent()
    return os.open("/proc/self/ns/pid", os.O_RDONLY)


def fork_into_namespace(own_namespace: int) -> int:
    """Fork; the child leads a new process namespace: whatever it starts ends with it."""
    syscalls.enter_namespace(own_namespace, syscalls.NEW_PID)
    syscalls.unshare(syscalls.NEW_PID)
    return os.fork()


def mount_program_folder(mib: int) -> None:
    """Give this process a folder that nobody else sees, in memory, and that ends with it."""
    syscalls.unshare(syscalls.NEW_NS)
    options = f"size={mib}m,nr_inodes={mib * 64},mode=700,uid={SANDBOX_UID},gid={SANDBOX_UID}"
    syscalls.mount("tmpfs", PROGRAM_FOLDER, "tmpfs", syscalls.NO_SUID | syscalls.NO_DEV, options)
    os.chdir(PROGRAM_FOLDER)


def become_nobody() -> None:
    """Become `SANDBOX_UID`, who owns nothing but the program's folder."""
    if os.getuid() != SANDBOX_UID:
        os.setgroups([])
        os.setresgid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)
        os.setresuid(SANDBOX_UID, SANDBOX_UID, SANDBOX_UID)


def _new_user_namespace() -> bool:
    """Enter a user namespace with `SANDBOX_UID`; as root, who may, another real user than root stands behind it: True.

    The kernel puts no limit on the processes of the real root (kernel/fork.c, `copy_process`).
    """
    user, group, root = os.getuid(), os.getgid(), os.getuid() == 0
    ready, go = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(ready[0], 1)
        done = root and _write_id_maps(
            os.getppid(), f"0 0 1\n{SANDBOX_UID} {SANDBOX_UID} 1", f"0 0 1\n{SANDBOX_UID} {SANDBOX_UID} 1"
        )
        os.write(go[1], b"1" if done else b"0")
        os._exit(0)
    try:
        syscalls.unshare(syscalls.NEW_USER)
    finally:
        os.write(ready[1], b".")
        two = os.read(go[0], 1) == b"1"
        os.waitpid(helper, 0)
        for handle in (*ready, *go):
            os.close(handle)
    if two:
        return True
    with open("/proc/self/setgroups", "w", encoding="ascii") as file:
        file.write("deny")
    if not _write_id_maps(os.getpid(), f"{SANDBOX_UID} {user} 1", f"{SANDBOX_UID} {group} 1"):
        raise OSError("the users of a namespace cannot be set")
    return False


def _write_id_maps(process: int, users: str, groups: str) -> bool:
    try:
        for name, text in (("uid_map", users), ("gid_map", groups)):
            with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError:
        return False
    return True


def _bind_mount(path: str) -> None:
    target = _NEW_ROOT + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(path, target, "", syscalls.BIND | syscalls.RECURSIVE)


def _make_read_only(mounts: int, devices: Sequence[str]) -> None:
    """Make every mount below the new root read-only, devices left out; what the system forbids there stays so."""
    text = b""
    while piece := os.pread(mounts, 1 << 16, len(text)):
        text += piece
    for line in text.decode().splitlines():
        # 36 35 98:0 /a/folder /mounted/at rw,nosuid shared:1 - type source options   (proc(5))
        path, options = line.split()[4:6]
        path = path.encode().decode("unicode_escape")
        if path.startswith(_NEW_ROOT + "/") and path[len(_NEW_ROOT) :] not in devices:
            kept = sum(flag for name, flag in _KEPT_MOUNT_FLAGS.items() if name in options.split(","))
            syscalls.mount(
                "none", path, "", syscalls.REMOUNT | syscalls.BIND | syscalls.READ_ONLY | syscalls.NO_SUID | kept
            )
