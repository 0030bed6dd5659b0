"""Jobs as processes: order, devices, stop, kill, failures, and a studio that ends before them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from anabatic.core import process_info
from anabatic.core.errors import ConfigError, DeviceError
from anabatic.launch.local.device_selection import DeviceSelection
from anabatic_studio.jobs import store as states
from anabatic_studio.jobs.job_queue import JobQueue
from anabatic_studio.jobs.store import StudioStore

QUICK = "data: {{train: [{text}]}}\nvocab_size: 280\nout: {out}\n"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    words = "".join(f"the wind number {index} went up slope {index * 7919}\n" for index in range(300))
    path.write_text(words, encoding="utf-8")
    return path


def quick(tmp_path, text, name="t"):
    return QUICK.format(text=text, out=tmp_path / name)


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    stores = []

    def make(**more):
        stores.append(StudioStore(folder / "s.sqlite3"))
        return JobQueue(stores[-1], folder, **more), stores[-1]

    yield make
    for store in stores:
        store.close()


def run_until(queue, store, job_id, *wanted, seconds=120):
    end = time.monotonic() + seconds
    while (record := store.get_job(job_id)).state not in wanted:
        queue.poll_jobs()
        assert record.state not in states.ENDED_STATES, (record, queue.read_log(job_id, 0)[0][-2000:])
        assert time.monotonic() < end, (record, queue.read_log(job_id, 0)[0][-2000:])
        time.sleep(0.05)
    return record


@pytest.mark.process
def test_jobs_run_in_order_and_keep_their_output(made, tmp_path, text):
    queue, store = made()
    first = queue.submit_job("tokenizer train", quick(tmp_path, text, "one"))
    second = queue.submit_job("tokenizer train", quick(tmp_path, text, "two"), "named")
    assert (first.name, second.name) == ("one", "named")
    run_until(queue, store, first.id, states.RUNNING)
    assert store.get_job(second.id).state == states.QUEUED
    done = run_until(queue, store, second.id, states.FINISHED)
    assert done.exit_code == 0 and done.ended >= done.started >= store.get_job(first.id).ended - 1
    assert (tmp_path / "two" / "tokenizer.json").is_file()
    log, end = queue.read_log(first.id, 0)
    assert "280 entries" in log and queue.read_log(first.id, end) == ("", end)


@pytest.mark.process
def test_a_job_that_fails_says_why_and_can_run_again(made, tmp_path, text):
    queue, store = made()
    job = queue.submit_job("tokenizer train", quick(tmp_path, tmp_path / "nowhere.txt"))
    failed = run_until(queue, store, job.id, states.FAILED)
    assert failed.exit_code == 2 and "nowhere.txt" in failed.message
    (tmp_path / "nowhere.txt").write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    queue.restart_job(job.id)
    assert run_until(queue, store, job.id, states.FINISHED).message == ""


def test_a_wrong_recipe_is_not_queued(made):
    queue, store = made()
    for command, recipe in (("nothing", ""), ("sft", "modell: x"), ("sft", "- a"), ("sft", "\0")):
        with pytest.raises(ConfigError):
            queue.submit_job(command, recipe)
    assert store.list_jobs() == []


@pytest.mark.process
def test_a_running_job_is_stopped_and_then_killed(made, tmp_path, text):
    queue, store = made()
    corpus = tmp_path / "big.txt"
    corpus.write_text("".join(f"word{index} and more {index * 7919}\n" for index in range(400_000)), encoding="utf-8")
    job = queue.submit_job("tokenizer train", QUICK.format(text=corpus, out=tmp_path / "big").replace("280", "30000"))
    running = run_until(queue, store, job.id, states.RUNNING)
    assert process_info.read_start_time(running.pid) == running.process_start
    with pytest.raises(ConfigError, match="is running"):
        queue.remove_job(job.id)
    queue.stop_job(job.id)
    queue.stop_job(job.id)
    stopped = run_until(queue, store, job.id, states.STOPPED, seconds=20)
    assert stopped.devices == [] and not process_info.read_start_time(running.pid)
    queue.remove_job(job.id)
    assert store.list_jobs() == [] and not list((tmp_path / "state").glob(f"{job.id}.*"))


def test_a_queued_job_is_not_started_when_stopped_and_moves(made, tmp_path, text):
    queue, store = made(select_devices=lambda *_: (_ for _ in ()).throw(DeviceError("8 of 8 are in use")))
    jobs = [
        queue.submit_job("sft", f"model: {tmp_path}\nout: {tmp_path / name}\ndata: {{train: [{text}]}}\n")
        for name in "abc"
    ]
    queue.poll_jobs()
    assert store.get_job(jobs[0].id).message == "8 of 8 are in use"
    queue.move_job(jobs[2].id, jobs[0].id)
    assert [job.name for job in store.list_jobs()] == ["c", "a", "b"]
    queue.move_job(jobs[2].id, None)
    assert [job.name for job in store.list_jobs()] == ["a", "b", "c"]
    with pytest.raises(KeyError):
        queue.move_job(jobs[0].id, 999)
    queue.stop_job(jobs[0].id)
    assert store.get_job(jobs[0].id).state == states.STOPPED
    with pytest.raises(ConfigError, match="has ended"):
        queue.stop_job(jobs[0].id)


@pytest.mark.process
def test_devices_are_taken_once_and_given_back(made, tmp_path, text):
    asked = []

    def select(kind, count, reserved):
        asked.append((kind, count, list(reserved)))
        free = [index for index in range(2) if index not in reserved]
        if len(free) < count:
            raise DeviceError("no device is free")
        return DeviceSelection("npu", (), tuple(free[:count]), {"ASCEND_RT_VISIBLE_DEVICES": str(free[0])})

    queue, store = made(select_devices=select, reserved_devices=lambda: [1])
    recipe = f"model: {tmp_path}\nout: {{}}\ndata: {{{{train: [{text}]}}}}\n"
    first = queue.submit_job("sft", recipe.format(tmp_path / "a"))
    second = queue.submit_job("sft", recipe.format(tmp_path / "b"))
    queue.poll_jobs()
    assert store.get_job(first.id).devices == [0] and store.get_job(second.id).state == states.QUEUED
    assert asked == [("auto", 1, [1]), ("auto", 1, [0, 1])]
    run_until(queue, store, first.id, states.FAILED)  # the folder holds no model
    assert store.get_job(first.id).devices == []
    run_until(queue, store, second.id, states.FAILED)


@pytest.mark.process
def test_a_job_outlives_the_studio_and_is_found_again(made, tmp_path, text):
    queue, store = made()
    done = queue.submit_job("tokenizer train", quick(tmp_path, text, "one"))
    queue.poll_jobs()
    pid = store.get_job(done.id).pid
    store.close()
    queue, store = made()  # another studio over the same folder
    assert store.get_job(done.id).pid == pid
    assert run_until(queue, store, done.id, states.FINISHED).exit_code == 0


@pytest.mark.process
def test_relative_paths_start_where_the_job_was_written(made, tmp_path, text, monkeypatch):
    queue, store = made()
    monkeypatch.chdir(tmp_path)
    job = queue.submit_job("tokenizer train", QUICK.format(text=text.name, out="near"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # a studio that was started in another folder
    run_until(queue, store, job.id, states.FINISHED)
    assert (tmp_path / "near" / "tokenizer.json").is_file() and not list((tmp_path / "elsewhere").iterdir())


def test_a_log_is_read_on_in_whole_characters(made, tmp_path, text):
    queue, store = made()
    job = store.add_job("sft", "n", "", "", "")
    data = "步数 1/60\n".encode()
    queue.get_log_file(job.id).write_bytes(data[:4])
    first, offset = queue.read_log(job.id, 0)
    queue.get_log_file(job.id).write_bytes(data)
    rest, end = queue.read_log(job.id, offset)
    assert (first, first + rest, end) == ("步", data.decode(), len(data))
    queue.get_log_file(job.id).write_bytes(b"\xff!")
    assert queue.read_log(job.id, 99) == ("\ufffd!", 2)


@pytest.mark.process
def test_a_process_that_vanished_is_lost(made, tmp_path, text):
    queue, store = made()
    job = queue.submit_job("tokenizer train", quick(tmp_path, text))
    queue.poll_jobs()
    record = store.get_job(job.id)
    os.killpg(record.pid, signal.SIGKILL)
    lost = run_until(queue, store, job.id, states.LOST, seconds=20)
    assert "without an exit code" in lost.message
    store.update_job(lost, state=states.RUNNING, pid=os.getpid(), process_start=1)  # the id of another process now
    queue.poll_jobs()
    assert store.get_job(job.id).state == states.LOST
    assert Path(f"/proc/{os.getpid()}").exists()
