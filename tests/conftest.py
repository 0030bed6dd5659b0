"""What every test may rely on: no network, one torch thread, its own cache, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch or transformers; processes that tests start inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    NO_COLOR="1",
    LC_ALL="C.UTF-8",  # reports and messages are in the language of the locale
)
# Containers often forbid bytecode files; without them every start compiles some 2,000 modules again, 3 to 5 s each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no mistake of the code
hypothesis.settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup; programs would inherit it
    signal.signal(signal.SIGHUP, lambda *_: None)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path) -> Iterator[None]:
    """Give the test its own cache and restore the environment and the folder afterwards."""
    before, folder = dict(os.environ), Path.cwd()
    os.environ["ANABATIC_CACHE"] = str(tmp_path / "cache")
    yield
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep together what shares something: simulated machines stand in one list, commands share their models.

    `--dist loadgroup` of pytest-xdist 3.8 finds no groups under pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(("tests/npu_sim", "tests/unit/sim")):
                return "sim"
            families = [name for name in ("e2e", "pages") if nodeid.startswith(f"tests/{name}")]
            return families[0] if families else nodeid.split("::")[0]

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator that this machine does not have, with the reason."""
    for kind in ("npu", "cuda"):
        marked = [item for item in items if item.get_closest_marker(kind)]
        if marked and not _has(kind):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"no {kind} device here"))


def _has(kind: str) -> bool:
    import torch

    module = getattr(torch, kind, None)  # torch.npu exists only where torch_npu is installed
    return module is not None and bool(module.is_available())
