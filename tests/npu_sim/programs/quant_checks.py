"""What the programs on quantised operators share: comparisons, packing of int4 in plain Python, one line per check."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check; it fails by raising."""
    CHECKS[function.__name__] = function
    return function


def run() -> None:
    """Run all checks, each with a seed of its own, and print `name True`, or what went wrong."""
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function()
            print(name, True)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            print(name, type(error).__name__, lines[0] if lines else "")


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in shape, dtype and every number."""
    got = got.cpu()
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype, f"dtype {got.dtype}, wanted {wanted.dtype}"
    assert torch.equal(got, wanted), (
        f"{int((got != wanted).sum())} of {got.numel()} differ: {got.flatten()[:8].tolist()}"
    )


def close(got: torch.Tensor, wanted: torch.Tensor, relative: float = 1e-5, absolute: float = 1e-6) -> None:
    """Equal in shape, and in value up to rounding."""
    got = got.cpu()
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    torch.testing.assert_close(got.double(), wanted.double(), rtol=relative, atol=absolute)


def rounded(got: torch.Tensor, exact: torch.Tensor, low: int = -128, high: int = 127) -> None:
    """Integers that `exact`, in double, rounds to; a number that lies within 1e-4 of a half may go either way."""
    got = got.cpu()
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, wanted {tuple(exact.shape)}"
    wanted = exact.double().round().clamp(low, high)
    wrong = got.double() != wanted
    undecided = ((exact.double() - exact.double().floor()) - 0.5).abs() < 1e-4
    assert not bool((wrong & ~undecided).any()), (
        f"{int((wrong & ~undecided).sum())} of {got.numel()} are not the nearest"
    )
    assert bool(((got.double() - wanted).abs() <= 1).all())


def refused(call: Callable[[], object], *words: str) -> None:
    """The call raises, with these words in its message."""
    try:
        call()
    except Exception as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {str(error).splitlines()[0]}"
        return
    raise AssertionError(f"accepted, expected {words}")


def packed(values: torch.Tensor) -> torch.Tensor:
    """Eight int4 per int32, the first one in the lowest bits."""
    rows = []
    for row in values.reshape(-1, values.shape[-1]).tolist():
        for start in range(0, len(row), 8):
            word = sum((int(number) & 15) << (4 * place) for place, number in enumerate(row[start : start + 8]))
            rows.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(rows, dtype=torch.int32).reshape(*values.shape[:-1], values.shape[-1] // 8)


def unpacked(words: torch.Tensor, bits: int = 32) -> torch.Tensor:
    """The int4 numbers of int32 (or, with bits=8, of int8) words."""
    numbers = []
    for word in words.flatten().tolist():
        for place in range(0, bits, 4):
            nibble = (word >> place) & 15
            numbers.append(nibble - 16 if nibble >= 8 else nibble)
    return torch.tensor(numbers).reshape(*words.shape[:-1], words.shape[-1] * bits // 4)


def bits_of(value: float) -> int:
    """The 32 bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def short(scale: torch.Tensor) -> torch.Tensor:
    """float32 with only its upper 19 bits, as the fixed pipe of the cube cores reads it."""
    words = [struct.unpack("<f", struct.pack("<I", bits_of(x) & 0xFFFFE000))[0] for x in scale.flatten().tolist()]
    return torch.tensor(words, dtype=torch.float64).reshape(scale.shape)


def raw(scale: torch.Tensor) -> torch.Tensor:
    """int64 with the bits of float32 in the lower half."""
    words = [bits_of(x) for x in scale.flatten().tolist()]
    return torch.tensor(words, dtype=torch.int64).reshape(scale.shape)


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Random integers of [low, high]."""
    return torch.randint(low, high + 1, shape, dtype=dtype)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The exact integer product, as double."""
    return torch.matmul(left.long(), right.long()).double()


def by_group(ends: list[int]) -> list[tuple[int, slice]]:
    """(group, rows) of cumulative ends."""
    starts = [0, *ends[:-1]]
    return [(group, slice(start, end)) for group, (start, end) in enumerate(zip(starts, ends, strict=True))]
