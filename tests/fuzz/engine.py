"""Damage to good files: bytes are cut, flipped and repeated, values of trees exchanged; the same for the same seed."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zstandard

HUGE = (
    b"999999999999999999999999",
    b"-1",
    b"0",
    b"1e308",
    b"1e999",
    b"nan",
    b"NaN",
    b"inf",
    b"-Infinity",
    b"0x7fffffffffffffff",
    b"9" * 5000,
    b"1e-400",
    b"2147483648",
    b"18446744073709551616",
    b"0.0000001",
    b"",
)
ODD = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x80",
    b"\xc3",
    b"\xed\xa0\x80",
    "\u2028".encode(),
    "\u202e".encode(),
    b"\\ud800",
    b"\r",
    b"\r\n",
    b"\n\n\n",
    b"\x1b[31m",
    b"\x85",
    b'"',
    b"'",
    b"{",
    b"}",
    b"[" * 20,
    b"," * 50,
    b"%s",
    b"${x}",
    b"{{",
    b"{%",
    b"\t",
    b"#",
    b"&a *a",
    b": ",
    b"|",
)
DEEP = 5000


@dataclass(frozen=True)
class Good:
    """A file that its reader reads: its name, what it holds, and how its values are written (`json`, `jsonl`, or
    nothing for bytes alone)."""

    name: str
    data: bytes
    tree: str = ""


def damaged(good: Good, draw: random.Random) -> bytes:
    """Return the content of a file with one to three things wrong."""
    data = good.data
    pack = next((one for ending, one in PACKED.items() if good.name.endswith(ending)), None)
    if pack is not None and draw.random() < 0.6:
        return pack[1](_plain(Good(good.name, pack[0](data), good.tree), draw))
    return _plain(good, draw) if pack is None else _bytes(data, draw)


def _plain(good: Good, draw: random.Random) -> bytes:
    if good.tree and draw.random() < 0.6:
        return _TREES[good.tree](good.data, draw)
    return _bytes(good.data, draw)


def _bytes(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(WAYS)(data, draw)
    return data


def _span(data: bytes, draw: random.Random, most: int = 64) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.randint(1, most))


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def flip(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw, 8)
    return data[:start] + draw.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - start) + data[end:]


def insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(ODD) + data[at:]


def delete(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + data[end:]


def duplicate(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw, 200)
    return data[:end] + data[start:end] * draw.choice((1, 1, 1, 30)) + data[end:]


def swap(data: bytes, draw: random.Random) -> bytes:
    """Two lines change places."""
    lines = data.split(b"\n")
    one, two = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]
    return b"\n".join(lines)


def drop_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    del lines[draw.randrange(len(lines))]
    return b"\n".join(lines)


def number(data: bytes, draw: random.Random) -> bytes:
    """A number becomes another one."""
    found = list(re.finditer(rb"\d+(\.\d+)?", data[:200_000]))
    if not found:
        return insert(data, draw)
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(HUGE) + data[match.end() :]


def word(data: bytes, draw: random.Random) -> bytes:
    """A word takes the place of another one."""
    found = list(re.finditer(rb"\w+", data[:200_000]))
    if not found:
        return insert(data, draw)
    one, two = draw.choice(found), draw.choice(found)
    return data[: one.start()] + two[0] + data[one.end() :]


def front(data: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\n", b"\x1f\x8b", b"PK\x03\x04", b"[" * DEEP)) + data


def line_ends(data: bytes, draw: random.Random) -> bytes:
    return data.replace(b"\n", draw.choice((b"\r\n", b"\r", b"\n\0", b"\x85", b"")))


def another_encoding(data: bytes, draw: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(draw.choice(("utf-16", "gb18030", "utf-32", "utf-8-sig")))


def deep(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    opened, closed = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"- ", b""), (b"{{", b"}}")))
    times = draw.choice((120, 900, DEEP))
    return data[:at] + opened * times + b"1" + closed * times + data[at:]


WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate,
    flip,
    overwrite,
    insert,
    insert,
    delete,
    duplicate,
    swap,
    drop_line,
    number,
    number,
    word,
    word,
    front,
    line_ends,
    another_encoding,
    deep,
)


def _nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"role": value}
    return value


def strange(old: Any, draw: random.Random) -> Any:
    """Return a value that does not belong where `old` stands."""
    made: tuple[Callable[[], Any], ...] = (
        lambda: None,
        list,
        dict,
        lambda: "",
        lambda: 0,
        lambda: -1,
        lambda: True,
        lambda: 1.5,
        lambda: float("nan"),
        lambda: float("inf"),
        lambda: 1e300,
        lambda: -1e300,
        lambda: 10**300,
        lambda: 10**4000,
        lambda: 2**63,
        lambda: [old],
        lambda: {"a": old},
        lambda: [old] * 3,
        lambda: str(old)[:1000],
        lambda: "\ud800",
        lambda: "a\0b",
        lambda: "\u202e" + str(old)[:50],
        lambda: "x" * 70_000,
        lambda: "9" * 5000,
        lambda: "1e400",
        lambda: "nan",
        lambda: "[[" * 3000,
        lambda: "[" * 400 + "]" * 400,
        lambda: _nested(draw.choice((90, 150, 600)), draw.choice(("list", "object"))),
        lambda: [None],
        lambda: [[]],
        lambda: {"": None},
        lambda: list(range(40)),
        lambda: "../../etc/passwd",
        lambda: "{{ 1/0 }}",
        lambda: "(" * 50,
    )
    return draw.choice(made)()


def exchange(tree: Any, draw: random.Random) -> Any:
    """Return a copy of a tree with something wrong at one place."""
    tree = copy.deepcopy(tree)
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            places.append((one, key))
            waiting.append(one[key])
    if not places or draw.random() < 0.02:
        return strange(tree, draw)
    inside, key = draw.choice(places)
    how = draw.random()
    if how < 0.7:
        inside[key] = strange(inside[key], draw)
    elif how < 0.8:
        del inside[key]
    elif how < 0.9:
        other, name = draw.choice(places)
        inside[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
    elif isinstance(inside, dict):
        inside[draw.choice(("", "role", "a.b", "\ud800", "x" * 300, str(key).upper(), f"{key} "))] = inside.pop(key)
    else:
        inside.insert(key, strange(inside[key], draw))
    return tree


def _write(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json(data: bytes, draw: random.Random) -> bytes:
    return _write(exchange(json.loads(data), draw))


def _jsonl(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = _write(exchange(json.loads(lines[at]), draw))
    return b"\n".join(lines) + b"\n"


_TREES = {"json": _json, "jsonl": _jsonl}


def _ungzip(data: bytes) -> bytes:
    return gzip.decompress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (_ungzip, gzipped),
    ".zst": (_unzstd, zstd),
}
