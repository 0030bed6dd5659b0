"""What a chip without infinities computes, and whether training in fp16 notices."""

import json

import torch

from anabatic.config.shared import Device as DeviceConfig
from anabatic.device import overflow
from anabatic.device.device import pick


def main() -> None:
    device = pick(DeviceConfig(type="npu"))
    register = overflow.register(device)
    assert register is not None
    told: dict[str, object] = {"dtype": str(device.dtype)}
    register.clear()
    large = torch.full((2, 2), 300.0, dtype=torch.float16, device="npu")
    told["calm"] = register.read().item()
    told["product"] = (large * large).tolist()
    told["after"] = register.read().item()
    told["still"] = register.read().item()
    register.clear()
    told["cleared"] = register.read().item()
    told["nothing"] = (large - 400).sqrt().sum().item()
    told["root"] = register.read().item()
    register.clear()
    told["cast"] = torch.full((1,), 1e6, device="npu").half().item()
    told["casted"] = register.read().item()
    register.clear()
    told["in place"] = large.mul_(1000.0).flatten()[0].item()
    told["placed"] = register.read().item()
    register.clear()
    torch.full((2,), float("-inf"), dtype=torch.float16, device="npu").sum()
    told["written"] = register.read().item()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
