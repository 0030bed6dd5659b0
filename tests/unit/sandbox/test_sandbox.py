"""Programs that want to harm, and what they reach: nothing. In every way that this kernel offers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.sandbox.isolation.modes import CHROOT, ISOLATION_MODES, LANDLOCK, LIMITS, NAMESPACES
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox, probe_protections

pytestmark = pytest.mark.process


LIMIT = ResourceLimits(seconds=5, cpu_seconds=2, memory_mib=256, file_mib=4, output_bytes=20_000, processes=8)
BRIEF = ResourceLimits(seconds=0.3, memory_mib=256)


@pytest.fixture(scope="module", params=[NAMESPACES, LANDLOCK, CHROOT])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox(LIMIT, ways=[request.param])
    except Failure as error:
        pytest.skip(f"{request.param} cannot be had here: {error}")
    with made:
        yield made


def test_result_and_streams(box: Sandbox) -> None:
    source = (
        "import sys\nprint(sum(map(int, input().split())))\nprint('é', file=sys.stderr)\nprint(open('a/b.txt').read())"
    )
    done = box.run(source, stdin="1 2 3\n", files={"a/b.txt": "text"})
    assert (done.status, done.code, done.stdout, done.stderr) == ("ok", 0, "6\ntext\n", "é\n")
    assert done.finished
    assert done.is_ok
    assert done.written == len("6\ntext\n") + len("é\n".encode())
    assert 0 < done.seconds < 60
    assert done.peak_mib > 1


@pytest.mark.parametrize(
    ("source", "status", "code", "said"),
    [
        ("1/0", "error", 1, "ZeroDivisionError: division by zero"),
        ("def f(:", "error", 1, "SyntaxError"),
        ("a = '\0'", "error", 1, "null bytes"),
        ("\udc80", "error", 1, "Error"),
        ("raise SystemExit('no')", "error", 1, "no"),
        ("exit(4)", "error", 4, ""),
        ("raise SystemExit(7)", "error", 7, ""),
        ("raise KeyboardInterrupt", "error", 1, "KeyboardInterrupt"),
        ("class E(Exception):\n def __str__(self): raise self\nraise E", "error", 1, "E"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "error", 137, ""),
        ("import os; os.abort()", "error", 134, ""),
        ("import ctypes; ctypes.string_at(0)", "error", 139, ""),
        ("x = bytearray(2**40)", "memory", 1, ""),
        ("x = []\nwhile True: x.append(bytes(10**6))", "memory", 1, ""),
        ("while True: print('x' * 1000)", "output", 137, ""),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", 137, "x" * 20_000),
        ("open('big', 'wb').write(bytes(10**7))", "error", 1, "OSError"),
        ("import os; f = [os.pipe() for _ in range(99)]", "error", 1, "Too many open files"),
        ("def f(): f()\nf()", "error", 1, "RecursionError"),
    ],
)
def test_ends(box: Sandbox, source: str, status: str, code: int | None, said: str) -> None:
    done = box.run(source)
    assert (done.status, done.finished) == (status, False)
    assert code is None or done.code == code
    assert said in done.stderr
    assert len(done.stdout) <= LIMIT.output_bytes
    assert "anabatic" not in done.stderr, "a traceback begins at the program's own first line"


@pytest.mark.parametrize("code", ["raise SystemExit", "import os; os._exit(0)", "import sys; sys.exit(0)"])
def test_leaving_early_is_not_finishing(box: Sandbox, code: str) -> None:
    done = box.run(code + "\nassert False")
    assert done.is_ok
    assert not done.finished


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(60)",
        "while True: pass",
        "import signal\nfor s in {*range(1, 32)} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1); os.close(2); os.closerange(4, 99); time.sleep(60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "import atexit, time\natexit.register(time.sleep, 60)",
        "import time\ntry:\n while True: pass\nfinally: time.sleep(60)",
    ],
)
def test_time_is_over(box: Sandbox, source: str) -> None:
    done = box.run(source, limits=BRIEF)
    assert (done.status, done.finished) == ("timeout", False)


def test_what_was_said_before_an_error_is_kept(box: Sandbox) -> None:
    assert box.run("print('before')\n1/0").stdout == "before\n"
    assert box.run("import sys\nprint('before')\nsys.stdout.close()").status == "error"
    assert box.run("print('before', flush=True)\nimport time; time.sleep(60)", limits=BRIEF).stdout == "before\n"


def test_processor_time_is_over() -> None:
    with Sandbox(LIMIT, allow_weaker=True) as box:  # a second of it: the same limit in every way
        done = box.run("while True: pass", limits=ResourceLimits(seconds=60, cpu_seconds=1, memory_mib=256))
    assert done.status == "timeout"
    assert done.cpu_seconds > 0.5


def test_no_network(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = box.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
        assert done.status == "error"
        done = box.run("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0any')")
        assert "Operation not permitted" in done.stderr
    assert box.run("import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'").is_ok


def test_no_files_outside(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    for attack in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.chmod({str(secret)!r}, 0)",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; os.utime({str(secret)!r}, (0, 0))",
        f"import os; os.link({str(secret)!r}, 'x'); open('x').read()",
        f"import os; os.symlink({str(secret)!r}, 'x'); open('x').read()",
        f"import os; os.rename({str(secret)!r}, 'x')",
        f"open('../' * 20 + {str(secret)!r}).read()",
        f"import os; os.chdir('/'); os.chroot('.'); open({str(secret)!r})",
        "import os; open(os.__file__, 'a')",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "open('/proc/self/mem')",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nassert l.unshare(0x10000000) == 0",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nassert l.mount(b'none', b'/', b'', 32, None) == 0",
    ):
        done = box.run(attack)
        assert done.status == "error", attack
    before = secret.stat()
    assert secret.read_text() == "secret"
    assert (before.st_mode & 0o777, before.st_mtime > 0) == (0o666, True)
    assert sorted(tmp_path.iterdir()) == [secret]


def test_folder_is_empty_again(box: Sandbox) -> None:
    assert box.run("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.symlink('/', 'a/link')").is_ok
    assert box.run("import os; assert os.listdir('.') == []; print(os.getcwd())").is_ok
    where = box.run("import os; print(os.getcwd())").stdout.strip()
    assert where == "/" or not os.path.exists(where)


def test_nothing_is_inherited(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    with Sandbox(LIMIT, ways=[box.protections.mode]) as other:
        source = (
            "import os\nprint(sorted(os.environ))\n"
            "for fd in range(4, 200):\n try: os.fstat(fd)\n except OSError: continue\n print(fd)"
        )
        assert other.run(source).stdout == "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n"


def test_nobody_is_left(box: Sandbox) -> None:
    """Children that ignore signals, in sessions of their own, with the pipes in their hands."""
    source = (
        "import os, signal, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "            while True: time.sleep(60)\n"
        "        os._exit(0)\n"
    )
    before = processes()
    done = box.run(source)
    assert done.is_ok is (box.protections.mode == NAMESPACES)
    assert done.seconds < LIMIT.seconds
    assert processes() == before


def processes() -> set[int]:
    """Numbers of the processes below this one."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in table.splitlines())}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found if pid != os.getpid() and Path(f"/proc/{pid}/exe").exists()}


