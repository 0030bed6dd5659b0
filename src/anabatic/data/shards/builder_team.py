"""The machines of a job tokenise a source together: one process of each builds, the other ranks wait for it.

The builders take the parts of a source (`readers/source_parts.py`) one after the other from a counter in the store of
the job, and write each into the cache folder; the first that came merges them into the shards that one process would
write. Nobody waits in a collective: every rank looks into the store for failures and progress. Finished
parts stay on the disk until the shards are complete, so that a job that starts again continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from anabatic.core import json_reader, log
from anabatic.core.errors import TRACEBACK_HINT, AnabaticError, ConfigError, DataError, Failure
from anabatic.core.formatting import format_count, format_duration
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.paths import get_cache_root, make_write_error
from anabatic.data.readers.source_parts import PartPlan
from anabatic.data.shards.encoders import Encode, encode_here
from anabatic.data.shards.writer import CACHE_HINT, atomic_folder
from anabatic.parallel.collectives import all_gather_text
from anabatic.parallel.job_store import JobStore
from anabatic.parallel.world import World

LOST_SECONDS = 60.0
"""A builder that has not told of itself for so long counts as lost."""
LOG_SECONDS = 10.0
"""Between two lines of progress."""
_BEAT_SECONDS = 1.0
_CHECK_SECONDS = 0.2
_SEEN_SECONDS = 5.0
"""A builder that failed stays so long, so that all ranks read why."""
_VISIBLE_SECONDS = 60.0
"""A network file system may show a file of another machine so much later (nfs(5), acdirmax)."""
_PROBE_SECONDS = 2.0
_STALE_SECONDS = 7 * 24 * 3600
_ERROR_KINDS: dict[str, type[AnabaticError]] = {"ConfigError": ConfigError, "DataError": DataError, "Failure": Failure}
_SHARED = "shared"
_teams = itertools.count()
T = TypeVar("T")


class TeamJob(Protocol):
    """A source to tokenise.

    Attributes:
        key: of the shards; builders work together on equal keys.
        path: the folder of the shards.
        label: names the source in lines of progress.
        is_damaged: there is such a folder, and it cannot be used.
    """

    key: str
    path: Path
    label: str
    is_damaged: bool

    def plan_parts(self, readers: int, advance: Callable[[], None]) -> PartPlan:
        """Cut the source into parts for some readers."""

    def write_part(self, plan: PartPlan, number: int, folder: Path, add_chars: Callable[[int], None]) -> None:
        """Tokenise a part into an empty folder."""

    def merge_parts(self, plan: PartPlan, parts: list[Path], folder: Path, advance: Callable[[], None]) -> None:
        """Write the shards from the folders of all parts."""

    def write_dataset(self, folder: Path, encode: Encode, add_chars: Callable[[int], None] | None = None) -> None:
        """Tokenise the whole source."""


@dataclass(frozen=True)
class Builder:
    """The process of a machine that builds.

    Attributes:
        rank: of the process.
        machine: number and name of its machine, for messages.
    """

    rank: int
    machine: str


@contextmanager
def join_builder_team(world: World, cache: str | None) -> Iterator[BuilderTeam | None]:
    """Inside the block, one process of each machine builds; the others enter when all of them have left it.

    All ranks call this. An error inside the block is raised on all ranks, with the name of the machine.

    Args:
        world: all ranks.
        cache: `data.cache`.

    Yields:
        What `dataset_cache.build_dataset` takes; None: this process is alone, or all is built.

    Raises:
        AnabaticError: what a builder raised.
        Failure: a builder or the store of the job is lost.
    """
    if world.size == 1:
        yield None
        return
    team = _meet(world, (Path(cache).expanduser() if cache else get_cache_root()) / "shards")
    if not team.is_builder:
        team.wait_for_builders()
        yield None
        return
    with team.run():
        yield team


def _meet(world: World, root: Path) -> BuilderTeam:
    """Exchange who builds on which machine, and find out whether this one shares the cache with rank 0."""
    probe = root / f".shared-{uuid.uuid4().hex}"
    if world.rank == 0:
        with contextlib.suppress(OSError):  # a builder that cannot write says so
            root.mkdir(parents=True, exist_ok=True)
            _remove_old(root, ".shared-*")
            probe.touch()
    is_builder = world.rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"
    about = json.dumps([is_builder, socket.gethostname(), probe.name])
    told = [json_reader.loads(text) for text in all_gather_text(about, world)]
    ranks = [rank for rank, (builds, _, _) in enumerate(told) if builds]
    builders = [Builder(rank, f"machine {number} ({told[rank][1]})") for number, rank in enumerate(ranks)]
    group = _SHARED
    if is_builder and world.rank and not _appears(root / told[0][2], _PROBE_SECONDS):
        log.info(f"{root} is not shared with machine 0: this machine tokenises for itself")
        group = f"rank-{world.rank}"
    groups = all_gather_text(group, world)
    if world.rank == 0:  # all have looked
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return BuilderTeam(world, builders, group, sum(groups[rank] == group for rank in ranks))


def _appears(path: Path, seconds: float) -> bool:
    """Wait until a path written by another machine is seen here; False: it is not after so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # a network file system looks again
    return True


