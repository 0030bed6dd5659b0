"""The CORE bundle from a server on this machine: a mirror, a download that breaks off, a file that is another."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from anabatic.core.errors import ConfigError, DataError
from anabatic.evals.task_runner import EvalOptions, prepare_task
from anabatic.evals.tasks import core_suite, registry

YAML = """icl_tasks:
- {label: last, dataset_uri: a/last.jsonl, num_fewshot: [0], icl_task_type: language_modeling}
"""
FILES = {
    "eval_bundle/core.yaml": YAML,
    "eval_bundle/eval_meta_data.csv": "Eval Task,Task Category,Random baseline\nlast,x,0\n",
    "eval_bundle/eval_data/a/last.jsonl": '{"context": "one two", "continuation": "three"}\n' * 3,
    "__MACOSX/eval_bundle/._core.yaml": "left over",
}


def zipped(files: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


@dataclass
class Mirror:
    """What the server gives, and how often it was asked; `sends` bytes of it at most in an answer."""

    content: bytes
    sends: int = 10**9
    status: int = 200
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Iterator[Mirror]:
    told = Mirror(zipped(FILES))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            begins = int(self.headers.get("Range", "bytes=0-")[6:-1])
            told.asked.append(f"{self.path} {begins}")
            rest = told.content[begins:]
            self.send_response(told.status if told.status != 200 or not begins else 206 if rest else 416)
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest[: told.sends])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    told.url = f"http://127.0.0.1:{server.server_port}/core.zip"
    monkeypatch.setenv("ANABATIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(core_suite.URL_VARIABLE, told.url)
    monkeypatch.setenv(core_suite.SHA256_VARIABLE, hashlib.sha256(told.content).hexdigest())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield told
    server.shutdown()
    server.server_close()


def test_fetched_once_from_a_mirror_and_verified_each_time(mirror, monkeypatch):
    found = registry.plan_tasks(["core"])
    assert [one.task.name for one in found.tasks] == ["last"] and mirror.asked == ["/core.zip 0"]
    assert len(prepare_task(found.tasks[0], EvalOptions()).items) == 3
    folder = found.tasks[0].task_folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", "eval_bundle"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    registry.plan_tasks(["core"])
    assert len(mirror.asked) == 1
    (folder / "eval_data" / "a" / "last.jsonl").write_text('{"context": "one two", "continuation": "four"}\n')
    with pytest.raises(DataError, match="has the checksum"):
        prepare_task(registry.plan_tasks(["core"]).tasks[0], EvalOptions())


def test_a_download_that_broke_off_goes_on(mirror):
    mirror.sends = 200
    with pytest.raises(DataError, match="broke off: 200 of"):
        core_suite.fetch_bundle()
    mirror.sends = 10**9
    assert (core_suite.fetch_bundle() / "core.yaml").read_text() == YAML
    assert mirror.asked == ["/core.zip 0", "/core.zip 200"]


@pytest.mark.parametrize("status", [403, 500])
def test_a_server_that_refuses(mirror, status):
    mirror.status = status
    with pytest.raises(DataError, match=f"answers {status}") as error:
        core_suite.fetch_bundle()
    assert core_suite.URL_VARIABLE in error.value.hint


def test_another_file_is_refused_and_not_kept(mirror, monkeypatch):
    monkeypatch.delenv(core_suite.SHA256_VARIABLE)
    with pytest.raises(DataError, match=f"should have {core_suite.SHA256[:12]}"):
        core_suite.fetch_bundle()
    assert not list((core_suite.get_cache_root() / "core").rglob("*.part"))
    for wrong in ("abc", "x" * 64):
        monkeypatch.setenv(core_suite.SHA256_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=core_suite.SHA256_VARIABLE):
            core_suite.fetch_bundle()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a page of a proxy", "no zip file"),
        (zipped({"eval_bundle/readme": "x"}), r"holds no eval_bundle/core\.yaml"),
        (zipped({**FILES, "eval_bundle/../../up": "x"}), "holds the path"),
    ],
)
def test_what_is_no_bundle_is_not_unpacked(mirror, monkeypatch, content, message):
    mirror.content = content
    monkeypatch.setenv(core_suite.SHA256_VARIABLE, hashlib.sha256(content).hexdigest())
    with pytest.raises(DataError, match=message):
        core_suite.fetch_bundle()
    assert not list(core_suite.get_cache_root().rglob("core.yaml")) and not list(
        core_suite.get_cache_root().rglob("up")
    )


def test_no_network_and_no_address(mirror, monkeypatch):
    monkeypatch.setenv(core_suite.URL_VARIABLE, "ftp://example.org/x.zip")
    with pytest.raises(ConfigError, match="ftp://example"):
        core_suite.fetch_bundle()
    monkeypatch.setenv(core_suite.URL_VARIABLE, "http://127.0.0.1:9/x.zip")
    with pytest.raises(DataError, match="broke off"):
        core_suite.fetch_bundle()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        core_suite.fetch_bundle()
