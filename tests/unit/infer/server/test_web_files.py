"""The libraries of the chat page at the server: who gets them, in which form, and what a page does without them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import shutil

import httpx2
import pytest

from anabatic.infer.web import libraries, pages
from unit.infer.server.running import KEY, catalogue_of, serving
from unit.web_libraries import NEEDS_LIBRARIES


@pytest.fixture(scope="module")
def locked(engine_parts):
    with serving(catalogue_of(engine_parts), keys=[KEY]) as running:
        yield running


@pytest.fixture
def other_folder(monkeypatch, tmp_path):
    """An installation whose libraries are in a folder of the test, empty at first."""
    monkeypatch.setattr(libraries, "FOLDER", tmp_path)
    for function in (pages.load_libraries, pages.chat_page):
        function.cache_clear()
    yield tmp_path
    for function in (pages.load_libraries, pages.chat_page):
        function.cache_clear()


def find_script(html):
    (found,) = re.findall(r'<script src="([^"]+)" integrity="([^"]+)"></script>', html)
    return found


@NEEDS_LIBRARIES
def test_the_page_names_the_file_and_its_checksum(locked):
    with locked.client() as client:
        page = client.get("/")
        path, integrity = find_script(page.text)
        assert not path.startswith("/") and "//" not in path  # it works below a prefix
        answer = client.get(f"/{path}")
    assert answer.status_code == 200
    digest = base64.b64encode(hashlib.sha256(answer.content).digest()).decode()
    assert integrity == f"sha256-{digest}"
    policy = page.headers["content-security-policy"]
    (sources,) = re.findall(r"script-src ([^;]*)", policy)
    assert f"'{integrity}'" in sources and len(sources.split()) == 2
    assert "self" not in sources and "unsafe" not in policy
    headers = answer.headers
    assert headers["content-type"] == "text/javascript; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert "immutable" in headers["cache-control"] and "max-age=31536000" in headers["cache-control"]


@NEEDS_LIBRARIES
@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("br, GZip;q=0.5", "gzip"),
        ("gzip;q=0, identity", None),
        ("identity", None),
        ("x-gzip-like", None),
    ],
)
def test_it_comes_compressed_to_those_that_can_read_it(server, accepted, coding):
    path = "/" + pages.load_libraries().path
    with server.client() as client, client.stream("GET", path, headers={"Accept-Encoding": accepted}) as answer:
        assert answer.headers.get("content-encoding") == coding and answer.headers["vary"] == "Accept-Encoding"
        raw = b"".join(answer.iter_raw())
    assert (gzip.decompress(raw) if coding else raw) == pages.load_libraries().content
    assert len(raw) < 300_000 or not coding


@NEEDS_LIBRARIES
def test_who_has_it_gets_no_copy(server):
    path = "/" + pages.load_libraries().path
    with server.client() as client:
        tag = client.get(path).headers["etag"]
        for given in (tag, f'"other", W/{tag}'):
            answer = client.get(path, headers={"If-None-Match": given})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        assert client.head(path).status_code == 200
        assert client.post(path, json={}).status_code == 405


@pytest.mark.parametrize(
    "name",
    ["", "libraries.js", "libraries-0000000000000000.js", "../libraries.json", "%2e%2e/libraries.py", "x/y", "%00"],
)
def test_there_is_nothing_else(locked, name):
    answer = httpx2.get(f"{locked.url}/assets/{name}", timeout=60)
    assert answer.status_code in (401, 404)
    assert answer.headers["content-type"].startswith("application/json")


def test_a_page_without_the_libraries(server, other_folder):
    with server.client() as client:
        page = client.get("/")
        assert "<script src" not in page.text
        (sources,) = re.findall(r"script-src ([^;]*)", page.headers["content-security-policy"])
        assert len(sources.split()) == 1
        assert client.get("/assets/libraries-0000000000000000.js").status_code == 404


@NEEDS_LIBRARIES
def test_a_changed_library_is_left_out_with_a_warning(server, other_folder, caplog, monkeypatch):
    monkeypatch.setattr("anabatic.core.log.LOGGER.propagate", True)
    source = pages.WEB_FOLDER / "libraries"
    shutil.copytree(source, other_folder, dirs_exist_ok=True)
    (other_folder / "temml" / "temml.min.js").write_text("stolen = 1")
    with server.client() as client:
        path, _ = find_script(client.get("/").text)
        content = client.get(f"/{path}").text
    assert "stolen" not in content and "var temml" not in content and "markdownit" in content
    assert "without some formats" in caplog.text and "temml" in caplog.text
