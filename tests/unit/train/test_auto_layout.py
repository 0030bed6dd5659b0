"""The mesh that `--auto` chooses: that of the job, unless it does not fit or another is clearly faster."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from anabatic.config.dpo import DpoJob
from anabatic.config.sections.common import BatchSettings, Data, Parallel
from anabatic.config.sft import SftJob
from anabatic.core.errors import Failure
from anabatic.device import table
from anabatic.device.table import Chip
from anabatic.plan import model_shape
from anabatic.plan.model_facts import find_model_facts
from anabatic.plan.training_setup import DIVIDING_SETTINGS, Layout, build_setup
from anabatic.recipes.layout_search import iter_layout_setups
from anabatic.recipes.plan_command import find_chip
from anabatic.train.auto import layout_choice
from anabatic.train.auto.state import AutoState

CHIP = replace(find_chip("910B3"), memory_gib=60.9, taken_gib=0.0)


class Npu:
    """What of a device the choice depends on."""

    type, name = "npu", "Ascend910B3"


class Cpu:
    """The same of a processor."""

    type, name = "cpu", "a processor"


def job_of(model: str, seq_len: int, kind: type = SftJob, **more: Any) -> Any:
    batch = BatchSettings(seq_len=seq_len, global_batch_tokens=more.pop("step", None))
    return kind(model=model, data=Data(train=["x"]), batch=batch, auto=True, **more)


def choose(
    job: Any, npus: int, nodes: int = 1, chip: Chip = CHIP, device: Any = Npu, state: AutoState | None = None
) -> dict[str, Any]:
    shape = model_shape.get_job_shape(job)[0]
    row = table.get_device_row(chip)
    base = build_setup(job, shape, npus * nodes, row, True, job.batch.seq_len, 1)
    layouts = iter_layout_setups(job, find_model_facts(job), base, row, npus, nodes)
    return asdict(layout_choice.choose_layout(job, state or AutoState(), device, chip, base, layouts))


@pytest.mark.process
def test_tokens_are_shared_where_a_segment_does_not_fit() -> None:
    job = job_of("Qwen/Qwen3-32B", 32768, tuner="lora")
    assert choose(job, 8)["context"] == 8
    over_two = choose(job, 8, 2)
    assert (over_two["context"], over_two["replicate"]) == (8, 2)  # the traffic of each block stays in a machine


def test_the_mesh_of_the_job_is_kept_where_it_is_fast() -> None:
    found = choose(job_of("Qwen/Qwen3-8B", 8192), 8)
    assert [found[name] for name in DIVIDING_SETTINGS] == [1] * 6
    given = job_of("Qwen/Qwen3-8B", 8192, parallel=Parallel(context=2))
    shape = model_shape.get_job_shape(given)[0]
    row = table.get_device_row(CHIP)
    base = build_setup(given, shape, 4, row, True, 8192, 1)
    setups = list(iter_layout_setups(given, find_model_facts(given), base, row, 8, 1))
    assert {one.context for group in setups for one in group} == {2}


def test_a_batch_of_one_segment_is_shared() -> None:
    found = choose(job_of("Qwen/Qwen3-0.6B", 8192, step=8192), 2)
    assert found["context"] * found["tensor"] * found["pipeline"] == 2
    preferences = choose(job_of("Qwen/Qwen3-0.6B", 4096, kind=DpoJob, step=8192), 2)
    assert preferences["context"] * preferences["tensor"] == 2  # `dpo` does not train in stages


def test_processes_on_one_processor_are_divided_for_memory_alone() -> None:
    job = job_of("Qwen/Qwen3-0.6B", 2048)
    processor = Chip(table.PROCESSOR_NAME, 1.0, 64, 20, taken_gib=0.0)
    found = choose(job, 2, chip=processor, device=Cpu)
    assert [found[name] for name in DIVIDING_SETTINGS] == [1] * 6


@pytest.mark.process
def test_what_ran_out_of_memory_is_not_tried_again() -> None:
    job = job_of("Qwen/Qwen3-32B", 32768, tuner="lora")
    state, needed = AutoState(), []
    for _ in range(3):
        found = choose(job, 8, state=state)
        way = Layout(**found)
        assert way not in state.refused
        state = replace(state, refused=(*state.refused, way))
        needed.append(found["recompute"])
    assert needed[0] != needed[-1]


def test_nothing_is_left() -> None:
    job = job_of("Qwen/Qwen3-0.6B", 2048, parallel=Parallel(strategy="ddp", pipeline=2, tensor=2, replicate=1))
    ways = []
    with pytest.raises(Failure, match=r"no smaller setting is left .* ran out of memory"):
        for _ in range(100):
            found = choose(job, 4, state=AutoState(refused=tuple(ways)))
            ways.append(Layout(**found))
    assert ways