@pytest.mark.parametrize(
    "bomb",
    ["import os\nwhile True: os.fork()", "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
     "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"],
)  # fmt: skip
def test_bombs(box: Sandbox, bomb: str) -> None:
    before = processes()
    done = box.run(bomb, limits=ResourceLimits(seconds=0.5, memory_mib=256, processes=8))
    assert done.status in ("error", "timeout")
    assert processes() == before
    assert box.run("print(1)").stdout == "1\n"


def test_processes_are_counted(box: Sandbox) -> None:
    source = (
        "import os, time\nn = 0\ntry:\n for _ in range(50):\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    started = int(box.run(source).stdout)
    assert started == (LIMIT.processes - 1 if box.protections.mode == NAMESPACES else 0)


def test_what_programs_may_do(box: Sandbox) -> None:
    """Threads everywhere, processes where they are counted."""
    thread = "import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start()\nt.join()"
    assert box.run(thread).stdout == "hi\n"
    if box.protections.mode == NAMESPACES and "RLIMIT_NPROC" in box.protections.guards["processes"]:
        assert box.run("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])").stdout == "1\n"
        pool = "from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(abs, [-1, -2]))"
        assert box.run(pool).stdout == "[1, 2]\n"
        sleeper = "from multiprocessing import Process\nimport time\np = Process(target=time.sleep, args=(60,))\n"
        assert box.run(sleeper + "p.start()\np.terminate()\np.join()\nprint(p.exitcode)").stdout == "-15\n"


def test_what_cannot_start_is_a_failure(box: Sandbox) -> None:
    with pytest.raises(Failure, match="cannot run a program: .*(directory|exists)"):
        box.run("", files={"a": "", "a/b": ""})
    assert box.run("print(1)").is_ok


def test_signals_reach_nobody_else(box: Sandbox) -> None:
    source = (
        f"import os, signal\nfor pid in ({os.getpid()}, os.getppid(), 1, -1):\n"
        " try: os.kill(pid, signal.SIGTERM)\n except OSError: pass"
    )
    heard: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        done = box.run(source)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert not heard
    assert done.status in ("ok", "error")
    assert box.run("print(1)").is_ok


def test_a_signal_to_all_of_a_job_ends_no_program(box: Sandbox) -> None:
    """A scheduler signals every process; a program that it ended would be judged as one that fails."""

    def signals() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            time.sleep(0.1)
            for pid in processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    sender = threading.Timer(0.2, signals)
    sender.start()
    done = box.run("import time\ntime.sleep(1.2)\nprint('done')")
    sender.join()
    assert done.stdout == "done\n", done
    assert box.run("print(1)").is_ok


def test_many_at_once(box: Sandbox) -> None:
    said: dict[int, str] = {}
    with Sandbox(LIMIT, ways=[box.protections.mode], workers=2) as two:

        def ask(number: int) -> None:
            said[number] = two.run(f"print({number})").stdout

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == {number: f"{number}\n" for number in range(8)}


def test_killed_keeper_is_replaced(box: Sandbox) -> None:
    with Sandbox(LIMIT, ways=[box.protections.mode]) as other:
        (pid,) = [keeper.process.pid for pair in other._idle_zygotes.queue for keeper in pair if keeper]
        os.kill(pid, signal.SIGKILL)
        assert other.run("print(1)").stdout == "1\n"


def test_runs_leave_nothing(box: Sandbox) -> None:
    """Open files and memory of the keeper stay as they are."""
    pid = box._idle_zygotes.queue[0][0].process.pid
    deepest = max([pid, *(each for each in processes() if each > pid)]) if box.protections.mode == NAMESPACES else pid
    for _ in range(5):
        assert box.run("print(1)").is_ok
    before = len(os.listdir(f"/proc/{deepest}/fd"))
    for _ in range(30):
        assert box.run("print(1)").is_ok
    assert len(os.listdir(f"/proc/{deepest}/fd")) == before


def test_weak_machines_are_refused() -> None:
    """Resource limits alone leave the files open."""
    with pytest.raises(Failure, match="no protection of files") as refused:
        Sandbox(LIMIT, ways=[LIMITS])
    assert "allow_weaker" in refused.value.hint
    with Sandbox(LIMIT, ways=[LIMITS], allow_weaker=True) as weak:
        assert weak.protections.missing_guards == ["files"]
        assert weak.run("print(1)").stdout == "1\n"
        assert weak.run("import os; os.fork()").status == "error"


def test_the_kernel_is_asked() -> None:
    found = probe_protections()
    assert found.mode in ISOLATION_MODES
    assert set(found.guards) <= {"network", "files", "processes", "calls", "memory"}


def test_bad_settings(box: Sandbox) -> None:
    for name in ("../x", "/etc/x", "", "a/../../b", "a\0b"):
        with pytest.raises(DataError, match="file is called"):
            box.run("", files={name: ""})
    assert box.run("print(1)", limits=ResourceLimits(seconds=2**30, memory_mib=2**30)).is_ok
    with pytest.raises(ConfigError, match="seconds is 0"):
        ResourceLimits(seconds=0)
    with pytest.raises(ConfigError, match="memory_mib is nan"):
        ResourceLimits(memory_mib=float("nan"))  # type: ignore[arg-type]


def test_keeper_ends_with_its_owner() -> None:
    code = (
        "import os, sys\nfrom anabatic.sandbox.sandbox_runner import Sandbox\n"
        "s = Sandbox()\nprint(s._idle_zygotes.queue[0][0].process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(500):
        if not Path(f"/proc/{pid}/exe").exists():
            break
        threading.Event().wait(0.02)
    assert not Path(f"/proc/{pid}/exe").exists(), "the zygote outlives the process that started it"


SHARED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2]
for number in range(12):
    place = libc.mmap(None, 2**26, 3, 0x21, 2**64 - 1, 0)
    if place == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "refused")
    libc.memset(place, 1, 2**26)
    libc.munmap(place + 65536, 2**26 - 65536)
