"""Ranks for a test: `ranks.py WORLD MODULE CASE [WORDS]` runs MODULE.CASE(rank, world, *WORDS) in WORLD processes.

torch is imported once and the ranks are forked from it, which is allowed as long as no device was used. What a case returns is
printed as one line of JSON per rank; an exception becomes its text. The exit code is 0 when every rank ended by itself.
"""

import importlib
import json
import os
import socket
import sys
import traceback

import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    line = json.dumps({"rank": first + rank, "result": result}) + "\n"
    os.write(1, line.encode())
    sys.stderr.flush()
    if not isinstance(result, str):
        dist.destroy_process_group()
    os._exit(0)


def main() -> None:
    world, module, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    importlib.import_module(module)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            serve(rank, world, module, case, sys.argv[4:])
        children.append(child)
    failed = [status for status in (os.waitpid(child, 0)[1] for child in children) if status]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
