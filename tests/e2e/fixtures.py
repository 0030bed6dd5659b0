"""What the commands under test share: text, a tokenizer, a base model and its losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anabatic_testing.tiny_models import write_tiny_text
from e2e.home import Home
from e2e.hub_home import HubHome, hub_home
from suite.shared import build_once


def build_home(factory: pytest.TempPathFactory, name: str, simulator: Path | None = None) -> Home:
    """Return text and a tokenizer trained on it, made once for all workers.

    Args:
        simulator: folder with the build of the simulator; the home's cache gets a link to it.
    """

    def build(root: Path) -> None:
        made = locate(root)
        made.cache.mkdir()
        if simulator is not None:
            (made.cache / "sim").symlink_to(simulator)
        write_tiny_text(root)
        made.anabatic("tokenizer", "train", "--data.train", made.text, "--vocab-size", 320, "--out", made.tokenizer)

    def locate(root: Path) -> Home:
        return Home(root, root / "text.jsonl", root / "tokenizer", root / "cache")

    return locate(build_once(factory, name, build))


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The home that all workers read."""
    return build_home(tmp_path_factory, "home")


@pytest.fixture(scope="session")
def home(shared_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The same text, tokenizer and cache, with a folder of this worker for what tests make."""
    return replace(shared_home, root=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def both(shared_home: Home, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run folders of one pretraining in one process and in two, made once for all workers."""

    def build(root: Path) -> None:
        more = {"log.rows": True}
        shared_home.together(
            shared_home.pretrain(root / "base", more=more), shared_home.pretrain(root / "base2", 2, more=more)
        )

    root = build_once(tmp_path_factory, f"{shared_home.root.name}-runs", build)
    return root / "base", root / "base2"


@pytest.fixture(scope="session")
def base(both: tuple[Path, Path]) -> Path:
    """The run folder of a pretraining in one process that nobody disturbed; it must not be written to."""
    return both[0]


@pytest.fixture(scope="session")
def base2(both: tuple[Path, Path]) -> Path:
    """The same in two processes."""
    return both[1]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubHome]:
    """A hub with one data set, and commands that ask it."""
    with hub_home(tmp_path_factory.mktemp("hub")) as made:
        yield made
