"""What the commands under test share: text, a tokenizer, a base model and its losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabatic.testing.tiny_models import write_tiny_text
from e2e.home import Home
from e2e.hub_home import HubHome, hub_home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Text and a tokenizer trained on it."""
    root = tmp_path_factory.mktemp("home")
    made = Home(root, write_tiny_text(root), root / "tokenizer", root / "cache")
    made.anabatic("tokenizer", "train", "--data.train", made.text, "--vocab-size", 320, "--out", made.tokenizer)
    return made


@pytest.fixture(scope="session")
def both(home: Home) -> tuple[Path, Path]:
    """The run folders of one pretraining in one process and in two."""
    one, two = home.root / "base", home.root / "base2"
    more = {"log.rows": True}
    home.together(home.pretrain(one, more=more), home.pretrain(two, 2, more=more))
    return one, two


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for all tests of a module."""
    from e2e.browser import started

    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def player(browser: Any) -> Iterator[Any]:
    """A server with the chat page that plays answers."""
    from e2e.openai_streams import playing

    with playing() as made:
        yield made
        browser.get("about:blank")


@pytest.fixture
def page(browser: Any, player: Any) -> Any:
    """The chat page of `player`."""
    from e2e.chat_browser import opened

    return opened(browser, player.url)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these run commands, several of them one after the other; a slow machine needs minutes."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))
