"""The same job on all machines: a small script in place of `ssh`, which runs the command here, and one of the job."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from anabatic import __version__
from anabatic.cli.launch import hosts
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from unit.launch.stage import Site, beside, until


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.mark.process
def test_every_machine_gets_its_words(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.run("noisy slots=4\nsecond", {}) == 0
    out, err = capfd.readouterr()
    told = {line.split(" | ")[0].strip(): json.loads(line.split(" | ")[1]) for line in out.splitlines()}
    assert set(told) == {"noisy", "second"} and told["noisy"]["recipe"] == "seed: 1\n"
    common = [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "29713",
        "--job-id",
        "anabatic",
        "--max-restarts",
        "0",
        "--hang-seconds",
        "1800",
        "--join-seconds",
        "600",
        "--",
        "classify",
        "train",
        "-c",
    ]
    for place, (name, count) in enumerate((("noisy", 4), ("second", 2))):
        words = ["launch", "--nproc", str(count), "--nnodes", "2", "--node-rank", str(place), *common]
        assert told[name]["words"] == words and told[name]["token"] == "s3cret"
        assert f"{name:<6} | hello from {name}" in err
        assert f"hello from {name}\n" in (site.folder / "out" / f"host-{place}.log").read_text()


@pytest.mark.process
def test_no_command_line_shows_what_is_handed_on(site: Site) -> None:
    lines: list[str] = []

    def look() -> None:
        until(lambda: site.begun("a"))
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since, or is not reaped yet
                lines.append(" ".join(one.cmdline()))
        site.leave("a")

    with beside(look):
        assert site.run("a", {"a": "wait"}) == 143
    assert any("-m anabatic launch" in line for line in lines) and not any("s3cret" in line for line in lines)


@pytest.mark.process
def test_who_cannot_take_part_is_named(site: Site) -> None:
    with pytest.raises(Failure) as caught:
        site.run("good\ndead\nstranger", {})
    assert str(caught.value) == (
        "2 of 3 machines cannot take part: dead (line 2): no sshd listens there; stranger (line 3): it refuses your key"
    )
    assert "dead port=2222" in caught.value.hint and "ssh-copy-id stranger" in caught.value.hint


@pytest.mark.process
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"python": "/no/python"}, "there is no /no/python on it"),
        ({"folder": "/no/folder"}, "it has no folder /no/folder (No such file or directory)"),
    ],
)
def test_what_a_machine_lacks(site: Site, given: dict[str, object], said: str) -> None:
    with pytest.raises(AnabaticError) as caught:
        site.run("a slots=4", {}, **given)
    assert said in str(caught.value) and caught.value.hint
    assert not (site.folder / "out").exists()


def test_options_that_do_not_fit_the_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\na slots=4\nb\n")
    with pytest.raises(ConfigError, match=r"--nproc is 8, but a \(.*hosts:2\) has slots=4"):
        hosts.read_hosts(tmp_path / "hosts", hosts.RemoteOptions(nproc=8), None)
    with pytest.raises(ConfigError, match="--node-rank cannot be combined with --hosts"):
        hosts.read_hosts(tmp_path / "hosts", hosts.RemoteOptions(), "0")
    found = hosts.read_hosts(tmp_path / "hosts", hosts.RemoteOptions(nproc=4), None)
    with pytest.raises(ConfigError, match="--nnodes is 3, but the file of --hosts names 2"):
        hosts.run_on_hosts(
            "", None, found, LaunchSettings(min_nodes=3, max_nodes=3, master_addr="a"), hosts.RemoteOptions()
        )


@pytest.mark.process
def test_versions_and_missing_packages(site: Site) -> None:
    site.package("0.0.0")
    with pytest.raises(ConfigError, match=f"a .line 1.: it has anabatic 0.0.0, this machine {__version__}"):
        site.run("a\nb", {})
    (site.folder / "site" / "anabatic" / "__init__.py").write_text("raise ImportError('no such thing')")
    with pytest.raises(ConfigError, match="cannot import anabatic .ImportError: no such thing"):
        site.run("a", {})


@pytest.mark.process
def test_a_port_that_is_taken(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 29713))
        taken.listen()
        with pytest.raises(ConfigError, match=r"a \(line 1\): port 29713 cannot be opened there"):
            site.run("a\nb", {})


@pytest.mark.process
def test_one_fails_and_the_others_are_ended(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.run("a\nb\nc", {"a": "wait", "b": {"code": 2, "after": ["a", "c"]}, "c": "wait"}) == 2
    err = capfd.readouterr().err
    assert "a saves" in err and "c saves" in err
    until(lambda: site.gone("a") and site.gone("c"))


@pytest.mark.process
def test_a_lost_machine_ends_the_job(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    def cut() -> None:
        until(lambda: site.begun("a") and site.begun("b"))
        site.cut("b")

    with beside(cut), pytest.raises(Failure, match="the connection to b is lost; what it said last is in .*host-1.log"):
        site.run("a\nb", {"a": "wait", "b": "wait"})
    assert "a saves" in capfd.readouterr().err
    until(lambda: site.gone("a") and site.gone("b"))


@pytest.mark.process
def test_a_lost_machine_is_left_behind_where_fewer_will_do(site: Site) -> None:
    def cut() -> None:
        until(lambda: site.begun("a") and site.begun("b"))
        site.cut("b")
        until(lambda: site.gone("b"))
        site.leave("a")

    with beside(cut):
        assert site.run("a\nb", {"a": "wait", "b": "wait"}, nodes=(1, 2)) == 143


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_machine_once(site: Site, number: signal.Signals, code: int) -> None:
    program = site.folder / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path[:0] = sys.argv[2].split(':')\n"
        "import pytest\n"
        "from unit.launch.stage import Site\n"
        "site = Site.__new__(Site)\n"
        "site.folder = Path(sys.argv[1])\n"
        "sys.exit(site.run('a\\nb', {'a': 'wait', 'b': 'wait'}))\n"
    )
    process = subprocess.Popen([sys.executable, str(program), str(site.folder), ":".join(sys.path)])
    until(lambda: site.begun("a") and site.begun("b"))
    process.send_signal(number)
    assert process.wait(120) == code
    until(lambda: site.gone("a") and site.gone("b"))


@pytest.mark.process
def test_the_command_checks_a_machine_of_a_file(site: Site) -> None:
    (site.folder / "hosts").write_text("here slots=3\n")
    words = [sys.executable, "-m", "anabatic", "launch", "--hosts", "hosts", "--check", "--master-addr", "127.0.0.1"]
    done = subprocess.run(words, cwd=site.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "here | check passed, " in done.stderr and "here |    machine  devices" in done.stderr
    (site.folder / "hosts").write_text("here\ndead\n")
    words += ["--", "sft", "--model", "x", "--data.train", "task:spelling#10"]
    done = subprocess.run(words, cwd=site.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "error: 1 of 2 machines cannot take part: dead (line 2)" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 2