class BuilderTeam:
    """The builders of a job, seen from one rank.

    Args:
        world: all ranks.
        builders: in the order of ranks; the first is rank 0.
        group: builders of one group share the cache folder.
        group_size: number of builders of this rank's group.
    """

    def __init__(self, world: World, builders: list[Builder], group: str, group_size: int) -> None:
        self._world, self._builders, self._group, self._group_size = world, builders, group, group_size
        self._store = JobStore(f"builders-{next(_teams)}")
        self._own = next((builder for builder in builders if builder.rank == world.rank), None)
        self._pulse = _Pulse(self._store, builders)
        self._is_reported = False
        self._watched = ""
        self._watched_since = self._checked = time.monotonic()

    @property
    def is_builder(self) -> bool:
        """True if this process builds."""
        return self._own is not None

    def wait_for_builders(self) -> None:
        """Wait until all builders have built everything.

        Raises:
            AnabaticError: as `join_builder_team`.
        """
        self._wait_until(lambda: self._store.find("finished-all"))

    @contextmanager
    def run(self) -> Iterator[None]:
        """Tell the other ranks of this builder inside the block, and of the error that ends it."""
        own = self._own
        assert own is not None
        self._pulse.start(own)
        try:
            yield
            self._store.add("finished", 1)
            if own.rank == 0:
                self._wait_until(lambda: self._store.add("finished", 0) == len(self._builders) or None)
                self._store.put("finished-all", "1")
            self.wait_for_builders()
        except Exception as error:
            if self._is_reported:
                raise
            raise self._report_error(error, own) from error
        finally:
            self._pulse.stop()

    def build(self, job: TeamJob) -> None:
        """Build a source together with the other builders that share the cache; afterwards its folder is there.

        Raises:
            AnabaticError: as `join_builder_team`.
        """
        claims = f"{self._group}/{job.key}"
        if self._store.add(f"{claims}/leaders", 1) == 1:
            with _open_parts_folder(job.path) as parts:
                self._lead(job, claims, parts)
            return
        name = self._wait_until(lambda: self._store.find(f"{claims}/parts"))
        if name and not self._store.find(f"{claims}/built"):
            parts = job.path.with_name(name)
            if not self._await_path(parts / "plan.json"):
                raise Failure(f"{parts / 'plan.json'} of another machine is not seen here", CACHE_HINT)
            self._write_parts(job, PartPlan.load(parts / "plan.json"), claims, parts)
        self._wait_until(lambda: self._store.find(f"{claims}/built"))
        self._await_path(job.path / "meta.json")  # opening it says what is missing

    def advance(self, chars: int = 0) -> None:
        """Record progress of this builder, and look whether the job still goes on.

        Raises:
            AnabaticError: as `join_builder_team`.
        """
        self._pulse.work += 1
        HEARTBEAT.record_beat()
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._check()

    def _lead(self, job: TeamJob, claims: str, parts: Path) -> None:
        if job.is_damaged:
            shutil.rmtree(job.path, ignore_errors=True)
        plan = _open_plan(job, parts, self._group_size, self.advance)
        self._store.put(f"{claims}/parts", parts.name if plan.parts else "")
        if not plan.parts:
            with atomic_folder(job.path, self.advance) as folder:
                job.write_dataset(folder, encode_here, self.advance)
        else:
            machines = f" on {self._group_size} machines" if self._group_size > 1 else ""
            self._pulse.watch_source(f"{job.label}{machines}", plan, claims)
            self._write_parts(job, plan, claims, parts)
            self._wait_until(lambda: self._store.add(f"{claims}/finished", 0) == len(plan.parts) or None)
            folders = [parts / f"{number:05d}" for number in range(len(plan.parts))]
            for folder in folders:
                self._await_path(folder)
            with atomic_folder(job.path, self.advance) as folder:
                job.merge_parts(plan, folders, folder, self.advance)
        self._store.put(f"{claims}/built", "1")

    def _write_parts(self, job: TeamJob, plan: PartPlan, claims: str, parts: Path) -> None:
        """Tokenise one part after the other until all are taken; those that are on the disk are finished."""
        while (number := self._store.add(f"{claims}/taken", 1) - 1) < len(plan.parts):
            path, num_bytes = parts / f"{number:05d}", plan.count_bytes(number)
            if path.exists() and _read_part_size(path) is None:
                log.warn(f"{path} is damaged: it is made again")
                shutil.rmtree(path)
            if not path.exists():
                with atomic_folder(path) as folder:
                    job.write_part(plan, number, folder, self.advance)
                self._store.add(f"{claims}/new-bytes", num_bytes)
            tokens, documents = _read_part_size(path) or (0, 0)
            self._store.add(f"{claims}/bytes", num_bytes)
            self._store.add(f"{claims}/tokens", tokens)
            self._store.add(f"{claims}/documents", documents)
            self._store.add(f"{claims}/finished", 1)
            log.debug(f"{job.label}: part {number + 1} of {len(plan.parts)} is finished")
            self.advance()

    def _wait_until(self, condition: Callable[[], T | None]) -> T:
        """Return what `condition` returns, as soon as that is not None."""
        pause, longest = 0.01, max(1.0, self._world.size / 2000)  # a store answers many thousand questions a second
        while (found := condition()) is None:
            self._check()
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)
        return found

    def _await_path(self, path: Path) -> bool:
        """Wait until a path that another machine has written is seen here; False: it is not after a minute."""
        end = time.monotonic() + _VISIBLE_SECONDS
        while not _appears(path, _BEAT_SECONDS):
            self._check()  # what has failed removes its files
            if time.monotonic() > end:
                return False
        return True

    def _check(self) -> None:
        """Raise the failure of another builder; record a heartbeat if any builder has made progress."""
        self._checked = time.monotonic()
        self._pulse.raise_error()
        if failure := self._store.find("failure"):
            self._is_reported = True
            self._store.add("seen", 1)
            raise _decode_error(failure)
        watched = self._pulse.summary if self._world.rank == 0 else self._store.find("summary") or ""
        now = time.monotonic()
        if watched != self._watched:
            if watched.partition(" ")[2] != self._watched.partition(" ")[2]:
                HEARTBEAT.record_beat()
            self._watched, self._watched_since = watched, now
        elif now - self._watched_since > LOST_SECONDS:
            self._is_reported = True
            raise _lost_error(self._builders[0])

    def _report_error(self, error: Exception, own: Builder) -> AnabaticError:
        """Tell all ranks of an error; return it, or the one that came before."""
        machine = own.machine if len(self._builders) > 1 else ""
        text = _encode_error(error, machine)
        with contextlib.suppress(Failure):  # nobody can be told
            if self._store.add("failures", 1) == 1:
                self._store.put("failure", text)
            else:
                text = self._store.find("failure") or text
            end = time.monotonic() + _SEEN_SECONDS
            while self._store.add("seen", 0) < self._world.size - 1 and time.monotonic() < end:
                time.sleep(0.05)
        return _decode_error(text)


