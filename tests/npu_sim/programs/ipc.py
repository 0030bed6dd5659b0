"""Device memory and events between processes: prints one JSON object."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
import torch.multiprocessing as mp


def consume(tensors: Any, back: Any) -> None:
    x = tensors.get()
    back.put((x.device.index, x.tolist(), x.is_shared(), torch.npu.memory_allocated(1)))
    tensors.get()  # the producer has written
    back.put(x.tolist())
    x[0] = 7
    torch.npu.synchronize()
    view = tensors.get()
    back.put((view.stride(), view.tolist(), view.data_ptr() - x.data_ptr()))
    parameter = tensors.get()
    back.put((type(parameter).__name__, parameter.requires_grad, parameter.sum().item()))
    rebuild, arguments = tensors.get()
    moved = rebuild(*arguments[:6], 0, *arguments[7:])  # documented: another device may read it
    back.put((moved.device.index, moved.tolist()))
    event = tensors.get()
    event.wait()
    event.synchronize()
    back.put(event.query())
    event.record()
    back.put("recorded")
    tensors.get()


def produce_and_die(tensors: Any, ready: Any) -> None:
    tensors.put(torch.full((1000,), 3.0, device="npu"))
    ready.get()
    os._exit(3)


def write_in_fork(x: torch.Tensor) -> list[float]:
    pid = os.fork()
    if pid == 0:
        x.fill_(9)
        os._exit(0)
    os.waitpid(pid, 0)
    return x.tolist()


def main() -> None:
    mp.set_start_method("spawn")
    tensors, back, told = mp.Queue(), mp.Queue(), {}
    child = mp.Process(target=consume, args=(tensors, back))
    child.start()
    other, ready = mp.Queue(), mp.Queue()
    mortal = mp.Process(target=produce_and_die, args=(other, ready))
    mortal.start()

    x = torch.arange(6.0, device="npu:1")
    tensors.put(x)
    told["received"] = back.get()
    x.mul_(10)
    torch.npu.synchronize(1)
    tensors.put(None)
    told["written by producer"] = back.get()
    tensors.put(x.view(2, 3)[:, 1:])
    told["view"] = back.get()
    told["written by consumer"] = x.tolist()
    tensors.put(torch.nn.Parameter(torch.eye(3, device="npu:0")))
    told["parameter"] = back.get()
    tensors.put(torch.multiprocessing.reductions.reduce_tensor(torch.full((2,), 3.25, device="npu:1")))
    told["other device"] = back.get()
    event = torch.npu.Event(enable_timing=False, interprocess=True)
    event.record()
    tensors.put(event)
    told["event"] = back.get(), back.get()
    event.synchronize()
    told["recorded elsewhere"] = event.query()
    tensors.put(None)
    child.join()
    told["exit"] = child.exitcode

    left = other.get()
    ready.put(None)
    mortal.join()
    time.sleep(0.1)
    told["after the producer's death"] = left.sum().item(), mortal.exitcode
    told["after a fork"] = write_in_fork(torch.ones(3, device="npu:0"))
    try:
        torch.npu.Event(enable_timing=True).ipc_handle()
    except RuntimeError as error:
        told["plain event"] = str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
