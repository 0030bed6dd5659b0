"""Ranks for a test: `ranks.py WORLD MODULE CASES [WORDS]`.

Runs MODULE.CASE(rank, world, *WORDS) in WORLD processes, for each of the cases (names with commas between) one after
the other. torch is imported once and the ranks are forked from it, which is allowed as long as no device was used. What
a case returns is printed as one line of JSON per rank; an exception becomes its text. The exit code is 0 when every
rank ended by itself.
"""

import importlib
import json
import os
import sys
import traceback

import torch.distributed as dist

from anabatic_testing.multiprocess import find_free_port


def serve(rank: int, world: int, module: str, case: str, words: list[str]) -> None:
    import torch

    first = int(os.environ.get("FIRST_RANK", "0"))
    total = int(os.environ.get("TOTAL_RANKS", world))
    os.environ.update(RANK=str(first + rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(total), LOCAL_WORLD_SIZE=str(world))
    torch.npu.set_device(rank)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("cpu:gloo,npu:hccl")
        result = getattr(importlib.import_module(module), case)(first + rank, total, *words)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
        if os.environ.get("TRACE"):
            traceback.print_exc()
    line = json.dumps({"case": case, "rank": first + rank, "result": result}) + "\n"
    os.write(1, line.encode())
    sys.stderr.flush()
    if not isinstance(result, str):
        dist.destroy_process_group()
    os._exit(0)


def run(world: int, module: str, case: str, words: list[str]) -> bool:
    """Run one case; true when every rank ended by itself."""
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER", "127.0.0.1")
    os.environ["MASTER_PORT"] = os.environ.get("PORT") or str(find_free_port())
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            serve(rank, world, module, case, words)
        children.append(child)
    return not [status for status in (os.waitpid(child, 0)[1] for child in children) if status]


def main() -> None:
    world, module, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    importlib.import_module(module)
    ended = [run(world, module, case, sys.argv[4:]) for case in cases]
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
