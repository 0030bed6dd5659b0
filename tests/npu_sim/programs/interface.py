"""HCCL's C functions by themselves: several devices in one process, a communicator made from another."""

import ctypes
import threading
from collections.abc import Callable

import torch

HCCL = ctypes.CDLL("libhccl.so")
HCCL.HcclGetErrorString.restype = ctypes.c_char_p
FP32, SUM = 4, 0
CONFIG_BYTES, NAME_OFFSET = (
    4096,
    32,
)  # HcclCommConfig is smaller; the name stands after header, buffer size and determinism
NOT_SET = 0xFFFFFFFF


def check(code: int) -> None:
    assert code == 0, HCCL.HcclGetErrorString(code)


def together(work: Callable[[int], None], devices: list[int]) -> None:
    def one(device: int) -> None:
        torch.npu.set_device(device)
        work(device)

    threads = [threading.Thread(target=one, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def all_reduce(comms: dict[int, ctypes.c_void_p], tensors: dict[int, torch.Tensor]) -> list[list[float]]:
    def one(device: int) -> None:
        pointer = ctypes.c_void_p(tensors[device].data_ptr())
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        check(HCCL.HcclAllReduce(pointer, pointer, ctypes.c_uint64(2), FP32, SUM, comms[device], stream))
        torch.npu.synchronize()

    together(one, list(comms))
    return [tensors[device].tolist() for device in comms]


def main() -> None:
    devices = (ctypes.c_int32 * 2)(0, 1)
    made = (ctypes.c_void_p * 2)()
    check(HCCL.HcclCommInitAll(2, devices, made))
    comms = {device: ctypes.c_void_p(made[device]) for device in (0, 1)}
    tensors = {device: torch.tensor([1.0, 2.0], device=f"npu:{device}") * (device + 1) for device in (0, 1)}
    print("all", *all_reduce(comms, tensors))

    config = (ctypes.c_uint32 * (CONFIG_BYTES // 4))(*[NOT_SET] * (CONFIG_BYTES // 4))
    ctypes.memmove(ctypes.addressof(config) + NAME_OFFSET, b"part\0", 5)
    config[6] = 20  # megabytes
    turned, members = (ctypes.c_uint32 * 2)(1, 0), {}  # the ranks change places

    def derive(device: int) -> None:
        part = ctypes.c_void_p()
        check(
            HCCL.HcclCreateSubCommConfig(
                ctypes.byref(comms[device]), 2, turned, ctypes.c_uint64(7), 1 - device, config, ctypes.byref(part)
            )
        )
        members[device] = part

    together(derive, [0, 1])
    tensors = {device: tensor * 2 for device, tensor in tensors.items()}
    size = ctypes.c_uint32()
    check(HCCL.HcclGetRankSize(members[0], ctypes.byref(size)))
    print("sub", size.value, *all_reduce({device: members[device] for device in (0, 1)}, tensors))
    name = ctypes.create_string_buffer(128)
    check(HCCL.HcclGetCommName(members[0], name))
    print("name", name.value.decode())
    for comm in (*members.values(), *comms.values()):
        check(HCCL.HcclCommDestroy(comm))
    print(HCCL.HcclGetErrorString(21).decode())


if __name__ == "__main__":
    main()
