"""A reader, and what may come of it: a result or an error of ours, in bounded time and memory."""

from __future__ import annotations

import logging
import math
import os
import random
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from anabatic.core.errors import AnabaticError
from fuzz.engine import Good, damaged

TIMES = float(os.environ.get("ANABATIC_TEST_FUZZ") or 1)
"""How many times the cases of `make test-all`; `make test` runs a tenth of them."""
CPU_SECONDS = 30
"""Of one case: what is not done by then hangs."""
MEMORY = 700 << 20
"""Bytes that the cases of one reader may add to the process."""


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        name: of its test.
        good: files that it reads, made once; several are beside each other in one folder, and one is damaged.
        read: reads the folder's file; its result is thrown away.
        cases: damaged files in an ordinary run.
        refuses: errors beside ours that the callers of this reader promise to take.
        needs: a module without which the test is skipped.
    """

    name: str
    good: Callable[[], Sequence[Good]]
    read: Callable[[Path], object]
    cases: int = 60
    refuses: tuple[type[BaseException], ...] = ()
    needs: str = ""


class Hang(BaseException):
    """A case took more than `CPU_SECONDS`."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise `Hang` where the body uses more than `CPU_SECONDS` of this process's time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def unlogged() -> Iterator[None]:
    """Log nothing: pytest's workers cannot send the lone surrogates of damaged files."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def attempt(read: Callable[[], object], allowed: tuple[type[BaseException], ...] = ()) -> str:
    """Return what a reader must not do, with the place in the code; empty: it did as it should."""
    try:
        with bounded(), unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of Python's own `re`, about patterns such as `[[`
            read()
    except (AnabaticError, *allowed) as error:
        return _ugly(error)
    except (Hang, Exception) as error:
        inner = error
        while inner.__cause__ is not None:
            inner = inner.__cause__
        frames = [one for one in traceback.extract_tb(inner.__traceback__) if "anabatic" in one.filename]
        last = traceback.extract_tb(inner.__traceback__)[-1]
        own = frames[-1] if frames else last
        return (
            f"{type(error).__name__} at {own.filename}:{own.lineno} in {own.name} (from {last.filename}:{last.lineno})"
        )
    return ""


def _ugly(error: BaseException) -> str:
    """An error is shown to people: it names something, and does not fill the screen."""
    text = str(error)
    if isinstance(error, AnabaticError) and not text.strip():
        return f"an empty message of {type(error).__name__}"
    return f"a message of {len(text):,} characters: {text[:80]}" if len(text) > 5000 else ""


def faults(reader: Reader, folder: Path) -> list[str]:
    """Read `cases` damaged files and return each kind of fault once, with the seed of the case that showed it."""
    good = reader.good()
    for one in good:
        _put(folder, one.name, one.data)
    found: dict[str, str] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(math.ceil(reader.cases * TIMES)):
        draw = random.Random(f"{reader.name} {case}")
        one = draw.choice(good)
        _put(folder, one.name, damaged(one, draw))
        fault = attempt(lambda at=folder / one.name: reader.read(at), reader.refuses)
        if fault and fault not in found:
            found[fault] = f"{fault}; case {case}, {one.name}: {(folder / one.name).read_bytes()[:300]!r}"
        _put(folder, one.name, one.data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY:
        found["memory"] = f"{grown / 2**20:,.0f} MiB more memory"
    return list(found.values())


def _put(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
