"""The same job on all machines: a small script in place of `ssh`, which runs the command here, and one of the job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from anabatic import __version__
from anabatic.config.launch import Launch
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.launch import everywhere, hosts
from anabatic.launch.ssh import Job

SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
case $host in
  dead) echo "ssh: connect to host dead port 22: Connection refused" >&2; exit 255 ;;
  stranger) echo "me@stranger: Permission denied (publickey)." >&2; exit 255 ;;
  noisy) echo "Welcome to noisy!" ;;
esac
FAKE_HOST=$host exec sh -c "$last"
"""
JOB = """
import json, os, signal, sys, time
words = sys.argv[1:]
host = os.environ["FAKE_HOST"]
with open(words[-1]) as file:
    recipe = file.read()
print(json.dumps({"words": words[:-1], "recipe": recipe, "token": os.environ.get("TOKEN"), "pid": os.getpid()}))
print(f"hello from {host}", file=sys.stderr, flush=True)
sys.stdout.flush()
does = json.loads(os.environ["HF_DOES"]).get(host, 0)
if does != "wait":
    sys.exit(does)
def leave(code):
    print(f"{host} saves", file=sys.stderr, flush=True)
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: leave(143))
signal.signal(signal.SIGINT, lambda *_: leave(130))
open(os.path.join(os.environ["HF_FOLDER"], host), "w").write(str(os.getpid()))
time.sleep(100)
"""


class Site:
    """Machines that are all this one, and a job of theirs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH)
        (folder / "bin" / "ssh").chmod(0o755)
        self.package(__version__)
        (folder / "pids").mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(everywhere, "_GRACE", 0.1)

    def package(self, version: str) -> None:
        """Give the machines a package of that version."""
        package = self.folder / "site" / "anabatic"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "__main__.py").write_text(JOB)

    def run(self, text: str, does: dict[str, object], nodes: tuple[int, int] | None = None, **more: object) -> int:
        """Run the job on the machines of a text; `does` maps a machine to its exit code, or to "wait"."""
        found = hosts.parse(text, "hosts")
        least, most = nodes or (len(found), len(found))
        variables = {"PYTHONPATH": str(self.folder / "site"), "TOKEN": "s3cret", "HF_DOES": json.dumps(does)}
        variables["HF_FOLDER"] = str(self.folder / "pids")
        launch = Launch(nproc=2, min_nodes=least, max_nodes=most, master_addr="127.0.0.1", master_port=29713)
        given: dict[str, object] = {"nproc": None, "python": sys.executable, "folder": str(self.folder), **more}
        job = Job("classify train", "seed: 1\n", launch, environment=variables, out=self.folder / "out", **given)  # type: ignore[arg-type]
        return everywhere.run(found, job)

    def begun(self, host: str) -> bool:
        """Whether the job waits on a machine."""
        path = self.folder / "pids" / host
        return path.exists() and path.read_text() != ""

    def leave(self, host: str) -> None:
        """Ask the job of a machine to end."""
        os.kill(int((self.folder / "pids" / host).read_text()), signal.SIGTERM)

    def cut(self, host: str) -> None:
        """Kill the connection to a machine."""
        far = psutil.Process(int((self.folder / "pids" / host).read_text())).parent()
        assert far is not None
        far.kill()

    def gone(self, host: str) -> bool:
        """Whether the job that waited has ended."""
        return not psutil.pid_exists(int((self.folder / "pids" / host).read_text()))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.01)


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread."""
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_every_machine_gets_its_words(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.run("noisy slots=4\nsecond", {}) == 0
    out, err = capfd.readouterr()
    told = {line.split(" | ")[0].strip(): json.loads(line.split(" | ")[1]) for line in out.splitlines()}
    assert set(told) == {"noisy", "second"} and told["noisy"]["recipe"] == "seed: 1\n"
    common = ["--master-addr", "127.0.0.1", "--master-port", "29713", "--job-id", "anabatic", "--max-restarts", "0",
              "--hang-seconds", "1800", "--join-seconds", "600", "--", "classify", "train", "-c"]  # fmt: skip
    for place, (name, count) in enumerate((("noisy", 4), ("second", 2))):
        words = ["launch", "--nproc", str(count), "--nnodes", "2", "--node-rank", str(place), *common]
        assert told[name]["words"] == words and told[name]["token"] == "s3cret"
        assert f"{name:<6} | hello from {name}" in err
        assert f"hello from {name}\n" in (site.folder / "out" / f"host-{place}.log").read_text()


def test_no_command_line_shows_what_is_handed_on(site: Site) -> None:
    lines: list[str] = []

    def look() -> None:
        until(lambda: site.begun("a"))
        lines.extend(" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True))
        site.leave("a")

    with beside(look):
        assert site.run("a", {"a": "wait"}) == 143
    assert any("-m anabatic launch" in line for line in lines) and not any("s3cret" in line for line in lines)


def test_who_cannot_take_part_is_named(site: Site) -> None:
    with pytest.raises(Failure) as caught:
        site.run("good\ndead\nstranger", {})
    assert str(caught.value) == (
        "2 of 3 machines cannot take part: dead (line 2): no sshd listens there; stranger (line 3): it refuses your key"
    )
    assert "dead port=2222" in caught.value.hint and "ssh-copy-id stranger" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"python": "/no/python"}, "there is no /no/python on it"),
        ({"folder": "/no/folder"}, "it has no folder /no/folder (No such file or directory)"),
        ({"nproc": 8}, "--nproc is 8, but a (line 1) has slots=4"),
    ],
)
def test_what_a_machine_lacks(site: Site, given: dict[str, object], said: str) -> None:
    with pytest.raises(AnabaticError) as caught:
        site.run("a slots=4", {}, **given)
    assert said in str(caught.value) and caught.value.hint
    assert not (site.folder / "out").exists()


