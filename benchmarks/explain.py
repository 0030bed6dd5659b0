"""How fast `anabatic explain` reads: a generated log of one gigabyte, time and peak memory of its own process.

python benchmarks/explain.py [--gigabytes 1] [--kind plog train samples errors]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from option_types import positive_number

_PLOG = (
    "[INFO] RUNTIME({n},python):2026-11-21-10:00:{s:02d}.123.456 [stream.cc:{n}] {n} StreamCreate: id={n}, ret=0\n"
    "[INFO] HCCL({n},python):2026-11-21-10:00:{s:02d}.223.456 [hccl_comm.cc:91] [{n}] tag[AllReduce_{n}] entry ok\n"
    "[DEBUG] GE({n},python):2026-11-21-10:00:{s:02d}.323.456 [graph.cc:7] {n} infer shape of node MatMul_{n}\n"
)
_ERRORS = (
    "[ERROR] RUNTIME({n},python):2026-11-21-10:00:{s:02d}.123.456 [task.cc:{n}] {n} task failed, retCode=0x7150021\n"
    "EZ9999: [PID: {n}] 2026-11-21-10:00:{s:02d}.323.456 Inner error, stream {n}, error code is 507015\n"
)
_TRAIN = (
    "2026-11-21 10:00:{s:02d},123 INFO step {n}/900000  loss 2.41{s:02d}  lr 3.0e-04  grad 0.91  12.1K tok/s\n"
    "{{'loss': 1.2{s:02d}, 'grad_norm': 0.5, 'learning_rate': 0.0002, 'epoch': 0.{n}, 'error_rate': 0.1}}\n"
)
_SAMPLES = "sample {n}: {words} 0x{n:x} at /data/{words}/part-{n}\n"
_ADDRESSES = (
    "[ERROR] RUNTIME({n},python):2026-11-21-10:00:{s:02d}.123 [kernel.cc:{n}] stream=0x{h:012x}, retCode=0x7150021\n"
)
_TRACEBACKS = (
    "[rank{s}]: Traceback (most recent call last):\n"
    '[rank{s}]:   File "/opt/train/loop.py", line {n}, in step\n'
    "[rank{s}]: ValueError: row {n} of 900000 has {n} columns\n"
)
_KINDS = {
    "plog": _PLOG,
    "train": _TRAIN,
    "samples": _SAMPLES,
    "errors": _ERRORS,
    "addresses": _ADDRESSES,
    "tracebacks": _TRACEBACKS,
}
"""Healthy logs of CANN and of training, lines of which no two are alike, and nothing but errors: of CANN, of CANN with
another address in each line, and of Python, which no entry knows."""
_LAST = "RuntimeError: NPU function error: AclrtSynchronizeStream, error code is 507035\n"


def write(path: Path, kind: str, num_bytes: int) -> None:
    """Write a log of `num_bytes` in the layout of `kind`, with one error in its last line."""
    number = 0
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            file.write(
                "".join(
                    _KINDS[kind].format(n=one, s=one % 60, h=one * 2654435761 % 2**48, words=_words(one))
                    for one in range(number, number + 10_000)
                )
            )
            number += 10_000
        file.write(_LAST)


def _words(number: int) -> str:
    """Return letters that no other number has."""
    letters = []
    while number:
        number, rest = divmod(number, 26)
        letters.append(chr(97 + rest) * 3)
    return " ".join(letters)


def main() -> None:
    """Measure each kind in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=positive_number, default=1.0)
    parser.add_argument("--kind", choices=_KINDS, nargs="*", default=list(_KINDS))
    options = parser.parse_args()
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rank-0.log"
            write(path, kind, int(options.gigabytes * 1e9))
            start = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-m", "anabatic", "explain", str(path)], capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run.returncode == 0 and ("507035" in run.stdout or "507015" in run.stdout), run.stdout + run.stderr
        print(
            f"{kind:7} {options.gigabytes:g} GB: {seconds:5.1f} s, {options.gigabytes * 1e3 / seconds:.0f} MB/s,"
            f" CPU so far {used.ru_utime + used.ru_stime:.1f} s, peak {used.ru_maxrss / 1024:.0f} MiB"
        )


if __name__ == "__main__":
    main()
