"""`anabatic monitor` on a simulated machine, and what a training there writes about its devices."""

from __future__ import annotations

import json

from npu_sim.conftest import Sim

TOOL = ("python", "-m", "anabatic")


def test_eight_simulated_npus(sim: Sim) -> None:
    done = sim.command(*TOOL, "monitor", "--json", flags=["--npus", "8", "--chip", "910B3"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == "npu-smi" and [each["logic_id"] for each in found["devices"]] == list(range(8))
    assert {(each["name"], each["health"], each["hbm_total_mb"]) for each in found["devices"]} == {
        ("910B3", "OK", 65536)
    }


def test_the_processes_of_a_simulated_npu_and_what_torch_knows_of_its_own(sim: Sim) -> None:
    said = sim.python(
        """
        import json, os
        import torch
        from anabatic.config.sections.common import DeviceSettings
        from anabatic.device.device import select_device
        from anabatic.device.device import TorchDeviceSource, get_device_ids
        from anabatic.monitor.sources.selection import MachineSource
        device = select_device(DeviceSettings())
        held = torch.zeros(64 << 20, dtype=torch.uint8, device=device.torch_device)
        seen, own = MachineSource().read(), TorchDeviceSource(device).read().devices[0]
        mine = [each for each in seen.processes if each.pid == os.getpid()]
        print(json.dumps([len(mine), mine[0].user is not None, own.used_mb >= 64, own.util_kind]))
        print(sorted(get_device_ids(device, 8)))
        """,
        npus=2,
    )
    first, second = said.splitlines()[-2:]
    assert json.loads(first) == [1, True, True, "own"] and second == "[0, 1]"