class _Pulse:
    """Tells the store once a second that this builder lives; on rank 0 it also looks after the others and logs."""

    def __init__(self, store: JobStore, builders: list[Builder]) -> None:
        self.work = 0
        self.summary = ""
        self._store, self._builders = store, builders
        self._own = builders[0]
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._tell_until_stopped, name="builder-pulse", daemon=True)
        self._seen: dict[int, tuple[str, float]] = {}
        self._source: tuple[str, PartPlan, str] | None = None
        self._source_started = self._last_logged = time.monotonic()

    def start(self, own: Builder) -> None:
        self._own = own
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def watch_source(self, label: str, plan: PartPlan, claims: str) -> None:
        """Log the progress of a source from now on."""
        self._source_started = self._last_logged = time.monotonic()
        self._source = (label, plan, claims)

    def _tell_until_stopped(self) -> None:
        try:
            for beat in itertools.count():
                self._store.put(f"builder-{self._own.rank}", f"{beat} {self.work}")
                if self._own.rank == 0:
                    self._look_after_builders(beat)
                    self._log_progress()
                if self._stopped.wait(_BEAT_SECONDS):
                    return
        except Exception as error:  # the main thread raises it
            self._error = error

    def _look_after_builders(self, beat: int) -> None:
        now, works = time.monotonic(), []
        for builder in self._builders:
            told = self._store.find(f"builder-{builder.rank}") or ""
            before, since = self._seen.get(builder.rank, ("", now))
            self._seen[builder.rank] = (told, since if told == before else now)
            works.append(told.partition(" ")[2])
            if told == before and now - since > LOST_SECONDS:
                if self._store.add("failures", 1) == 1:
                    self._store.put("failure", _encode_error(_lost_error(builder), ""))
                return
        self.summary = f"{beat} {','.join(works)}"
        self._store.put("summary", self.summary)

    def _log_progress(self) -> None:
        now = time.monotonic()
        if self._source is None or now - self._last_logged < LOG_SECONDS:
            return
        self._last_logged = now
        label, plan, claims = self._source
        finished, tokens, documents, done, new = (
            self._store.add(f"{claims}/{name}", 0) for name in ("finished", "tokens", "documents", "bytes", "new-bytes")
        )
        total = sum(map(plan.count_bytes, range(len(plan.parts))))
        seconds = now - self._source_started
        line = f"tokenising {label}: part {finished} of {len(plan.parts)}"
        line += f", {format_count(documents)} documents, {format_count(tokens)} tokens"
        if new:
            share = new / max(1, done)  # of what is done now and not by an earlier start
            line += f", {format_count(round(tokens * share / seconds))} tokens/s"
            line += f", about {format_duration(seconds * (total - done) / new)} left"
        log.info(f"{line}, {format_duration(seconds)}")
        if finished == len(plan.parts):
            self._source = None


