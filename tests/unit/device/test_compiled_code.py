"""The store of compiled code: nothing damaged comes out of it, and a store that refuses costs time only."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core import relaunch
from anabatic.device import compiled_code
from anabatic.device.compiled_code import CompiledCode
from fuzz.planted import every_form

LIBRARY = Path("qs", "cqs.main.so")


def make_store(tmp_path: Path, content: bytes = b"\x7fELF code") -> Path:
    """Return a store into which one library has been sealed."""
    code = CompiledCode(tmp_path / "store", tmp_path / "first")
    (code.work / LIBRARY).parent.mkdir(parents=True)
    (code.work / LIBRARY).write_bytes(content)
    (code.work / "qs" / "cqs.lock").touch()
    (code.work / "qs" / ".cqs.tmp").write_bytes(b"half")
    code.save_new_files()
    return code.store


def fetch(store: Path, work: Path) -> bytes | None:
    """Return the library as the next start finds it; None: it does not."""
    CompiledCode(store, work).load_files()
    return (work / LIBRARY).read_bytes() if (work / LIBRARY).exists() else None


def test_the_next_start_finds_what_was_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert [path.name for path in store.rglob("*") if path.is_file()] == ["cqs.main.so.sealed"]
    code = CompiledCode(store, tmp_path / "second")
    assert code.load_files() == 1 and (code.work / LIBRARY).read_bytes() == b"\x7fELF code"
    before = os.stat(store / "qs" / "cqs.main.so.sealed").st_mtime_ns
    code.save_new_files()
    assert os.stat(store / "qs" / "cqs.main.so.sealed").st_mtime_ns == before


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 200), value=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_never_comes_out(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = make_store(folder, bytes(range(150)))
    sealed = store / "qs" / "cqs.main.so.sealed"
    content = bytearray(sealed.read_bytes())
    place %= len(content)
    if cut:
        content = content[:place]
    else:
        content[place] ^= value
    sealed.write_bytes(content)
    assert fetch(store, folder / "second") is None
    assert not sealed.exists()


def test_what_another_has_sealed_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that came from elsewhere, with every checksum right: its seals are those of another key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    store = make_store(tmp_path)
    assert fetch(store, tmp_path / "second") == b"\x7fELF code"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    assert fetch(store, tmp_path / "third") is None and not list(store.rglob("*.sealed"))
    keys = {path.read_bytes() for path in tmp_path.glob("*/anabatic/compiled-code.key")}
    assert len(keys) == 2 and {len(key) for key in keys} == {32}
    assert not any(path.stat().st_mode & 0o077 for path in tmp_path.glob("*/anabatic/compiled-code.key"))


def test_a_file_under_another_name_is_not_loaded(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (store / "qs" / "cqs.main.so.sealed").rename(store / "qs" / "other.so.sealed")
    assert CompiledCode(store, tmp_path / "second").load_files() == 0


@pytest.mark.parametrize("kind", ["open to others", "short", "a folder", "no home"])
def test_without_a_key_nothing_is_shared_and_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    from anabatic.core import log

    log.setup_logging()
    store = make_store(tmp_path)
    key = Path(os.environ["HOME"], ".local", "state", "anabatic", "compiled-code.key")
    if kind == "open to others":
        key.chmod(0o644)
    elif kind == "short":
        key.write_bytes(b"")
    else:
        key.unlink()
        if kind == "a folder":
            key.mkdir()
        else:
            monkeypatch.setenv("XDG_STATE_HOME", str(store / "qs" / "cqs.main.so.sealed"))
    assert fetch(store, tmp_path / "second") is None
    assert "key" in capsys.readouterr().err


def test_a_planted_pickle_is_not_given_to_torch(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    store = make_store(tmp_path)
    sealed = store / "qs" / "cqs.main.so.sealed"
    good = sealed.read_bytes()
    for form, content in every_form(marker):
        old = struct.pack("<QI", len(content), zlib.crc32(content))  # a seal that anyone can compute
        for planted in (content, old + content, good[:40] + content, struct.pack("<Q", len(content)) + good[8:40]):
            sealed.write_bytes(planted)
            assert fetch(store, tmp_path / "second") is None, form
    assert not marker.exists()


def test_damage_is_told_once_with_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from anabatic.core import log

    log.setup_logging()
    store = make_store(tmp_path)
    for name in ("a.sealed", "b.sealed"):
        (store / name).write_bytes(b"")
    assert fetch(store, tmp_path / "second") == b"\x7fELF code"
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "2 of the files of compiled code" in said and "a.sealed" in said


@pytest.mark.parametrize("kind", ["file", "missing parent is a file", "folder in place of a sealed file"])
def test_a_store_that_refuses_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    from anabatic.core import log

    log.setup_logging()
    store = tmp_path / "store"
    if kind == "file":
        store.write_text("in the way")
    elif kind == "missing parent is a file":
        store.write_text("in the way")
        store = store / "2.13"
    else:
        (store / "qs" / "cqs.main.so.sealed").mkdir(parents=True)
    code = CompiledCode(store, tmp_path / "work")
    assert code.load_files() == 0
    (code.work / LIBRARY).parent.mkdir(parents=True)
    (code.work / LIBRARY).write_bytes(b"new")
    code.save_new_files()
    code.save_new_files()
    said = capsys.readouterr().err
    assert said.count("compiled code cannot be stored") == 1 and "ANABATIC_CACHE" in said
    assert (code.work / LIBRARY).read_bytes() == b"new"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["Read-only file system", "No space left on device"])
def test_a_store_that_is_read_only_or_full(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    from anabatic.core import log

    log.setup_logging()
    store = make_store(tmp_path)
    options = (
        ["--bind", "-o", "ro", str(store)] if kind.startswith("Read") else ["-t", "tmpfs", "-o", "size=64k", "none"]
    )
    mount = ["mount", *options, str(store)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts need root, and mount(8)")
    try:
        code = CompiledCode(store, tmp_path / "second")
        assert code.load_files() == (1 if kind.startswith("Read") else 0)
        code.work.mkdir(exist_ok=True)
        (code.work / "new.py").write_bytes(bytes(100_000))
        code.save_new_files()
        assert kind in capsys.readouterr().err and not list(store.rglob("*new.py*"))
    finally:
        subprocess.run(["umount", str(store)], check=True)


def test_processes_of_a_launcher_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is still compiling has half-written libraries in its folder, which the other must not seal."""
    monkeypatch.setenv(relaunch.REPORTS_VARIABLE, str(tmp_path))
    ranks = [CompiledCode(tmp_path / "store") for _ in range(2)]
    assert ranks[0].work != ranks[1].work and {code.work.parent for code in ranks} == {tmp_path}


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "_MAX_STORE_BYTES", 200)
    code = CompiledCode(tmp_path / "store", tmp_path / "work")
    for number, name in enumerate(("a", "b", "c")):
        (code.work).mkdir(exist_ok=True)
        (code.work / name).write_bytes(bytes(30))
        code.save_new_files()
        os.utime(code.store / f"{name}.sealed", (number, number))
    (code.work / "d").write_bytes(b"")
    code.save_new_files()
    assert sorted(path.name for path in code.store.iterdir()) == ["b.sealed", "c.sealed", "d.sealed"]


