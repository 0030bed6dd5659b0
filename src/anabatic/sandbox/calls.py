"""Calls between a program and the process that judges it: two pipes, and values as data (`values`).

Each end keeps its own objects and names them by numbers. The judge may do to the program's objects what Python can
(`OPERATIONS`); the program may only call the functions that a test has handed to it.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anabatic.sandbox import values

LONGEST = 64 * 2**20
"""Bytes of one message at most."""
_LENGTH = struct.Struct("=Q")
_UNARY = ("len", "str", "repr", "bool", "int", "float", "iter", "next", "abs", "hash")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "getitem", "setitem",
           "delitem", "contains", "eq", "lt", "le", "gt", "ge")  # fmt: skip


def call(function: Callable[..., Any], args: Iterable[Any], named: dict[str, Any]) -> Any:
    """Call a function with what was sent for it."""
    return function(*args, **named)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": call, "getattr": getattr, "setattr": setattr, "isinstance": isinstance,
    **{name: getattr(builtins, name) for name in _UNARY}, **{name: getattr(operator, name) for name in _BINARY},
}  # fmt: skip
"""What may be asked for."""


class Peer:
    """One end.

    Args:
        source, sink: handles to read from and to write to.
        operations: what the other end may ask for.
        wrap: makes a stand-in for an object of the other end from its number.
        ended: called when the other end is gone; it does not return.
    """

    def __init__(
        self, source: int, sink: int, operations: dict[str, Callable[..., Any]],
        wrap: Callable[[Peer, int], object], ended: Callable[[str], Any],
    ) -> None:  # fmt: skip
        self._source, self._sink, self._wrap, self._ended = source, sink, wrap, ended
        self.operations = operations
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self.exceptions: dict[str, type[Exception]] = {}

    def ask(self, operation: str, *operands: object) -> Any:
        """Let the other end do something, and answer what it asks meanwhile.

        Raises:
            Exception: what it raised there, as one of Python's own classes or one derived from it.
        """
        self._send(["ask", operation, [self._encode(one) for one in operands]])
        while True:
            message = self._receive()
            if message is None:
                return self._ended("it ended")
            try:
                kind, *rest = message
                if kind == "done":
                    result, changed = rest
                    _update(operands, self._decode(changed))
                    return self._decode(result)
                if kind == "raised":
                    error: Exception | None = self._exception(*rest)
                elif kind == "ask":
                    error = None
                else:
                    raise ValueError(f"a message of the kind {kind!r}")
            except (ValueError, TypeError, RecursionError, OverflowError, ArithmeticError, MemoryError) as failure:
                return self._ended(f"its answer is no data: {failure}")
            if error is not None:
                raise error
            self._answer(rest)

    def serve(self) -> None:
        """Answer until the other end closes."""
        while (message := self._receive()) is not None:
            self._answer(message[1:])

    def _answer(self, question: Sequence[Any]) -> None:
        try:
            name, operands = question
            given = [self._decode(one) for one in operands]
            result = self.operations[name](*given)
            answer = ["done", self._encode(result), self._encode(_changeable(given))]
        except Exception as error:  # whatever a program raises belongs to the one who asked
            answer = ["raised", [[kind.__name__, kind.__module__] for kind in type(error).__mro__], _text(error)]
        self._send(answer)

    def _exception(self, kinds: Sequence[Sequence[str]], text: str) -> Exception:
        return self.exception_class(kinds)(text)

    def exception_class(self, kinds: Sequence[Sequence[str]]) -> type[Exception]:
        """Return the class that stands for one of the other end.

        Args:
            kinds: name and module of it and of those that it is derived from.

        Raises:
            ValueError: none of them is an exception of Python's own.
        """
        for place, (name, module) in enumerate(kinds):
            base = getattr(builtins, name, None) if module == "builtins" else None
            if isinstance(base, type) and issubclass(base, Exception) and _takes_text(base):
                if place == 0:
                    return base
                first = str(kinds[0][0])
                return self.exceptions.setdefault(first, type(first, (base,), {}))
        raise ValueError("no exception")

    def _encode(self, value: object) -> Any:
        return values.encode(value, self._refer)

    def _decode(self, tree: Any) -> Any:
        return values.decode(tree, self._resolve)

    def _refer(self, value: object) -> list[Any]:
        number = getattr(type(value), "number_of", None)
        if number is not None:
            return ["yours", number(value)]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["mine", self._numbers[id(value)]]

    def _resolve(self, kind: str, number: Any) -> object:
        if kind == "yours" and isinstance(number, int) and 0 <= number < len(self._objects):
            return self._objects[number]
        if kind == "mine" and isinstance(number, int):
            return self._wrap(self, number)
        raise ValueError(f"{kind!r} is no kind of value")

    def _send(self, message: list[Any]) -> None:
        data = json.dumps(message).encode()
        left = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while left:
                left = left[os.write(self._sink, left) :]
        except OSError:
            self._ended("it ended")

    def _receive(self) -> list[Any] | None:
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        length = _LENGTH.unpack(head)[0]
        data = None if length > LONGEST else self._read(length)
        if data is None:
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, list) and message else None

    def _read(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = os.read(self._source, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _changeable(operands: Sequence[Any]) -> list[Any]:
    """Return what a call may have changed of the lists, dicts and sets that it was given."""
    positional = operands[1] if len(operands) == 3 and isinstance(operands[1], list) else []
    return [one if isinstance(one, (list, dict, set, bytearray)) else None for one in positional]


def _update(operands: Sequence[Any], changed: list[Any]) -> None:
    """Change our own arguments as the other end has changed its copies."""
    positional = operands[1] if len(operands) == 3 and isinstance(operands[1], list) else []
    for own, new in zip(positional, changed, strict=False):
        if type(own) is not type(new) or own == new:
            continue
        if isinstance(own, (list, bytearray)):
            own[:] = new
        elif isinstance(own, (dict, set)):
            own.clear()
            own.update(new)


def _takes_text(kind: type[Exception]) -> bool:
    try:
        kind("")
    except TypeError:  # as UnicodeDecodeError, which wants five arguments
        return False
    return True


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ raises
        return ""
