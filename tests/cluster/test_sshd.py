"""`launch --hosts` through OpenSSH, to our own sshd: keys, lost connections, nobody left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from anabatic.core.errors import Failure
from anabatic_testing.multiprocess import find_free_port
from unit.launch.stage import Site, beside, until


class Sshd:
    """An sshd on its own port; clients get their key and known hosts from a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None or shutil.which("ssh") is None:
            pytest.skip("openssh-server and openssh-client are not installed")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd gives up its rights
        for name in ("host", "key", "stranger"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        self.port = find_free_port()
        options = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": folder / "host",
            "StrictModes": "no",
            "AuthorizedKeysFile": folder / "key.pub",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PidFile": "none",
        }
        (folder / "sshd.conf").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        self.process = subprocess.Popen(
            [program, "-f", str(folder / "sshd.conf"), "-D", "-E", str(folder / "sshd.log")], start_new_session=True
        )
        until(self._answers)
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(
            "".join(f"[{name}]:{self.port} {public}\n" for name in ("127.0.0.1", "localhost"))
        )
        self.client()

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def client(self, key: str = "key", known: str = "known") -> None:
        """Let `ssh` use a key and a list of hosts."""
        (self.folder / "config").write_text(
            f"Host *\nIdentityFile {self.folder / key}\nIdentitiesOnly yes\nUserKnownHostsFile {self.folder / known}\n"
            "IdentityAgent none\nGlobalKnownHostsFile none\n"
        )
        script = self.folder / "bin" / "ssh"
        script.write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh", path="/usr/bin:/bin")} -F {self.folder / "config"} "$@"\n'
        )

    @property
    def machines(self) -> str:
        """Two machines, both this one."""
        return f"127.0.0.1 port={self.port}\nlocalhost port={self.port}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.fixture
def sshd(site: Site) -> Iterator[Sshd]:
    made = Sshd(site.folder)
    yield made
    made.process.terminate()
    made.process.wait()


def test_two_machines(site: Site, sshd: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.run(sshd.machines, {"b": 7}) == 7
    out, err = capfd.readouterr()
    assert '"token": "s3cret"' in out and "127.0.0.1 | hello from a" in err and "localhost | hello from b" in err


def test_keys_that_are_not_known(site: Site, sshd: Sshd) -> None:
    sshd.client(key="stranger")
    with pytest.raises(Failure, match="2 of 2 machines cannot take part: 127.0.0.1 .line 1.: it refuses your key"):
        site.run(sshd.machines, {})
    sshd.client(known="nothing")
    with pytest.raises(Failure, match="its host key is not known here or has changed") as caught:
        site.run(sshd.machines, {})
    assert f"ssh -p {sshd.port} 127.0.0.1" in caught.value.hint


def test_a_connection_that_is_cut(site: Site, sshd: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    def cut() -> None:
        until(lambda: site.begun("a") and site.begun("b"))
        job = psutil.Process(int((site.folder / "pids" / "b").read_text()))
        next(parent for parent in job.parents() if parent.name().startswith("sshd")).kill()

    with beside(cut), pytest.raises(Failure, match="the connection to localhost is lost"):
        site.run(sshd.machines, {"a": "wait", "b": "wait"})
    assert "a saves" in capfd.readouterr().err
    until(lambda: site.gone("a") and site.gone("b"))


def test_nobody_is_left_when_we_are_killed(site: Site, sshd: Sshd) -> None:
    program = site.folder / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path[:0] = sys.argv[3].split(':')\n"
        "import pytest\n"
        "from unit.launch.stage import Site\n"
        "site = Site.__new__(Site)\n"
        "site.folder = Path(sys.argv[1])\n"
        "sys.exit(site.run(sys.argv[2], {'a': 'wait', 'b': 'wait'}))\n"
    )
    words = [sys.executable, str(program), str(site.folder), sshd.machines, ":".join(sys.path)]
    process = subprocess.Popen(words)
    until(lambda: site.begun("a") and site.begun("b"))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: site.gone("a") and site.gone("b"))
