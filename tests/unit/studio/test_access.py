"""Who is let in: tokens, cookies, hosts, pages of other sites. test_other_users.py: users of this machine."""

from __future__ import annotations

import json

import httpx2
import pytest

from anabatic.infer.web import pages as web_pages
from unit.studio.serving import TOKEN, studio
from unit.web_libraries import NEEDS_LIBRARIES


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    with studio(tmp_path_factory.mktemp("locked"), token=TOKEN) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ({"Cookie": f"studio-test={TOKEN}"}, 401),
        ({"Cookie": "studio-test="}, 401),
        ({"Cookie": 'a"b[]=x; studio-test=x'}, 401),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}, 421),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Authorization": "Bearer é".encode("latin-1").decode("latin-1")}, 401),
    ],
)
def test_requests_for_data(locked, headers, status):
    with httpx2.Client(base_url=locked.url) as client:
        request = client.build_request("GET", "/api/state")
        for name, value in headers.items():
            request.headers[name] = value
        answer = client.send(request)
    assert answer.status_code == status


def test_state_is_changed_by_json_of_the_own_page_alone(locked):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = json.dumps({"command": "tokenizer train", "text": "data: {train: [a.txt]}"})
    with httpx2.Client(base_url=locked.url, headers=headers) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = client.post("/api/recipe", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 415
        origin = {"Content-Type": "application/json", "Origin": locked.url.replace("127.0.0.1", "localhost")}
        assert client.post("/api/recipe", content=body, headers=origin).status_code == 403
        assert client.post("/api/recipe", content=body, headers={**origin, "Origin": locked.url}).status_code == 200
        assert client.get("/api/jobs/1/stop").status_code == 405
        assert client.post("/api/recipe", content=b"x" * (5 << 20), headers=origin).status_code in (403, 413)


def test_the_address_with_the_token_logs_in_once(locked):
    with httpx2.Client(base_url=locked.url, follow_redirects=False) as client:
        answer = client.get("/", params={"token": TOKEN})
        assert answer.status_code == 303 and TOKEN not in answer.headers["location"]
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert client.get("/api/state").status_code == 200
    with httpx2.Client(base_url=locked.url, follow_redirects=False) as client:
        assert "set-cookie" not in client.get("/", params={"token": "wrong"}).headers
        assert client.get("/api/state").status_code == 401
        assert client.post("/api/login", json={"token": "wrong"}).status_code == 401
        assert client.post("/api/login", json={"token": TOKEN}).status_code == 200
        assert client.get("/api/state").status_code == 200
    assert b"token" not in httpx2.get(f"{locked.url}/api/state").headers.get("set-cookie", "").encode()


def test_a_login_ends_with_its_studio(locked, tmp_path):
    """Browsers send a cookie to every port: another user's server at ours must not get one that lets it in later."""
    cookies = {}
    with studio(tmp_path, token=TOKEN) as earlier, httpx2.Client(base_url=earlier.url) as client:
        assert client.post("/api/login", json={"token": TOKEN}).status_code == 200
        cookies = dict(client.cookies)
    assert list(cookies) == ["studio-test"]
    with httpx2.Client(base_url=locked.url, cookies=cookies) as client:
        assert client.get("/api/state").status_code == 401


def test_the_empty_pages_are_open_and_allow_no_foreign_program(locked):
    for path in ("/", "/chat"):
        page = httpx2.get(locked.url + path)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


@NEEDS_LIBRARIES
def test_the_libraries_of_the_chat_page_are_as_open_as_the_page(locked):
    path = "/" + web_pages.load_libraries().path
    with httpx2.Client(base_url=locked.url) as client:
        page = client.get("/chat")
        assert f'src="{path[1:]}"' in page.text and web_pages.load_libraries().integrity in str(page.headers)
        answer = client.get(path, headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "no-cors"})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/javascript")
        assert (
            client.get(path, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}).status_code == 403
        )
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/assets/other.js").status_code == 404
        assert client.get("/assetsx").status_code == 401
