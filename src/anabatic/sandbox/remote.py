"""Stand-ins, in the process that judges, for what lives in the program's."""

from __future__ import annotations

from typing import Any

from anabatic.sandbox.calls import Peer

_SHOWN = ("__name__", "__doc__", "__qualname__")


class Remote:
    """An object of the program that is no data: a function, a class, an instance of one.

    It is equal to no data, whatever its own `__eq__` says: an answer that equals everything passes no test.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return int(self.__dict__["_number"])

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _ask(self, "call", list(args), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SHOWN:
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(_ask(value, "isinstance", self))

    def __eq__(self, other: object) -> Any:
        return _ask(self, "eq", other) if isinstance(other, Remote) else False

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return int(_ask(self, "hash"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __iter__(self) -> Any:
        return _ask(self, "iter")


def _ask(remote: Remote, operation: str, *operands: object) -> Any:
    try:
        return remote.__dict__["_peer"].ask(operation, remote, *operands)
    except StopIteration as error:
        if operation == "next":
            raise
        # As PEP 479 has it: from a function it would end `all(map(f, cases))` of a test as if every case had passed.
        raise RuntimeError(f"the program raised StopIteration: {error}") from error


def _forward(operation: str) -> Any:
    def method(self: Remote, *operands: Any) -> Any:
        return _ask(self, operation, *operands)

    return method


def _with_its_like(operation: str) -> Any:
    """Data would tell the program what is expected: `abs(answer - 1.5) < 1e-6` must not be its own to decide."""

    def method(self: Remote, other: object) -> Any:
        return _ask(self, operation, other) if isinstance(other, Remote) else NotImplemented

    return method


for _name in ("len", "str", "repr", "int", "float", "next", "abs", "neg", "pos", "getitem", "setitem", "delitem",
              "contains"):  # fmt: skip
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _with_its_like(_name))


class Handed:
    """In the program's process: a function of the test, which the program may call."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self._number = peer, number

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return self._number

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, list(args), named)