PROGRAM = """
import sys
from anabatic.core import log
log.setup_logging()
from anabatic.device import compile_cache
from anabatic.device.compile_time import COMPILE_CLOCK
code = compile_cache.use_cached_code()
COMPILE_CLOCK.watch_compiling()
import torch
from torch._dynamo.utils import counters
x = torch.arange(6.0, requires_grad=True)
y = torch.compile(lambda x: torch.nn.functional.silu(x * 3).sum())(x)
y.backward()
code.save_new_files()
print(y.item(), x.grad.tolist(), counters["inductor"]["fxgraph_cache_hit"] > 0)
"""


@pytest.mark.process
def test_torch_works_with_a_damaged_store(tmp_path: Path) -> None:
    """Each kind of torch's files, emptied, cut short and overwritten; torch itself would end with SIGBUS."""

    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
            env={**os.environ, "ANABATIC_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    cold, said = run()
    assert cold.endswith("False\n") and "damaged" not in said
    files = sorted(path for path in (tmp_path / "compiled").rglob("*.sealed"))
    kinds = {".so": b"", ".py": b"import ,", ".cpp": b"int", "": b"\x80torn"}
    names = [path.name.removesuffix(".sealed") for path in files]
    assert all(any(name.endswith(kind) for name in names) for kind in kinds)
    for path in files:
        name = path.name.removesuffix(".sealed")
        content = path.read_bytes()
        kind = next(kind for kind in kinds if name.endswith(kind))
        path.write_bytes(kinds[kind] if kind != ".so" else content[: len(content) // 2])
    again, said = run()
    assert again == cold and f"{len(files)} of the files of compiled code" in said
    healed = list((tmp_path / "compiled").rglob("*.sealed"))
    assert len(healed) == len(files) and not any(path.read_bytes() in kinds.values() for path in healed)
