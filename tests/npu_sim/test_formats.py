"""Private formats: number and size of the storage are torch_npu's; the values stay where they are read."""

from __future__ import annotations

import json
import math

from npu_sim.conftest import Sim


def _blocks(size: int, block: int) -> int:
    return math.ceil(size / block)


def test_formats_keep_number_size_and_values(sim: Sim) -> None:
    printed = sim.python(
        """
        import json, torch, torch_npu
        torch.npu.config.allow_internal_format = True
        told = {}

        def cast(x, number):
            made = torch_npu.npu_format_cast(x, number)
            size = torch_npu.get_storage_size(made)
            return int(torch_npu.get_npu_format(made)), size, torch.equal(made.cpu(), x.cpu())

        x = torch.arange(15.0 * 17).view(15, 17).npu()
        told["nz"] = [cast(x.to(dtype), 29) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
        told["int8"] = cast(torch.ones(33, 40, dtype=torch.int8).npu(), 29)
        told["batched"] = cast(torch.randn(3, 33, 20).npu(), 29)
        told["vector"] = cast(torch.randn(12).npu(), 29)
        image = torch.randn(4, 33, 7, 5).npu()
        told["image"] = {number: cast(image, number) for number in (0, 1, 2, 3, 4)}
        volume = torch.randn(2, 3, 4, 5, 6).npu()
        told["volume"] = {number: cast(volume, number) for number in (27, 30, 32, 33)}

        nz = torch_npu.npu_format_cast(x, 29)
        back = torch_npu.npu_format_cast(nz, 2)
        told["back"] = int(torch_npu.get_npu_format(back)), torch.equal(back, x)
        turned = torch_npu.npu_format_cast(nz.t(), 2)
        told["view"] = int(torch_npu.get_npu_format(turned)), torch.equal(turned, x.t())
        told["same"] = torch_npu.npu_format_cast(nz, 29).data_ptr() == nz.data_ptr()
        told["bytes"] = nz.untyped_storage().nbytes()
        told["result"] = int(torch_npu.get_npu_format(nz @ nz.t())), torch.equal(nz @ nz.t(), x @ x.t())
        nz.add_(1)
        told["in place"] = int(torch_npu.get_npu_format(nz)), torch.equal(nz, x + 1)
        torch_npu.npu_format_cast_(x, 29)
        told["cast in place"] = int(torch_npu.get_npu_format(x)), torch.equal(x + 1, nz)
        made = torch_npu.empty_with_format((33, 20), dtype=torch.float16, device="npu", acl_format=29)
        told["empty"] = int(torch_npu.get_npu_format(made)), torch_npu.get_storage_size(made)
        layer = torch.nn.Linear(17, 15).npu()
        layer.weight.data = torch_npu.npu_format_cast(layer.weight.data, 29)
        layer(torch.ones(2, 17).npu()).sum().backward()
        told["trained"] = int(torch_npu.get_npu_format(layer.weight)), layer.weight.grad.eq(2).all().item()
        torch.npu.config.allow_internal_format = False
        told["forbidden"] = int(torch_npu.get_npu_format(torch_npu.npu_format_cast(layer.bias.new_ones(4, 4), 29)))
        try:
            torch_npu.npu_format_cast(x.cpu(), 29)
        except RuntimeError as error:
            told["cpu"] = str(error)
        print(json.dumps(told))
        """
    )
    told = json.loads(printed)
    small = _blocks(15, 16) * 16 * _blocks(17, 16) * 16
    assert told["nz"] == [[29, small, True]] * 3
    assert told["int8"] == [29, _blocks(33, 16) * 16 * _blocks(40, 32) * 32, True]
    assert told["batched"] == [29, 3 * _blocks(33, 16) * 16 * _blocks(20, 16) * 16, True]
    assert told["vector"] == [2, 12, True]
    plain, padded = 4 * 33 * 7 * 5, 4 * 48 * 7 * 5
    filters = _blocks(33, 16) * 7 * 5 * _blocks(4, 16) * 256
    expected = {"0": plain, "1": plain, "2": plain, "3": padded, "4": filters}
    assert told["image"] == {number: [int(number), size, True] for number, size in expected.items()}
    expected = {"27": 720, "30": 720, "32": 2 * 4 * 1 * 5 * 6 * 16, "33": 4 * 1 * 5 * 6 * 1 * 256}
    assert told["volume"] == {number: [int(number), size, True] for number, size in expected.items()}
    assert told["back"] == told["view"] == told["result"] == [2, True]
    assert told["same"] and told["bytes"] == 4 * small
    assert told["in place"] == told["cast in place"] == told["trained"] == [29, True]
    assert told["empty"] == [29, 48 * 32] and told["forbidden"] == 2
    assert "Expected" in told["cpu"] or "npu" in told["cpu"].lower()
