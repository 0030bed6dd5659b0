"""The paths of the page of runs."""

from __future__ import annotations

import pytest

from anabatic.infer.web.run_browser import RunBrowser
from anabatic.testing.fake_runs import HOSTILE_TEXT, write_jsonl, write_training_run
from unit.infer.server.running import KEY, catalogue_of, serving


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_training_run(root / "a", steps=30)
    write_jsonl(
        root / "b" / "metrics.jsonl", [{"step": 1, "kind": "sample", "prompt": HOSTILE_TEXT, "text": HOSTILE_TEXT}]
    )
    with serving(catalogue_of({}), keys=[KEY], runs=RunBrowser(root)) as running:
        yield running


def ask(watched, path, key=KEY):
    with watched.client(headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
        return client.get(path)


def test_only_the_page_itself_needs_no_key(watched):
    page = ask(watched, "/runs", None)
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert ask(watched, "/", None).headers["location"] == "runs"
    (key,) = [row["id"] for row in ask(watched, "/runs/list").json()["runs"] if row["name"] == "a"]
    for path in ("list", f"{key}/curves", f"{key}/about", f"{key}/log/0", f"{key}/report"):
        assert ask(watched, f"/runs/{path}", None).status_code == 401
        assert ask(watched, f"/runs/{path}", "sk-wrong").status_code == 401
    assert ask(watched, f"/runs/{key}/curves").json()["curves"]["loss"]["points"][0] == list(range(1, 31))
    assert "<!doctype html>" in ask(watched, f"/runs/{key}/report").json()["html"]


@pytest.mark.parametrize(
    "path", ["x/curves", "../a/about", "..%2fa/about", "%00/about", "x/log/0", "x/log/" + "9" * 5000]
)
def test_what_is_not_listed_is_not_there(watched, path):
    assert ask(watched, f"/runs/{path}").status_code in (400, 404)


def test_half_characters_come_as_escapes(watched):
    rows = ask(watched, "/runs/list").json()["runs"]
    for row in rows:
        answer = ask(watched, f"/runs/{row['id']}/about")
        assert answer.status_code == 200
        assert row["name"] == "a" or answer.json()["samples"][0]["prompt"] == HOSTILE_TEXT
        assert ask(watched, f"/runs/{row['id']}/log/0").status_code == 404


def test_without_a_folder_there_is_no_page(server):
    with server.client() as client:
        assert client.get("/runs").status_code == 404
        assert 'href="runs"' not in client.get("/").text
