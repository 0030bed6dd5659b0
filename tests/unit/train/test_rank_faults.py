"""Times of ranks and copies of weights, measured in two processes; what is said of a device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from anabatic.core.errors import ConfigError, Failure
from anabatic.device.device import select_device
from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.parallel.world import World, init_world, leave_world
from anabatic.train.guards.replica_check import ReplicaCheck, describe_mismatch, list_copy_groups, sum_bits
from anabatic.train.guards.straggler_rules import CopyMismatch
from anabatic.train.guards.stragglers import MAX_WITNESSES, compute_link_seconds, describe_health, list_witnesses
from anabatic.train.loop import fit
from anabatic.train.metrics.rank_times import StepTimer, time_broadcasts, time_products
from anabatic_testing.multiprocess import spawn_ranks
from unit.train.fitting import DEVICE, conversations, fitting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_every_single_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3).t()  # not contiguous
    whole = sum_bits(tensor)
    for bit in range(8 * tensor.element_size()):
        copy = tensor.contiguous().clone()
        view = copy.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()])
        view[3] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(view.dtype)
        assert not torch.equal(sum_bits(copy), whole), bit


def test_changes_that_cancel_in_the_sum_are_seen() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    swapped = tensor.clone()
    swapped.view(torch.int32)[0] += 5
    swapped.view(torch.int32)[2] -= 5
    one, two = sum_bits(tensor), sum_bits(swapped)
    assert one[0] == two[0] and one[1] != two[1]


def test_ranks_of_a_tensor_group_hold_other_parts() -> None:
    assert list_copy_groups(World(0, 3)) == [[0, 1, 2]]


def test_what_is_said_of_copies_that_differ() -> None:
    places = ["a, npu:0", "a, npu:1", "b, npu:0"]
    said = describe_mismatch(CopyMismatch([2], 1, True), places, ["norm", "head"], 3)
    assert said == "the weights of rank 2 (b, npu:0) differ from those of the other 2 ranks, first in head"
    said = describe_mismatch(CopyMismatch([0, 1], 0, False), places, ["norm"], 2)
    assert "rank 0 (a, npu:0), rank 1 (a, npu:1) differ from each other" in said and "not known" in said


def test_a_hot_and_a_throttled_device_is_called_so() -> None:
    def device(place: int, temp: float | None, clock: int | None, health: str = "OK") -> DeviceReading:
        return DeviceReading(place, logic_id=place, temp_c=temp, freq_mhz=clock, health=health)

    machine = Snapshot("dcmi", [device(0, 60, 1650), device(1, 91, 900, "Warning"), device(2, 62, 1650)])
    said = describe_health(machine, frozenset({1}))
    assert said == "health Warning, hot: 91 °C, the others 61 °C, throttled: clock 900 MHz, the others 1650 MHz"
    assert describe_health(machine, frozenset({0})) == "60 °C"
    assert describe_health(machine, frozenset({7})) == ""
    assert describe_health(Snapshot("npu-smi", [device(0, None, None)]), frozenset({0})) == ""


@pytest.mark.parametrize("ranks", [2, 3, 64, 65, 4096])
def test_a_slow_link_is_seen_by_few_witnesses(ranks: int) -> None:
    """A slow link delays the broadcasts of its own rank for all, and those of the others only for that rank."""
    witnesses = list_witnesses(ranks)
    assert len(set(witnesses)) == len(witnesses) == min(ranks, MAX_WITNESSES)
    assert witnesses == sorted(witnesses) and set(witnesses) <= set(range(ranks))
    for slow in {0, 1, ranks - 1, witnesses[-1]}:
        views = [[5.0 if slow in (source, witness) else 1.0 for source in range(ranks)] for witness in witnesses]
        for row, witness in zip(views, witnesses, strict=True):
            row[witness] = 0.1  # its own data have left
        found = compute_link_seconds(witnesses, views)
        expected = [5.0 if source == slow else 1.0 for source in range(ranks)]
        assert found == (expected if ranks > 2 else [5.0, 5.0])  # the two ends of one link


def test_own_work_and_waiting_are_told_apart() -> None:
    timer = StepTimer(select_device(DEVICE))
    weight = torch.nn.Parameter(torch.ones(2))
    for _ in range(20):
        timer.start_micro_batch()
        loss = (weight * 2).sum()
        timer.watch_backward(loss)
        time.sleep(0.002)
        loss.backward()
        time.sleep(0.006)
        timer.finish_step()
    timer.start_micro_batch()  # a signal ended this step
    times = timer.take_times()
    assert times.compute_s >= 0.002 and times.wait_s >= 0.006
    assert weight.grad is not None and weight.grad.tolist() == [40.0, 40.0]
    empty = timer.take_times()
    assert (empty.compute_s, empty.wait_s) == (0.0, 0.0)


def _train_with_faults(folder: Path) -> None:
    """Train with a slow rank 1, then with a flipped bit on rank 1."""
    device = select_device(DEVICE)
    world = init_world(device)
    data = conversations(folder / f"data-{world.rank}")

    def flip_bit(step: int, model: Any) -> None:
        if step == 5 and world.rank == 1:
            model.model.norm.weight.data.view(torch.int32)[3] ^= 1

    with fitting(folder / "slow", data, world, steps=7) as (loop, progress):
        loop.job.parallel.check_replicas = 2
        if world.rank == 1:
            loop.train_step.root.register_forward_pre_hook(lambda module, arguments: time.sleep(0.6))
        fit(loop, progress)
    with fitting(folder / "flip", data, world, steps=8, evaluate=flip_bit) as (loop, progress):
        loop.job.parallel.check_replicas = 2
        with pytest.raises(Failure) as caught:
            fit(loop, progress)
        (folder / f"said-{world.rank}").write_text(f"{caught.value}\n{caught.value.hint}")
    seconds, all_seconds = time_broadcasts(world, device)
    assert len(seconds) == 2 and 0 < max(seconds) <= all_seconds
    assert time_products(device)[0] > 0
    leave_world(world)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.process
def test_a_slow_rank_and_a_flipped_bit_are_named(tmp_path: Path) -> None:
    spawn_ranks(_train_with_faults, 2, tmp_path)
    found = [event for event in _events(tmp_path / "slow") if event["event"] in ("straggler", "corrupt_copy")]
    (event,) = [event for event in found if event.get("reason") != "link"]
    assert (event["rank"], event["reason"]) == (1, "device")  # in the second step DDP waits within the forward pass
    assert event["host"] and event["device"].startswith("cpu")
    rows = [json.loads(line) for line in (tmp_path / "slow" / "metrics.jsonl").read_text().splitlines()]
    row = [row for row in rows if row["kind"] == "train"][-1]
    assert row["slowest_rank"] == 1 and row["rank_compute_s"][1] > 0.6 and row["rank_wait_s"][0] > 0.1
    assert (1, "device") in [(each["rank"], each["reason"]) for each in row["stragglers"]]

    (event,) = [event for event in _events(tmp_path / "flip") if event["event"] == "corrupt_copy"]
    assert (event["step"], event["ranks"], event["last_good_step"]) == (6, [0, 1], 5)
    for rank in range(2):
        said = (tmp_path / f"said-{rank}").read_text()
        assert "step 6: silent data corruption" in said and "first in" in said and "equal after step 5" in said
    assert [path.name for path in (tmp_path / "flip").glob("checkpoint-*")] == ["checkpoint-5"]


def test_sharded_weights_have_no_copies(tmp_path: Path) -> None:
    with fitting(tmp_path, conversations(tmp_path / "data")) as (loop, _):
        loop.job.parallel.check_replicas = 5
        assert ReplicaCheck(loop).every == 0  # one process: said, and left out
        loop.train_step.optimizer.is_sharded = True
        with pytest.raises(ConfigError, match="check_replicas is 5, but the weights are sharded"):
            ReplicaCheck(loop)
