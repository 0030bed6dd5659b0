"""A filter of system calls: what a program has no business with is refused with EPERM.

The numbers are the kernel's (asm/unistd_64.h on x86-64, asm-generic/unistd.h on aarch64); the filter is classic BPF as
in seccomp(2) and linux/bpf_common.h.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""linux/audit.h."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_GREATER, _AND = 0x25, 0x54
_NUMBER_OFFSET, _MACHINE_OFFSET, _FIRST_ARGUMENT_OFFSET, _ARGUMENT_BYTES, _HIGH_HALF = 0, 4, 16, 8, 4
"""Offsets in `struct seccomp_data`: the call, the machine, the low half of the first argument."""
_NAMESPACE_FLAGS = 0x7E020080
"""The flags of clone(2) that make namespaces."""
_THREAD_FLAG = 0x10000

# name: (x86-64, aarch64); None where the machine has no such call
_REFUSED_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "process_madvise": (440, 440), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "fsopen": (430, 430), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None),
    "personality": (135, 92), "vhangup": (153, 58), "ioprio_set": (251, 30), "setpriority": (141, 140),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
}  # fmt: skip
_REFUSED_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45), "fallocate": (285, 47),
}  # fmt: skip
"""Refused where no namespace parts the program from other processes, and Landlock alone guards the files: it does not
judge chmod and its like (landlock(7), "current limitations")."""
_CLONE, _CLONE3, _PRLIMIT, _KILL_CALLS = (56, 220), (435, 435), (302, 261), ((62, 129), (234, 131))
_MMAP, _FCNTL, _SETSOCKOPT = (9, 222), (72, 25), (54, 208)
_MAP_SHARED, _MAP_ANONYMOUS = 1, 0x20
"""linux/mman.h; the first bit is set in MAP_SHARED_VALIDATE too, not in MAP_PRIVATE."""
_IOCTL, _FILE_MASK, _TERMINAL = (16, 29), 0xFF00, 0x5400
"""The letter of an ioctl(2), `T` of those that any file has (asm-generic/ioctls.h): FS_IOC_RESVSP of linux/falloc.h
takes room on the disk."""
_SET_PIPE_SIZE = 1031
"""F_SETPIPE_SZ of linux/fcntl.h."""
_SOCKET_LEVEL, _BUFFER_OPTIONS = 1, (7, 32)
"""SOL_SOCKET, and SO_SNDBUF and SO_SNDBUFFORCE, of asm-generic/socket.h."""


def machine_column() -> int | None:
    """Return the column of the tables for this machine; None: it is neither x86-64 nor aarch64."""
    return {"x86_64": 0, "aarch64": 1}.get(os.uname().machine)


def build_filter(alone: int | None = None) -> bytes:
    """Return the filter.

    Args:
        alone: number of the process that will be judged, when it may neither start processes nor send signals to
            any other; None: namespaces keep it from others.
    """
    column = machine_column()
    assert column is not None  # the zygote has asked
    code = [
        _encode_instruction(_LOAD, _MACHINE_OFFSET),
        _encode_instruction(_EQUAL, _AUDIT_ARCH[os.uname().machine], 1, 0),
        _encode_instruction(_RETURN, _KILL),
    ]
    code += [_encode_instruction(_LOAD, _NUMBER_OFFSET)]
    if column == 0:
        code += [_encode_instruction(_AT_LEAST, _X32, 0, 1), _encode_instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    tables = [_REFUSED_CALLS] if alone is None else [_REFUSED_CALLS, _REFUSED_WITHOUT_NAMESPACES]
    code += _refuse_calls(row[column] for table in tables for row in table.values())
    code += _match_call(
        _CLONE3[column], [_encode_instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    )  # its flags cannot be read: use clone
    code += _match_call(_PRLIMIT[column], _refuse_unless_first_is(0))
    code += _match_call(_MMAP[column], _refuse_shared_memory(shared_files=alone is None))
    code += _match_call(_FCNTL[column], _refuse_value(1, _SET_PIPE_SIZE))
    code += _match_call(_SETSOCKOPT[column], _refuse_large_buffers())
    clone = [
        _load_argument(0),
        _encode_instruction(_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        _encode_instruction(_RETURN, _ERRNO | errno.EPERM),
    ]
    if alone is not None:
        code += _match_call(_IOCTL[column], _refuse_ioctls_of_files())
        clone += [
            _encode_instruction(_ANY_BIT, _THREAD_FLAG, 1, 0),
            _encode_instruction(_RETURN, _ERRNO | errno.EAGAIN),
        ]
        for call in _KILL_CALLS:
            code += _match_call(call[column], _refuse_unless_first_is(alone))
    code += _match_call(_CLONE[column], [*clone, _encode_instruction(_RETURN, _ALLOW)])
    return b"".join([*code, _encode_instruction(_RETURN, _ALLOW)])


def _encode_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse_calls(numbers: Iterable[int | None]) -> list[bytes]:
    return [
        part
        for number in numbers
        if number is not None
        for part in (_encode_instruction(_EQUAL, number, 0, 1), _encode_instruction(_RETURN, _ERRNO | errno.EPERM))
    ]


def _match_call(number: int, body: list[bytes]) -> list[bytes]:
    return [_encode_instruction(_EQUAL, number, 0, len(body)), *body]


def _refuse_shared_memory(shared_files: bool) -> list[bytes]:
    """Refuse memory of more than a page that processes share: its pages stay where its last page is mapped.

    Args:
        shared_files: files may be mapped so; without, all that is written to files passes write(2), which is counted.
    """
    allowed, refused = _encode_instruction(_RETURN, _ALLOW), _encode_instruction(_RETURN, _ERRNO | errno.EPERM)
    return [
        _load_argument(3),
        _encode_instruction(_ANY_BIT, _MAP_SHARED, 1, 0),
        allowed,
        _encode_instruction(_ANY_BIT, _MAP_ANONYMOUS, 1, 0),
        allowed if shared_files else refused,
        _load_argument(1, _HIGH_HALF),
        _encode_instruction(_EQUAL, 0, 1, 0),
        refused,
        _load_argument(1),
        _encode_instruction(_GREATER, os.sysconf("SC_PAGE_SIZE"), 0, 1),
        refused,
        allowed,
    ]


def _refuse_value(argument: int, value: int) -> list[bytes]:
    return [
        _load_argument(argument),
        _encode_instruction(_EQUAL, value, 0, 1),
        _encode_instruction(_RETURN, _ERRNO | errno.EPERM),
        _encode_instruction(_RETURN, _ALLOW),
    ]


def _refuse_ioctls_of_files() -> list[bytes]:
    return [
        _load_argument(1),
        _encode_instruction(_AND, _FILE_MASK),
        _encode_instruction(_EQUAL, _TERMINAL, 1, 0),
        _encode_instruction(_RETURN, _ERRNO | errno.EOPNOTSUPP),
        _encode_instruction(_RETURN, _ALLOW),
    ]


def _refuse_large_buffers() -> list[bytes]:
    first, second = _BUFFER_OPTIONS
    return [
        _load_argument(1),
        _encode_instruction(_EQUAL, _SOCKET_LEVEL, 0, 4),
        _load_argument(2),
        _encode_instruction(_EQUAL, first, 1, 0),
        _encode_instruction(_EQUAL, second, 0, 1),
        _encode_instruction(_RETURN, _ERRNO | errno.EPERM),
        _encode_instruction(_RETURN, _ALLOW),
    ]


def _load_argument(number: int, half: int = 0) -> bytes:
    return _encode_instruction(_LOAD, _FIRST_ARGUMENT_OFFSET + number * _ARGUMENT_BYTES + half)


def _refuse_unless_first_is(value: int) -> list[bytes]:
    refused = _encode_instruction(_RETURN, _ERRNO | errno.EPERM)
    return [
        _load_argument(0),
        _encode_instruction(_EQUAL, value, 1, 0),
        refused,
        _encode_instruction(_RETURN, _ALLOW),
    ]
