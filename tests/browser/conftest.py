"""A browser for each module of tests, and the chat page with a server that plays answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for all tests of a module."""
    from browser.chromium import started

    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def player(browser: Any) -> Iterator[Any]:
    """A server with the chat page that plays answers."""
    from browser.openai_streams import playing

    with playing() as made:
        yield made
        browser.get("about:blank")


@pytest.fixture
def page(browser: Any, player: Any) -> Any:
    """The chat page of `player`."""
    from browser.chat_page import opened

    return opened(browser, player.url)