"""
UNSEEN_MEMORY = {
    "shared pages whose mapping is gone": SHARED,
    "a mapping of zeros": "import ctypes, os\nhandle = os.open('/dev/zero', os.O_RDWR)",
    "large socket buffers": "import socket\na, b = socket.socketpair()\n"
    "a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)",
    "large pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "pages in a pipe": "import os\nwith open('a', 'wb') as f: f.write(bytes(9))\n"
    "os.splice(os.open('a', os.O_RDONLY), os.pipe()[1], 9)",
    "its own stdin": "import os\nos.write(0, bytes(9))",
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSEEN_MEMORY)
def test_memory_that_no_mapping_shows_is_not_given(box: Sandbox, kind: str) -> None:
    done = box.run(UNSEEN_MEMORY[kind], limits=ResourceLimits(memory_mib=256))
    assert done.status == "error"
    assert done.stderr.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError", "OSError: [Errno 9]"))


def test_socket_buffers_count_as_memory(box: Sandbox) -> None:
    """Each as large as it may be: what it holds is not known."""
    if box.protections.mode != NAMESPACES:
        pytest.skip("one process there, whose sockets hold 13 MiB at most")
    few = "import socket\nk = [socket.socketpair() for _ in range(28)]\n"
    many = f"import os, time\nfor _ in range(6):\n if os.fork() == 0: break\n{few}time.sleep(3)"
    assert box.run(few).is_ok
    assert box.run(many, limits=ResourceLimits(memory_mib=80)).status == "memory"


WRITERS = {
    "many files": "import time\nfor n in range(9):\n"
    " with open(str(n), 'wb') as f: f.write(bytes(2**20))\ntime.sleep(3)",
    "files that are gone": "import os, time\nkept = []\nfor n in range(9):\n kept.append(open('a', 'wb'))\n"
    " kept[-1].write(bytes(2**20))\n os.unlink('a')\ntime.sleep(3)",
    "empty files": "import time\nfor n in range(300): open(str(n), 'w').close()\ntime.sleep(3)",
    "folders in each other": "import os, time\nfor n in range(300):\n os.mkdir('a')\n os.chdir('a')\ntime.sleep(3)",
    "a folder that cannot be read": "import os, time\nos.mkdir('a', 0o300)\n"
    "for n in range(300): open(f'a/{n}', 'w').close()\ntime.sleep(3)",
    "room without a write": "import fcntl, struct, time\nfor n in range(300):\n f = open(f'{n % 9}', 'wb')\n"
    " fcntl.ioctl(f, 0x40305828, struct.pack('hhqq20x', 0, 0, n // 9 % 4 << 20, 1 << 20))\ntime.sleep(3)",
    "a process that hides itself": "import ctypes, time\nfor n in range(9):\n"
    " with open(str(n), 'wb') as f: f.write(bytes(2**20))\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\ntime.sleep(3)",
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
def test_all_that_a_program_writes_is_limited(box: Sandbox, kind: str) -> None:
    limits = ResourceLimits(memory_mib=256, file_mib=4)
    done = box.run(WRITERS[kind], limits=limits)
    status, said = ("files", "wrote more than 4 MiB to files")
    if box.protections.mode == NAMESPACES:
        status, said = ("error", "OSError: [Errno 28]")
    elif kind == "room without a write":
        status, said = ("error", "OSError: [Errno 95]")
    assert done.status == status
    assert said in done.describe_end(limits)
    assert box.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_folders_in_each_other_are_removed(box: Sandbox) -> None:
    """Deeper than a path may be long, and than Python's calls."""
    source = "import os\nprint(os.getcwd(), flush=True)\nwhile True:\n os.mkdir('a', 0o300)\n os.chdir('a')"
    folder = box.run(source).stdout.strip()
    assert folder == "/" or not os.path.exists(folder)
    assert box.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_temporary_files_work(box: Sandbox) -> None:
    source = "import tempfile\nwith tempfile.TemporaryFile() as f:\n f.write(b'x')\nprint(tempfile.gettempdir())"
    assert box.run(source).is_ok


