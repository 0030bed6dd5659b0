"""Calls between processes that do not trust each other: messages over pipes, and Python values as JSON.

Each end keeps its own objects and names them by numbers. The judge may do to the program's objects what Python can
(`ALLOWED_OPERATIONS`); the program may only call the functions that a test has handed to it.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import decimal
import fractions
import json
import operator
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_MESSAGE_BYTES = 64 * 2**20
"""Bytes of one message at most."""
_LENGTH = struct.Struct("=Q")
_UNARY_OPERATIONS = ("len", "str", "repr", "bool", "int", "float", "iter", "next", "abs", "hash")
_BINARY_OPERATIONS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "neg",
    "pos",
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
)


def call_function(function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with what was sent for it."""
    return function(*args, **kwargs)


ALLOWED_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": call_function,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    **{name: getattr(builtins, name) for name in _UNARY_OPERATIONS},
    **{name: getattr(operator, name) for name in _BINARY_OPERATIONS},
}
"""Allowed operations."""


class RpcPeer:
    """One end.

    Args:
        source, sink: handles to read from and to write to.
        operations: what the other end may ask for.
        wrap: makes a stand-in for an object of the other end from its number.
        ended: called when the other end is gone; it does not return.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        operations: dict[str, Callable[..., Any]],
        wrap: Callable[[RpcPeer, int], object],
        ended: Callable[[str], Any],
    ) -> None:
        self._source, self._sink, self._wrap_remote, self._on_end = source, sink, wrap, ended
        self.operations = operations
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self.exceptions: dict[str, type[Exception]] = {}

    def request_operation(self, operation: str, *operands: object) -> Any:
        """Let the other end do something, and answer what it asks meanwhile.

        Raises:
            Exception: what it raised there, as one of Python's own classes or one derived from it.
        """
        self._send_message(["ask", operation, [self._encode_value(one) for one in operands]])
        while True:
            message = self._receive_message()
            if message is None:
                return self._on_end("it ended")
            try:
                kind, *rest = message
                if kind == "done":
                    result, changed = rest
                    _apply_changes(operands, self._decode_value(changed))
                    return self._decode_value(result)
                if kind == "raised":
                    error: Exception | None = self._rebuild_exception(*rest)
                elif kind == "ask":
                    error = None
                else:
                    raise ValueError(f"a message of the kind {kind!r}")
            except (ValueError, TypeError, RecursionError, OverflowError, ArithmeticError, MemoryError) as failure:
                return self._on_end(f"its answer is no data: {failure}")
            if error is not None:
                raise error
            self._answer_request(rest)

    def serve_requests(self) -> None:
        """Answer until the other end closes."""
        while (message := self._receive_message()) is not None:
            self._answer_request(message[1:])

    def _answer_request(self, question: Sequence[Any]) -> None:
        try:
            name, operands = question
            given = [self._decode_value(one) for one in operands]
            result = self.operations[name](*given)
            answer = ["done", self._encode_value(result), self._encode_value(_mutable_arguments(given))]
        except Exception as error:  # whatever a program raises belongs to the one who asked
            answer = ["raised", [[kind.__name__, kind.__module__] for kind in type(error).__mro__], _error_text(error)]
        self._send_message(answer)

    def _rebuild_exception(self, kinds: Sequence[Sequence[str]], text: str) -> Exception:
        return self.find_exception_class(kinds)(text)

    def find_exception_class(self, kinds: Sequence[Sequence[str]]) -> type[Exception]:
        """Return the class that stands for one of the other end.

        Args:
            kinds: name and module of it and of those that it is derived from.

        Raises:
            ValueError: none of them is an exception of Python's own.
        """
        for place, (name, module) in enumerate(kinds):
            base = getattr(builtins, name, None) if module == "builtins" else None
            if isinstance(base, type) and issubclass(base, Exception) and _accepts_text(base):
                if place == 0:
                    return base
                first = str(kinds[0][0])
                return self.exceptions.setdefault(first, type(first, (base,), {}))
        raise ValueError("no exception")

    def _encode_value(self, value: object) -> Any:
        return encode_value(value, self._refer_object)

    def _decode_value(self, tree: Any) -> Any:
        return decode_value(tree, self._resolve_reference)

    def _refer_object(self, value: object) -> list[Any]:
        number = getattr(type(value), "number_of", None)
        if number is not None:
            return ["yours", number(value)]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["mine", self._numbers[id(value)]]

    def _resolve_reference(self, kind: str, number: Any) -> object:
        if kind == "yours" and isinstance(number, int) and 0 <= number < len(self._objects):
            return self._objects[number]
        if kind == "mine" and isinstance(number, int):
            return self._wrap_remote(self, number)
        raise ValueError(f"{kind!r} is no kind of value")

    def _send_message(self, message: list[Any]) -> None:
        data = json.dumps(message).encode()
        left = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while left:
                left = left[os.write(self._sink, left) :]
        except OSError:
            self._on_end("it ended")

    def _receive_message(self) -> list[Any] | None:
        head = self._read_bytes(_LENGTH.size)
        if head is None:
            return None
        length = _LENGTH.unpack(head)[0]
        data = None if length > MAX_MESSAGE_BYTES else self._read_bytes(length)
        if data is None:
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, list) and message else None

    def _read_bytes(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = os.read(self._source, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _mutable_arguments(operands: Sequence[Any]) -> list[Any]:
    """Return what a call may have changed of the lists, dicts and sets that it was given."""
    positional = operands[1] if len(operands) == 3 and isinstance(operands[1], list) else []
    return [one if isinstance(one, (list, dict, set, bytearray)) else None for one in positional]


def _apply_changes(operands: Sequence[Any], changed: list[Any]) -> None:
    """Change our own arguments as the other end has changed its copies."""
    positional = operands[1] if len(operands) == 3 and isinstance(operands[1], list) else []
    for value, new in zip(positional, changed, strict=False):
        if type(value) is not type(new) or value == new:
            continue
        if isinstance(value, (list, bytearray)):
            value[:] = new
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(new)


def _accepts_text(kind: type[Exception]) -> bool:
    try:
        kind("")
    except TypeError:  # as UnicodeDecodeError, which wants five arguments
        return False
    return True


def _error_text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ raises
        return ""


MAX_EXACT_INT = 2**53
"""Below it an integer is itself; above it goes as hexadecimal digits: int() of decimal ones takes quadratic time."""
_BUILDERS: dict[str, Callable[..., Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_CONTAINERS = ((list, "list"), (tuple, "tuple"), (frozenset, "frozenset"), (set, "set"), (collections.deque, "deque"))
_TEXT_CODECS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "float": (float, float.__repr__, float),
    "complex": (complex, complex.__repr__, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
}


def encode_value(value: object, refer: Callable[[object], list[Any]]) -> Any:
    """Return a value as what JSON can say; `refer` names what is no data.

    A value of a class derived from one of Python's own goes as that one.

    Raises:
        RecursionError: it is nested too deeply, or holds itself.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if -MAX_EXACT_INT < value < MAX_EXACT_INT else ["int", hex(value)]
    for name, (kind, write, _) in _TEXT_CODECS.items():
        if isinstance(value, kind):
            return [name, write(value)]
    if isinstance(value, dict):
        return ["dict", [[encode_value(key, refer), encode_value(item, refer)] for key, item in value.items()]]
    for kind, name in _CONTAINERS:
        if isinstance(value, kind):
            return [name, [encode_value(item, refer) for item in value]]
    if isinstance(value, range):
        return ["range", [encode_value(number, refer) for number in (value.start, value.stop, value.step)]]
    return refer(value)


