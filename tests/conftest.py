"""What every test may rely on: no network, one torch thread, its own folder and home, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from suite import isolation

isolation.isolate_process()  # before anything imports torch or transformers

import hypothesis  # noqa: E402

pytest_plugins = ["suite.plugin"]
ROOT = Path(__file__).resolve().parent.parent

# Without time limits, as a busy machine is no mistake of the code. The same examples each time, so that a run fails for
# what was changed; `--hypothesis-profile=explore` draws others.
hypothesis.settings.register_profile("explore", deadline=None, database=None)
hypothesis.settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup; programs would inherit it
    signal.signal(signal.SIGHUP, lambda *_: None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the test its own home, cache and working folder, and restore the environment afterwards."""
    with isolation.own_place(tmp_path_factory.mktemp("place", numbered=True)):
        yield


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    """Restore the global state of torch and numpy, where a test has imported them."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            torch.set_default_device(None)  # torch 2.7 cannot be asked for the default any more after this
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_flush_denormal(False)  # choosing a CPU switches it on; hypothesis refuses to work under it
        torch.use_deterministic_algorithms(False)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Remove the log handlers and signal handlers that a test installed."""
    import logging

    logger = logging.getLogger("anabatic")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    signals = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout (or ANABATIC_TEST_DATA); skips where there is none."""
    folder = Path(os.environ.get("ANABATIC_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no test data beside the checkout (set ANABATIC_TEST_DATA to a folder that has it)")
    return folder