def test_small_memory_may_be_shared(box: Sandbox) -> None:
    if box.protections.mode == CHROOT:
        pytest.skip("the module mmap is not at hand there")
    assert box.run("import mmap\nm = mmap.mmap(-1, 13)\nm.write(b'Hello')\nprint(m[:5])").stdout == "b'Hello'\n"


KEEP_PIPES = """
import array, os, socket
a, b = socket.socketpair()
kept = array.array("i", [a.fileno(), b.fileno(), 1, 2])
for end in a, b:
    end.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, kept)])
print("said", flush=True)
os._exit(0)
"""


def test_sockets_that_hold_each_other_hold_up_nobody(box: Sandbox) -> None:
    for _ in range(5):  # anyone's closing of a socket would free them
        done = box.run(KEEP_PIPES)
        assert (done.status, done.stdout) == ("ok", "said\n")
        assert done.seconds < 2


LATE_IMPORTS = (
    "import datetime; datetime.datetime.strptime('2024-02-29', '%Y-%m-%d')",
    "from concurrent.futures import ThreadPoolExecutor as E; assert [*E(2).map(len, ['a'])] == [1]",
    "import unittest\nclass A(unittest.IsolatedAsyncioTestCase): pass",
    "import logging, unittest\nwith unittest.TestCase().assertLogs(): logging.error('a')",
    "import colorsys, graphlib, sched",
    "for name in ('gbk', 'utf-32', 'utf-16-le', 'utf-8-sig', 'unicode_escape'): 'a'.encode(name)",
)


@pytest.mark.parametrize("source", LATE_IMPORTS)
def test_what_the_library_imports_late_is_there(box: Sandbox, source: str) -> None:
    done = box.run(source)
    assert done.is_ok, done.stderr


def test_threads_are_counted(box: Sandbox) -> None:
    threads = (
        "import threading, time\nthreading.stack_size(1 << 17)\n"
        "for n in range({}): threading.Thread(target=time.sleep, args=(0.5,)).start()"
    )
    assert box.run(threads.format(LIMIT.processes - 1)).is_ok
    done = box.run(threads.format(40))
    assert (done.status, done.finished) == ("error", False)
    if box.protections.mode != NAMESPACES:
        assert done.code == 128 + signal.SIGKILL