def decode_value(tree: Any, resolve: Callable[[str, Any], object]) -> Any:
    """Return the value; `resolve` gets the kind and the number of what is no data.

    Raises:
        ValueError, TypeError, RecursionError: it is nothing that `encode_value` writes.
    """
    if not isinstance(tree, list):
        if tree is None or isinstance(tree, (bool, str, int)):
            return tree
        raise ValueError(f"{type(tree).__name__} is no value")
    kind, content = tree
    if kind in _TEXT_CODECS:
        return _TEXT_CODECS[kind][2](content)
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {decode_value(key, resolve): decode_value(item, resolve) for key, item in content}
    if kind in _BUILDERS:
        return _BUILDERS[kind](decode_value(item, resolve) for item in content)
    if kind == "range":
        return range(*(decode_value(number, resolve) for number in content))
    return resolve(kind, content)


_LENGTH_HEADER = struct.Struct("=Q")


def send_message(channel: socket.socket, message: dict[str, Any]) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    channel.sendall(_LENGTH_HEADER.pack(len(data)) + data)


def receive_message(channel: socket.socket) -> dict[str, Any] | None:
    """Read a message; None: the other end is closed."""
    head = _read_bytes(channel, _LENGTH_HEADER.size)
    data = None if head is None else _read_bytes(channel, _LENGTH_HEADER.unpack(head)[0])
    return None if data is None else dict(json.loads(data))


def _read_bytes(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        with contextlib.suppress(ConnectionResetError):
            parts.append(channel.recv(min(size, 1 << 20)))
        if not parts or not parts[-1]:
            return None
        size -= len(parts[-1])
    return b"".join(parts)
