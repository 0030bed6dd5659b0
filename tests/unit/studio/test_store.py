"""The studio's database: jobs in order, notes, and files that are none."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from anabatic.core.errors import DataError
from anabatic_studio.jobs.store import FINISHED, QUEUED, RunNote, StudioStore


def test_jobs_keep_their_order_and_fields(tmp_path):
    store = StudioStore(tmp_path / "s.sqlite3")
    first, second = store.add_job("sft", "a", "model: x\n", "runs/a", "/w"), store.add_job("eval", "b", "", "", "/w")
    assert [job.name for job in store.list_jobs()] == ["a", "b"]
    store.update_job(second, position=first.position - 1, devices=[2, 3], state=FINISHED, exit_code=0)
    store.close()
    store = StudioStore(tmp_path / "s.sqlite3")
    assert [(job.name, job.devices, job.exit_code) for job in store.list_jobs()] == [("b", [2, 3], 0), ("a", [], None)]
    assert [job.name for job in store.list_jobs((QUEUED,))] == ["a"]
    store.remove_job(first.id)
    with pytest.raises(KeyError):
        store.get_job(first.id)


def test_notes(tmp_path):
    store = StudioStore(tmp_path / "s.sqlite3")
    store.set_note("a/b", RunNote("text '; DROP TABLE notes; --", ("x", "标签")))
    store.set_note("a/b", RunNote("later", ("x",)))
    assert store.get_notes() == {"a/b": RunNote("later", ("x",))}
    store.set_note("a/b", RunNote())
    assert store.get_notes() == {}


def test_several_threads(tmp_path):
    store = StudioStore(tmp_path / "s.sqlite3")
    threads = [
        threading.Thread(target=lambda: [store.add_job("sft", "n", "", "", "") for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job.id for job in store.list_jobs()}) == 80


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "s.sqlite3"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be used"):
        StudioStore(path)
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be used"):
        StudioStore(tmp_path)


def test_a_newer_database_is_refused(tmp_path):
    path = tmp_path / "s.sqlite3"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(DataError, match="version 99"):
        StudioStore(path)


@pytest.mark.parametrize("value", ["", "[", "{}", '["a"]', "[1, 2", "null", "[1.5]"])
def test_damaged_devices_do_not_end_the_queue(tmp_path, value):
    path = tmp_path / "s.sqlite3"
    store = StudioStore(path)
    job = store.add_job("sft", "n", "seed: 1\n", "runs/a", "/work")
    store.update_job(job, devices=[0, 1])
    store.close()
    with sqlite3.connect(path) as rows:
        rows.execute("UPDATE jobs SET devices = ?", (value,))
        rows.execute("INSERT INTO notes VALUES ('runs/a', 'good', ?, 1.0)", (value if value != '["a"]' else "[1]",))
    rows.close()
    store = StudioStore(path)
    [kept] = store.list_jobs()
    assert kept.devices == [] and kept.recipe == "seed: 1\n"
    assert store.get_notes()["runs/a"].text == "good" and store.get_notes()["runs/a"].tags == ()
    store.close()


def test_a_page_that_is_damaged_is_an_error_of_ours(tmp_path):
    path = tmp_path / "s.sqlite3"
    store = StudioStore(path)
    store.add_job("sft", "n", "", "", "")
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * len(content[4096:])
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be used") as caught:
        store = StudioStore(path)
        store.list_jobs()
    assert "move it away" in str(caught.value.hint)
    assert path.read_bytes()[4096:] == bytes(content)[4096:]
