"""Stand-ins, in the process that judges, for what lives in the program's."""

from __future__ import annotations

from typing import Any

from anabatic.sandbox.remote_calls import RpcPeer

_READABLE_DUNDERS = ("__name__", "__doc__", "__qualname__")


class RemoteObject:
    """An object of the program that is no data: a function, a class, an instance of one.

    It is equal to no data, whatever its own `__eq__` says: an answer that equals everything passes no test.
    """

    def __init__(self, peer: RpcPeer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return int(self.__dict__["_number"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _request_operation(self, "call", list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return _request_operation(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _request_operation(self, "setattr", name, value)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, RemoteObject) and bool(_request_operation(value, "isinstance", self))

    def __eq__(self, other: object) -> Any:
        return _request_operation(self, "eq", other) if isinstance(other, RemoteObject) else False

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return int(_request_operation(self, "hash"))

    def __bool__(self) -> bool:
        return bool(_request_operation(self, "bool"))

    def __iter__(self) -> Any:
        return _request_operation(self, "iter")


def _request_operation(remote: RemoteObject, operation: str, *operands: object) -> Any:
    try:
        return remote.__dict__["_peer"].request_operation(operation, remote, *operands)
    except StopIteration as error:
        if operation == "next":
            raise
        # As PEP 479 has it: from a function it would end `all(map(f, cases))` of a test as if every case had passed.
        raise RuntimeError(f"the program raised StopIteration: {error}") from error


def _make_forwarder(operation: str) -> Any:
    def forward_operation(self: RemoteObject, *operands: Any) -> Any:
        return _request_operation(self, operation, *operands)

    return forward_operation


def _make_remote_only_forwarder(operation: str) -> Any:
    """Data would tell the program what is expected: `abs(answer - 1.5) < 1e-6` must not be its own to decide."""

    def forward_to_remote(self: RemoteObject, other: object) -> Any:
        return _request_operation(self, operation, other) if isinstance(other, RemoteObject) else NotImplemented

    return forward_to_remote


for _name in (
    "len",
    "str",
    "repr",
    "int",
    "float",
    "next",
    "abs",
    "neg",
    "pos",
    "getitem",
    "setitem",
    "delitem",
    "contains",
):
    setattr(RemoteObject, f"__{_name}__", _make_forwarder(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _make_remote_only_forwarder(_name))


class CallbackProxy:
    """In the program's process: a function of the test, which the program may call."""

    def __init__(self, peer: RpcPeer, number: int) -> None:
        self._peer, self._number = peer, number

    def number_of(self) -> int:
        """Return what the other end calls it."""
        return self._number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request_operation("call", self, list(args), kwargs)
