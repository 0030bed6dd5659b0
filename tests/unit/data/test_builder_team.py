"""Processes that pose as machines tokenise together: equal shards, failures on all ranks, no limit of a wait."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed as dist

from anabatic.config.sections.common import Data
from anabatic.core import log, relaunch
from anabatic.core.errors import AnabaticError, DataError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.readers import source_parts
from anabatic.data.shards import builder_team, dataset_cache
from anabatic.data.shards.builder_team import join_builder_team
from anabatic.launch.local.watchdog import HangWatchdog
from anabatic.parallel.world import World
from anabatic_testing.multiprocess import run_mortal_ranks, spawn_ranks
from anabatic_testing.tiny_corpora import write_byte_tokenizer

COLLECTIVE_LIMIT = timedelta(seconds=8)


class Parts(logging.Handler):
    """Counts the parts that this process has finished, and calls something after each."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.count, self.then = 0, then
        self.progress: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "tokenising " in record.getMessage():
            self.progress.append(record.getMessage())
        if "is finished" in record.getMessage():
            self.count += 1
            self.then()


def join(machines: int, then: Callable[[], None] = lambda: None) -> tuple[World, Parts]:
    """Meet as one of several machines; ranks beyond their number are second ranks of one."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = str(rank // machines)
    dist.init_process_group("gloo")
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(COLLECTIVE_LIMIT, None)
    source_parts.MIN_PART_BYTES = 3000
    parts = Parts(then)
    log.LOGGER.addHandler(parts)
    log.LOGGER.setLevel(logging.DEBUG)
    return World(rank, size), parts


def build(folder: Path, specs: list[str], machines: int, cache: str, part_seconds: float = 0.05) -> None:
    world, parts = join(machines, lambda: time.sleep(part_seconds))
    HEARTBEAT.open()  # of ranks that have met
    start = time.monotonic()
    cache = cache.replace("RANK", os.environ["RANK"])
    sets = build_both(folder, specs, world, cache)
    seconds = time.monotonic() - start
    told = {
        "parts": parts.count,
        "seconds": seconds,
        "progress": parts.progress,
        "tokens": [one.num_tokens for one in sets],
    }
    (folder / f"told-{world.rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def build_both(folder: Path, specs: list[str], world: World, cache: str) -> list[Any]:
    data = Data(train=specs, cache=cache, valid_fraction=0.05, on_bad_row="skip")
    with join_builder_team(world, cache) as team:
        built = [
            part
            for split in ("train", "valid")
            for part, _ in dataset_cache.build_datasets(specs, folder / "tok", data, split, seq_len=64, team=team)
        ]
    return built


def files_of(cache: Path) -> dict[str, bytes]:
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and sources of every kind that is cut into parts."""
    folder = tmp_path_factory.mktemp("corpora")
    write_byte_tokenizer(folder / "tok")
    words = random.Random(0)

    def text() -> str:
        return " ".join(words.choice(["wind", "sea", "船", "up\nhill", "Ωmega"]) for _ in range(words.randrange(1, 60)))

    rows = [{"text": text()} for _ in range(400)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[77], lines[201] = "{broken", ""
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]}
        for _ in range(300)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats), encoding="utf-8")
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=30, compression="none")
    (folder / "many").mkdir()
    for number in range(40):
        (folder / "many" / f"{number}.txt").write_text("".join(text() for _ in range(20)), encoding="utf-8")
    (folder / "many" / "long.md").write_text("A long line.\n" * 6000)
    return folder


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "machines"), [(2, 2), (3, 3)])
def test_shards_are_those_of_one_process(corpora: Path, tmp_path: Path, ranks: int, machines: int) -> None:
    specs = [str(corpora / name) for name in ("rows.jsonl", "chats.jsonl", "rows.parquet", "many")]
    build_both(corpora, specs, World(), str(tmp_path / "alone"))
    spawn_ranks(build, ranks, corpora, specs, machines, str(tmp_path / "together"))
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")
    told = [json.loads((corpora / f"told-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["parts"] > 5 for one in told[:machines]) and not any(one["parts"] for one in told[machines:]), told
    assert all(one["tokens"] == told[0]["tokens"] for one in told)


@pytest.mark.process
def test_a_rank_waits_longer_than_a_collective_may_last(corpora: Path, tmp_path: Path) -> None:
    """And the launcher, which counts what does not move for a while as hung, sees progress of both ranks."""
    beats = tmp_path / "beats"
    beats.mkdir()
    watchdogs = [HangWatchdog(beats / str(rank), timeout=8.0) for rank in range(2)]
    hung, ended = [], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            hung.extend(dog for dog in watchdogs if dog.is_hung())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        spawn_ranks(build_slowly, 2, corpora, tmp_path, beats)
    finally:
        ended.set()
        watching.join()
    builder, waiting = (json.loads((corpora / f"told-{rank}.json").read_text()) for rank in range(2))
    assert builder["parts"] > 5 and waiting["parts"] == 0
    assert waiting["seconds"] > COLLECTIVE_LIMIT.total_seconds() + 1
    assert waiting["tokens"] == builder["tokens"]
    assert not hung
    assert not any(" of " in line for line in waiting["progress"])
    line = next(line for line in builder["progress"] if "tokens/s" in line)
    assert re.search(
        r"rows.jsonl \(train\): part \d+ of \d+, \S+ documents, \S+ tokens, \S+ tokens/s, about .* left", line
    )


def build_slowly(corpora: Path, folder: Path, beats: Path) -> None:
    """As `build`, with a heartbeat in a folder of this rank."""
    reports = beats / os.environ["RANK"]
    reports.mkdir()
    os.environ[relaunch.REPORTS_VARIABLE] = str(reports)
    builder_team.LOG_SECONDS = 1.0
    build(corpora, [str(corpora / "rows.jsonl")], 1, str(folder), 0.6)


@pytest.mark.process
def test_a_failure_is_reported_on_all_ranks_with_its_machine(corpora: Path, tmp_path: Path) -> None:
    rows = ['{"text": "fine"}'] * 300 + ["{broken"] + ['{"text": "fine"}'] * 300
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    codes = run_mortal_ranks(fail, 3, corpora, tmp_path, "machine 1 goes first")
    assert codes == [0, 0, 0]
    told = [json.loads((tmp_path / f"error-{rank}.json").read_text()) for rank in range(3)]
    kind, message, hint = told[0]
    assert kind == "DataError" and hint.startswith("write one JSON object a line")
    assert message.startswith(f"machine 1 ({socket.gethostname()}): ")
    assert f"{tmp_path / 'bad.jsonl'}: line 301: broken JSON" in message
    assert told == [told[0]] * 3


def fail(corpora: Path, folder: Path, _: str) -> None:
    """Two machines and a second rank of machine 0; all write down the error that they get."""
    world, _parts = join(2)
    cache = folder / "cache"
    try:
        with join_builder_team(world, str(cache)) as team:
            if world.rank == 0:
                time.sleep(1.5)  # machine 1 builds meanwhile
            data = Data(cache=str(cache), valid=["x"])
            dataset_cache.build_dataset(str(folder / "bad.jsonl"), corpora / "tok", data, "train", team=team)
    except AnabaticError as error:
        told = [type(error).__name__, str(error), error.hint]
        (folder / f"error-{world.rank}.json").write_text(json.dumps(told))
        if world.rank == 0:
            time.sleep(1.5)  # the store of this job lives in this process


@pytest.mark.process
def test_a_lost_machine_ends_the_job_and_its_finished_parts_are_kept(corpora: Path, tmp_path: Path) -> None:
    source = corpora / "rows.jsonl"
    codes = run_mortal_ranks(lose, 3, corpora, tmp_path, str(source))
    assert codes == [0, -signal.SIGKILL, 0]
    told = [json.loads((tmp_path / f"error-{rank}.json").read_text()) for rank in (0, 2)]
    assert told[0] == told[1]
    assert told[0][0] == "Failure" and told[0][1].startswith(f"machine 1 ({socket.gethostname()}): no sign of rank 1")
    (left,) = (tmp_path / "cache" / "shards").glob(".*.parts")
    planned = json.loads((left / "plan.json").read_text())["parts"]
    kept = [path for path in left.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert 3 <= len(kept) < len(planned)
    spawn_ranks(continue_build, 2, corpora, tmp_path, str(source))
    built = sum(int((tmp_path / f"built-{rank}").read_text()) for rank in range(2))
    assert built == len(planned) - len(kept)
    data = Data(cache=str(tmp_path / "alone"), valid=["x"], on_bad_row="skip")
    dataset_cache.build_dataset(str(source), corpora / "tok", data, "train")
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "alone")


def lose(corpora: Path, folder: Path, source: str) -> None:
    """Machine 1 is killed in its fourth part."""
    world, parts = join(2, lambda: time.sleep(0.1))
    builder_team.LOST_SECONDS = 4.0

    def die_in_fourth() -> None:
        if world.rank == 1 and parts.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_parts(die_in_fourth)
    try:
        build_one(corpora, folder, source, world)
    except AnabaticError as error:
        (folder / f"error-{world.rank}.json").write_text(json.dumps([type(error).__name__, str(error), error.hint]))
        if world.rank == 0:
            time.sleep(1.5)


def continue_build(corpora: Path, folder: Path, source: str) -> None:
    """Start again, and count the parts that are tokenised."""
    world, _ = join(2)
    written: list[int] = []
    watch_parts(lambda: written.append(1))
    build_one(corpora, folder, source, world)
    (folder / f"built-{world.rank}").write_text(str(len(written)))
    dist.barrier()
    dist.destroy_process_group()


def watch_parts(before: Callable[[], None]) -> None:
    """Call something before each part that this process tokenises."""
    write_part = dataset_cache._TokenizationJob.write_part

    def write(*given: Any) -> None:
        before()
        write_part(*given)

    dataset_cache._TokenizationJob.write_part = write  # type: ignore[method-assign, assignment]


def build_one(corpora: Path, folder: Path, source: str, world: World) -> None:
    data = Data(cache=str(folder / "cache"), valid=["x"], on_bad_row="skip")
    with join_builder_team(world, data.cache) as team:
        dataset_cache.build_dataset(source, corpora / "tok", data, "train", team=team)


@pytest.mark.process
def test_machines_without_a_common_cache_build_for_themselves(corpora: Path, tmp_path: Path) -> None:
    spawn_ranks(build, 2, corpora, [str(corpora / "rows.jsonl")], 2, str(tmp_path / "RANK"))
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1") != {}


def test_two_jobs_that_build_the_same_have_folders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "set"
    with builder_team._open_parts_folder(path) as first:
        (first / "00000").mkdir()
        with pytest.raises(DataError), builder_team._open_parts_folder(path) as second:
            assert second != first
            raise DataError("a bad row")
        assert not second.exists() and (first / "00000").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError), builder_team._open_parts_folder(path) as again:
        assert again == first
        (again / "00000").mkdir()
        raise DataError("a bad row")
    assert (first / "00000").exists(), "finished parts are kept"