def test_versions_and_missing_packages(site: Site) -> None:
    site.package("0.0.0")
    with pytest.raises(ConfigError, match=f"a .line 1.: it has anabatic 0.0.0, this machine {__version__}"):
        site.run("a\nb", {})
    (site.folder / "site" / "anabatic" / "__init__.py").write_text("raise ImportError('no such thing')")
    with pytest.raises(ConfigError, match="cannot import anabatic .ImportError: no such thing"):
        site.run("a", {})


def test_a_port_that_is_taken(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 29713))
        taken.listen()
        with pytest.raises(ConfigError, match=r"a \(line 1\): port 29713 cannot be opened there"):
            site.run("a\nb", {})


def test_one_fails_and_the_others_are_ended(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.run("a\nb\nc", {"a": "wait", "b": 2, "c": "wait"}) == 2
    err = capfd.readouterr().err
    assert "a saves" in err and "c saves" in err
    assert site.gone("a") and site.gone("c")


def test_a_lost_machine_ends_the_job(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    def cut() -> None:
        until(lambda: site.begun("a") and site.begun("b"))
        site.cut("b")

    with beside(cut), pytest.raises(Failure, match="the connection to b is lost; what it said last is in .*host-1.log"):
        site.run("a\nb", {"a": "wait", "b": "wait"})
    assert "a saves" in capfd.readouterr().err
    until(lambda: site.gone("a") and site.gone("b"))


def test_a_lost_machine_is_left_behind_where_fewer_will_do(site: Site) -> None:
    def cut() -> None:
        until(lambda: site.begun("a") and site.begun("b"))
        site.cut("b")
        until(lambda: site.gone("b"))
        site.leave("a")

    with beside(cut):
        assert site.run("a\nb", {"a": "wait", "b": "wait"}, nodes=(1, 2)) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_machine_once(site: Site, number: signal.Signals, code: int) -> None:
    program = site.folder / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path[:0] = sys.argv[2].split(':')\n"
        "import pytest\n"
        "from unit.launch.test_everywhere import Site\n"
        "site = Site.__new__(Site)\n"
        "site.folder = Path(sys.argv[1])\n"
        "sys.exit(site.run('a\\nb', {'a': 'wait', 'b': 'wait'}))\n"
    )
    process = subprocess.Popen([sys.executable, str(program), str(site.folder), ":".join(sys.path)])
    until(lambda: site.begun("a") and site.begun("b"))
    process.send_signal(number)
    assert process.wait(60) == code
    assert site.gone("a") and site.gone("b")
