"""torch_npu's operators for mixture of experts: on one device against loops, across ranks with real exchanges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_sim import ranks
from npu_sim.conftest import Sim


@pytest.fixture(scope="module")
def found(_built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program for one device found."""
    result: dict[str, Any] = json.loads(Sim(tmp_path_factory.mktemp("one")).program("moe.py").splitlines()[-1])
    return result


def test_routing_on_one_device(found: dict[str, Any]) -> None:
    values = {name: result for name, result in found.items() if not isinstance(result, str | list)}
    assert [name for name, result in values.items() if result is not True] == []
    assert len(values) > 120
    assert found["gate dtypes"] == ["torch.bfloat16", "torch.int32", "torch.float32"]
    assert found["gate ties"] == [[0, 1, 2]]
    assert found["expert tokens dtype"] == "torch.int32"
    assert found["int8 passes"] == found["dynamic dtype"] == "torch.int8"
    assert found["no rows"] == [[0, 6], [0], [5], [0]]
    assert found["dynamic zeros"] == [0, 0.0]
    assert found["re-routing dtypes"] == ["torch.float16", "torch.float32", "torch.int32", "torch.int64"]
    assert found["re-routing rest"] == [True, True, True]


def test_routing_refuses(found: dict[str, Any]) -> None:
    expected = {
        "gate groups": "24 experts do not make 5 groups",
        "gate k": "k must be in [1, 6], got 7",
        "gate renorm": "renorm only supports 0, got 1",
        "gate hash": "npu_moe_gating_top_k with input_ids is not simulated",
        "gate dtype": "tensor expected but got a tensor with dtype: Int",
        "softmax k": "The k should be in [0, 24]",
        "softmax finished": "bool tensor expected",
        "expert tokens number": "num_expert must be in (0, 2048], got 0",
        "init range": "active_expert_range [2, 6) must lie in [0, expert_num 5)",
        "init no experts": "active_expert_range [0, -1) must lie in",
        "init capacity": "expert_capacity must be in [1, 8] with drop_pad_mode 1, got -1",
        "init mxfp8": "npu_moe_init_routing_v2 with quant_mode 2 of float is not simulated",
        "init x_dtype": "npu_moe_init_routing_v2 with x_dtype other than hifloat8 unquantised is not simulated",
        "init offset": "offset belongs to quant_mode 0",
        "init int64": "expert_idx must be int32",
        "finalize skip": "skip2 needs skip1",
        "finalize index": "must lie in [-1, 8)",
        "re-routing index": "idx_type only supports 0, got 1",
        "re-routing rows": "counts 10 tokens, there are 5",
        "map uneven": "each row of routing_map must have 2 experts",
        "map dtype": "routing_map must be a matrix of bool or int8",
        "map shape": "must be [tokens, 5]",
    }
    assert {name: text for name, text in expected.items() if text not in found[name]} == {}


@pytest.fixture(scope="module")
def pair(_built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """What two ranks return, case by case."""
    cases = "products,sums,product_refusals,experts,special_experts,grouped,expert_refusals,counted"
    return ranks.run_all(Sim(tmp_path_factory.mktemp("pair")), 2, "expert_ranks", cases)


@pytest.mark.parametrize("case", ["products", "sums", "experts", "special_experts", "grouped"])
def test_two_ranks(pair: dict[str, dict[int, Any]], case: str) -> None:
    assert pair[case] == {0: [], 1: []}


def test_two_ranks_refuse(pair: dict[str, dict[int, Any]]) -> None:
    said = pair["product_refusals"][0] | pair["expert_refusals"][0]
    expected = {
        "name": "'nobody' names no communicator of this device",
        "world": "world_size is 4, the communicator has 2 ranks",
        "odd world": "world_size should be in [2, 4, 8, 16, 32]",
        "short": "the K-axis must be in [256, 65535), got 8",
        "turned": "x1 must not be transposed",
        "gather index": "gather_index only supports 0, got 1",
        "bias": "with a bias other than 0 is not simulated",
        "ai_cpu": "When comm_mode is ai_cpu, quantization not supported",
        "rows": "should be be divisible by world_size",
        "float": "x1 is Float, not float16, bfloat16 or int8",
        "quantised transfer": "npu_mm_all_reduce_base with comm_quant_scale_1 is not simulated",
        "reduce": "reduce_op only supports sum, got max",
        "ep rank": "ep_rank_id is 1, this rank of the communicator is 0",
        "ep experts": "moe_expert_num 3 is no multiple of 2 ranks",
        "ep ids": "expert_ids must lie in [0, 4)",
        "ep quant": "npu_moe_distribute_dispatch_v2 with quant_mode 1 is not simulated",
        "ep mask": "x_active_mask must have all true values before the false ones",
        "ep tp": "with tp_world_size 2 is not simulated",
        "ep shared": "shared_expert_rank_num must be 0 on Ascend910B",
        "counts": "gmm_x has 4 rows, the counts say 3",
    }
    assert {name: text for name, text in expected.items() if text not in said[name]} == {}


def test_they_are_collectives(pair: dict[str, dict[int, Any]]) -> None:
    # all_gather and product, product and sum, dispatch (counts and rows), combine, exchange and products
    assert pair["counted"] == dict.fromkeys(
        range(2), {"gather": 1, "sum": 1, "dispatch": 2, "combine": 1, "grouped": 1}
    )


def test_shared_experts_have_ranks_of_their_own(sim: Sim) -> None:
    command = ["python", str(ranks.PROGRAMS / "ranks.py"), "4", "expert_ranks", "shared_experts"]
    done = sim.command(*command, flags=["--npus", "4", "--chip", "910C"])
    results = ranks.read(done.stdout)
    assert results.get("shared_experts") == dict.fromkeys(range(4), []), done.stderr[-3000:]


def test_a_rank_that_is_gone_is_reported(sim: Sim) -> None:
    results = ranks.run(sim, 2, "expert_ranks", "gone")
    assert "error code is 507048" in results[0]