@contextmanager
def _open_parts_folder(path: Path) -> Iterator[Path]:
    """Yield the folder for the parts of the shards at `path`, with those of an earlier start; remove it at the end.

    It stays when the block raises and has finished parts. While another job builds the same, it is a new folder.

    Raises:
        Failure: the cache cannot be written.
    """
    parts = path.with_name(f".{path.name}.parts")
    try:
        _remove_old(path.parent, ".*.parts", parts)
        parts.mkdir(parents=True, exist_ok=True)
        with open(parts / ".lock", "w", encoding="utf-8") as lock:
            if not _try_lock(lock, parts):
                parts = path.with_name(f".{path.name}.{uuid.uuid4().hex}.parts")
                log.info(f"{path}: another job builds it, too")
                parts.mkdir()
            is_built = False
            try:
                yield parts
                is_built = True
            finally:
                if is_built or not any(parts.glob("[0-9]*")):
                    shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise make_write_error(parts, error, CACHE_HINT) from error


def _try_lock(lock: TextIO, parts: Path) -> bool:
    """Lock the parts for this job as long as the file is open; False: another job has them, or has removed them."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info(f"{parts}: no locks on this file system ({error.strerror}): only one job may tokenise a source")
    return (parts / ".lock").exists()


def _read_part_size(part: Path) -> tuple[int, int] | None:
    """Return the tokens and documents of a finished part; None if its meta.json is damaged."""
    try:
        meta = json_reader.read_json_file(part / "meta.json")
        sizes = meta["num_tokens"], meta["counts"]["documents"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sizes if all(type(size) is int and size >= 0 for size in sizes) else None


def _open_plan(job: TeamJob, parts: Path, readers: int, advance: Callable[[], None]) -> PartPlan:
    """Return the plan of an earlier start that was not finished, or make one."""
    if (parts / "plan.json").exists():
        try:
            plan = PartPlan.load(parts / "plan.json")
        except DataError as error:
            log.warn(f"{error}; tokenising all parts again")
        else:
            finished = sum((parts / f"{number:05d}").exists() for number in range(len(plan.parts)))
            log.info(f"tokenising {job.label}: {finished} of {len(plan.parts)} parts are finished by an earlier start")
            return plan
    for left in parts.glob("[0-9]*"):
        shutil.rmtree(left)
    plan = job.plan_parts(readers, advance)
    if plan.parts:
        plan.save(parts / "plan.json")
    return plan


def _remove_old(root: Path, pattern: str, wanted: Path | None = None) -> None:
    """Remove what jobs that were killed have left behind, a week later."""
    for left in root.glob(pattern):
        with contextlib.suppress(OSError):  # another job was faster
            if left != wanted and time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _lost_error(builder: Builder) -> Failure:
    return Failure(
        f"{builder.machine}: no sign of rank {builder.rank}, which tokenises, for {LOST_SECONDS:g} seconds",
        "look at its messages and whether the machine runs; finished parts are kept when the job starts again",
    )


def _encode_error(error: Exception, machine: str) -> str:
    if not isinstance(error, AnabaticError):
        error = Failure(f"unexpected {type(error).__name__}: {' '.join(str(error).split())}", TRACEBACK_HINT)
    kind = next((name for name, kind in _ERROR_KINDS.items() if isinstance(error, kind)), "Failure")
    return json.dumps([kind, f"{machine}: {error}" if machine else str(error), error.hint])


def _decode_error(text: str) -> AnabaticError:
    kind, message, hint = json_reader.loads(text)
    return _ERROR_KINDS[kind](message, hint)
