"""Several processes that pose as machines tokenise together: equal shards, failures on all ranks, no limit of a wait."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
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
from anabatic.core import log
from anabatic.core.errors import AnabaticError
from anabatic.data.readers import source_parts
from anabatic.data.shards import builder_team, dataset_cache
from anabatic.data.shards.builder_team import join_builder_team
from anabatic.parallel.process_groups import World
from anabatic.testing.multiprocess import spawn_ranks
from anabatic.testing.tiny_corpora import write_byte_tokenizer

COLLECTIVE_LIMIT = timedelta(seconds=6)


class Parts(logging.Handler):
    """Counts the parts that this process has finished, and calls something after each."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.count, self.then = 0, then

    def emit(self, record: logging.LogRecord) -> None:
        if "is finished" in record.getMessage():
            self.count += 1
            self.then()


def join(machines: int, then: Callable[[], None] = lambda: None) -> tuple[World, Parts]:
    """Meet as one of several machines; ranks beyond their number are second ranks of one."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = str(rank // machines)
    dist.init_process_group("gloo", timeout=COLLECTIVE_LIMIT)
    source_parts.MIN_PART_BYTES = 3000
    parts = Parts(then)
    log.LOGGER.addHandler(parts)
    log.LOGGER.setLevel(logging.DEBUG)
    return World(rank, size), parts


def build(folder: Path, specs: list[str], machines: int, cache: str) -> None:
    world, parts = join(machines, lambda: time.sleep(0.05))
    cache = cache.replace("RANK", os.environ["RANK"])
    sets = build_both(folder, specs, world, cache)
    told = {"parts": parts.count, "tokens": [one.num_tokens for one in sets], "paths": [str(one.path) for one in sets]}
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


@pytest.mark.parametrize(("ranks", "machines"), [(2, 2), (3, 3), (3, 2)])
def test_shards_are_those_of_one_process(corpora: Path, tmp_path: Path, ranks: int, machines: int) -> None:
    specs = [str(corpora / name) for name in ("rows.jsonl", "chats.jsonl", "rows.parquet", "many")]
    build_both(corpora, specs, World(), str(tmp_path / "alone"))
    spawn_ranks(build, ranks, corpora, specs, machines, str(tmp_path / "together"))
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")
    told = [json.loads((corpora / f"told-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one["parts"] > 5 for one in told[:machines]) and not any(one["parts"] for one in told[machines:]), told
    assert all(one["tokens"] == told[0]["tokens"] for one in told)
