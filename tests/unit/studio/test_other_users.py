"""Another user of the machine is let into nothing that the studio starts, whatever he claims; its owner is."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from anabatic.core.errors import ConfigError
from anabatic_studio import server as studio_server
from anabatic_studio.jobs.model_servers import ModelServers
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model

STRANGER = Path(__file__).with_name("stranger.py")
NEEDS_TWO_USERS = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not Path("/proc/net/tcp").exists(),
    reason="only root of a Linux machine can become a second user",
)
SECONDS = 180


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others may enter, unlike those of pytest: what is refused there is refused by the program."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Return what matches in a line of stderr."""
    end, lines = time.monotonic() + SECONDS, []
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stderr, selectors.EVENT_READ)
        while time.monotonic() < end and waiting.select(max(0.0, end - time.monotonic())):
            lines.append(process.stderr.readline())
            if found := re.search(pattern, lines[-1]):
                return found
            if not lines[-1]:
                break
    raise AssertionError("".join(lines))


@contextmanager
def run_studio(folder: Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a folder; `more`: arguments of Popen."""
    line = [sys.executable, "-m", "anabatic", "studio", "runs", "--port", "0"]
    process = subprocess.Popen(line, cwd=folder, text=True, umask=0o022, **more)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def send_stranger(port: int, pid: int, folder: Path, asked: list[list[Any]]) -> dict[str, Any]:
    """Return what the other user got, while this one has a connection and has just closed another."""
    with httpx2.Client() as closed:  # whose answer is read, so that it is closed without a reset
        assert closed.get(f"http://127.0.0.1:{port}/health").status_code == 200
    task = {"port": port, "pid": pid, "folder": str(folder), "asked": asked}
    with socket.create_connection(("127.0.0.1", port)) as held:
        ends = {held.getsockname()[1], closed_port(port)}
        done = subprocess.run(
            [sys.executable, str(STRANGER), json.dumps(task)], capture_output=True, text=True, timeout=SECONDS
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["user"] != os.getuid()
    claimed = {way.rpartition(":")[2] for way, _, _ in found["answers"]}
    assert {str(end) for end in ends} <= claimed  # it has seen both
    return found


def closed_port(port: int) -> int:
    """Return our port of a connection to `port` that was closed: the kernel keeps it for a minute (TIME_WAIT, 06)."""
    end = time.monotonic() + 10
    while time.monotonic() < end:  # the server has to close its end
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[2].endswith(f":{port:04X}") and fields[3] == "06":
                return int(fields[1].rpartition(":")[2], 16)
        time.sleep(0.02)
    raise AssertionError("there is none")


def list_let_in(found: dict[str, Any]) -> list[list[Any]]:
    """Return the requests that were not refused."""
    assert len(found["answers"]) > 40
    return [answer for answer in found["answers"] if answer[2] not in (0, 401, 403, 421)]


@pytest.mark.process
@NEEDS_TWO_USERS
def test_another_user_gets_nothing_from_the_studio_and_its_owner_gets_in(place: Path) -> None:
    (place / "private.txt").write_text("a private line\n", encoding="utf-8")
    (place / "private.txt").chmod(0o600)
    recipe = {"data": {"train": [str(place / "private.txt")]}, "out": str(place / "stolen"), "vocab_size": 300}
    job = json.dumps({"command": "tokenizer train", "text": json.dumps(recipe), "name": "stolen"})
    asked = [["GET", "/api/state", None], ["GET", "/api/files", None], ["POST", "/api/jobs", job]]
    asked += [["GET", "/v1/models", None]]
    with run_studio(place, stderr=subprocess.PIPE) as process:
        address = read_until(process, r"studio at (\S+)")[1]
        token = address.partition("?token=")[2]
        found = send_stranger(urlsplit(address).port or 0, process.pid, place, asked)
        assert not list_let_in(found)
        with httpx2.Client(base_url=address.partition("?")[0], follow_redirects=True) as browser:
            assert browser.get(address).status_code == 200
            assert browser.get("/api/state").status_code == 200
            time.sleep(0.5)  # who hung up has no answer: a job would be there by now
            assert browser.get("/api/jobs").json() == {"jobs": []}
        kept = place / "runs" / ".studio" / "address"
        assert kept.read_text(encoding="utf-8").strip() == address and kept.stat().st_mode & 0o777 == 0o600
    assert len(token) >= 32 and token not in found["seen"] and "a private line" not in found["seen"]
    assert "anabatic" in found["seen"]  # the command line of the process
    assert not (place / "stolen").exists() and not kept.exists()


@pytest.mark.process
@NEEDS_TWO_USERS
def test_another_user_gets_nothing_from_a_model_that_the_studio_serves(place: Path) -> None:
    build_random_model(len(build_byte_tokenizer(place / "model"))).save_pretrained(place / "model")
    (place / "logs").mkdir(mode=0o700)
    servers = ModelServers(place / "logs")
    try:
        servers.start(str(place / "model"), "tiny")
        end = time.monotonic() + SECONDS
        while (row := servers.list_servers()[0])["state"] == "starting" and time.monotonic() < end:
            time.sleep(0.1)
        assert row["state"] == "ready", row
        server = servers.find_server("tiny")
        chat = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        asked = [["GET", "/v1/models", None], ["POST", "/v1/chat/completions", chat], ["GET", "/metrics", None]]
        found = send_stranger(server.port, server.process.pid, place / "logs", asked)
        assert not list_let_in(found)
        assert server.key not in found["seen"] and "serve" in found["seen"]
        headers = {"Authorization": f"Bearer {server.key}"}
        assert httpx2.get(f"http://127.0.0.1:{server.port}/v1/models", headers=headers).status_code == 200
    finally:
        servers.close()


@pytest.mark.process
def test_a_log_that_others_read_has_no_token(place: Path) -> None:
    log = place / "studio.log"
    with open(log, "w", encoding="utf-8") as output:
        log.chmod(0o644)
        with run_studio(place, stderr=output, env={**os.environ, "ANABATIC_STUDIO_TOKEN": "not-for-others"}):
            end = time.monotonic() + SECONDS
            while "the address with the token is in" not in log.read_text(encoding="utf-8"):
                assert time.monotonic() < end, log.read_text(encoding="utf-8")
                time.sleep(0.05)
            address = (place / "runs" / ".studio" / "address").read_text(encoding="utf-8").strip()
            assert address.endswith("?token=not-for-others") and "not-for-others" not in log.read_text(encoding="utf-8")
            assert httpx2.get(address).status_code == 303


def test_the_state_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue would be run as the owner of the studio."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to the user with id"):
        studio_server._create_state_folder(tmp_path / "runs")
