"""What a chip without infinities computes, and whether training in fp16 notices."""

import json

import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.device import ops_npu
from anabatic.device.device import select_device


def main() -> None:
    device = select_device(DeviceConfig(type="npu"))
    register = ops_npu.open_register(device)
    assert register is not None
    told: dict[str, object] = {"dtype": str(device.dtype)}
    register.clear_flag()
    large = torch.full((2, 2), 300.0, dtype=torch.float16, device="npu")
    told["calm"] = register.read_flag().item()
    told["product"] = (large * large).tolist()
    told["after"] = register.read_flag().item()
    told["still"] = register.read_flag().item()
    register.clear_flag()
    told["cleared"] = register.read_flag().item()
    told["nothing"] = (large - 400).sqrt().sum().item()
    told["root"] = register.read_flag().item()
    register.clear_flag()
    told["cast"] = torch.full((1,), 1e6, device="npu").half().item()
    told["casted"] = register.read_flag().item()
    register.clear_flag()
    told["in place"] = large.mul_(1000.0).flatten()[0].item()
    told["placed"] = register.read_flag().item()
    register.clear_flag()
    torch.full((2,), float("-inf"), dtype=torch.float16, device="npu").sum()
    told["written"] = register.read_flag().item()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
