"""A machine of its own for programs: no network, no processes but theirs, a file system of read-only libraries.

user_namespaces(7), mount_namespaces(7), pid_namespaces(7). The process that enters keeps its rights over the new
namespaces and none over the old ones; each program then gets a process namespace, and a folder in memory, of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from anabatic.sandbox import places, system

USER = 65534
"""The user that programs run as inside, `nobody`."""
BOX = "/box"
"""A program's folder; it is also /tmp and /dev/shm."""
_OWN_PROCESSES = 3
"""The one that was started, the keeper, and the first one of a program's namespace."""
_ROOT = "/proc"
"""Where the new root is mounted before it becomes one: a folder that is everywhere and not needed later."""
_KEPT = {"ro": system.READ_ONLY, "nosuid": system.NO_SUID, "nodev": system.NO_DEV, "noexec": system.NO_EXEC}
_PER_USER_SINCE = (5, 14)
"""Linux 5.14 counts the processes of a user in each user namespace (kernel commit 21d1c5e386bc)."""


def enter(readable: Sequence[str]) -> tuple[int, int | None]:
    """Put this process into new namespaces with a root of `readable`, read-only.

    Returns:
        What `fork_inside` needs; and how many processes of ours RLIMIT_NPROC counts beside a program's, None where it
        would count others' too, or no one's.

    Raises:
        OSError: the kernel does not let this user do so.
    """
    devices, links, root = places.devices(), places.links(), os.getuid() == 0
    two_users = _new_user_namespace()
    system.unshare(system.NEW_NS | system.NEW_NET | system.NEW_IPC | system.NEW_UTS)
    own = lead_processes()
    mounts = os.open("/proc/self/mountinfo", os.O_RDONLY)
    system.mount("none", "/", "", system.RECURSIVE | system.PRIVATE)
    system.mount("tmpfs", _ROOT, "tmpfs", system.NO_SUID | system.NO_DEV, "size=1m,mode=755")
    for path in (*readable, *devices):
        _show(path)
    for path, target in links.items():
        if not os.path.lexists(_ROOT + path):
            os.makedirs(os.path.dirname(_ROOT + path), exist_ok=True)
            os.symlink(target, _ROOT + path)
    for name in (".old", BOX[1:]):
        os.mkdir(os.path.join(_ROOT, name))
    os.symlink(BOX, f"{_ROOT}/tmp")
    os.makedirs(f"{_ROOT}/dev", exist_ok=True)
    os.symlink(BOX, f"{_ROOT}/dev/shm")
    _make_read_only(mounts, devices)
    os.close(mounts)
    system.pivot_root(_ROOT, f"{_ROOT}/.old")
    os.chdir("/")
    system.unmount("/.old")
    os.rmdir("/.old")
    system.mount("none", "/", "", system.REMOUNT | system.BIND | system.READ_ONLY | system.NO_SUID | system.NO_DEV)
    if two_users:
        return own, 0
    return own, None if root or not counts_processes() else _OWN_PROCESSES


def counts_processes() -> bool:
    """Return whether the kernel counts a program's processes apart from those of the user who started us."""
    release = os.uname().release.replace("-", ".").split(".")
    return tuple(int(part) for part in release[:2]) >= _PER_USER_SINCE


def lead_processes() -> int:
    """Become the first process of a process namespace; return its open file.

    The process that was started only waits from here on, and ends as this one does. A process may leave for a
    namespace below its own (`fork_inside`), and back only into one that belongs to its own users: hence this one.
    """
    system.unshare(system.NEW_PID)
    leader = os.fork()
    if leader:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) & 0xFF)
    system.die_with_parent()
    return os.open("/proc/self/ns/pid", os.O_RDONLY)


def fork_inside(own: int) -> int:
    """Fork; the child leads a new process namespace: whatever it starts ends with it."""
    system.enter_namespace(own, system.NEW_PID)
    system.unshare(system.NEW_PID)
    return os.fork()


def give_folder(mib: int) -> None:
    """Give this process a folder that nobody else sees, in memory, and that ends with it."""
    system.unshare(system.NEW_NS)
    options = f"size={mib}m,nr_inodes={mib * 64},mode=700,uid={USER},gid={USER}"
    system.mount("tmpfs", BOX, "tmpfs", system.NO_SUID | system.NO_DEV, options)
    os.chdir(BOX)


def become_nobody() -> None:
    """Become `USER`, who owns nothing but the program's folder."""
    if os.getuid() != USER:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)


def _new_user_namespace() -> bool:
    """Enter a user namespace with `USER`; as root, who may, another real user than root stands behind it: True.

    The kernel puts no limit on the processes of the real root (kernel/fork.c, `copy_process`).
    """
    user, group, root = os.getuid(), os.getgid(), os.getuid() == 0
    ready, go = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(ready[0], 1)
        done = root and _map(os.getppid(), f"0 0 1\n{USER} {USER} 1", f"0 0 1\n{USER} {USER} 1")
        os.write(go[1], b"1" if done else b"0")
        os._exit(0)
    try:
        system.unshare(system.NEW_USER)
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
    if not _map(os.getpid(), f"{USER} {user} 1", f"{USER} {group} 1"):
        raise OSError("the users of a namespace cannot be set")
    return False


def _map(process: int, users: str, groups: str) -> bool:
    try:
        for name, text in (("uid_map", users), ("gid_map", groups)):
            with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError:
        return False
    return True


def _show(path: str) -> None:
    target = _ROOT + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    system.mount(path, target, "", system.BIND | system.RECURSIVE)


def _make_read_only(mounts: int, devices: Sequence[str]) -> None:
    """Make every mount below the new root read-only, devices left out; what the system forbids there stays so."""
    text = b""
    while piece := os.pread(mounts, 1 << 16, len(text)):
        text += piece
    for line in text.decode().splitlines():
        # 36 35 98:0 /a/folder /mounted/at rw,nosuid shared:1 - type source options   (proc(5))
        path, options = line.split()[4:6]
        path = path.encode().decode("unicode_escape")
        if path.startswith(_ROOT + "/") and path[len(_ROOT) :] not in devices:
            kept = sum(flag for name, flag in _KEPT.items() if name in options.split(","))
            system.mount("none", path, "", system.REMOUNT | system.BIND | system.READ_ONLY | system.NO_SUID | kept)
