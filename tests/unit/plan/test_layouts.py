"""Layouts of a mesh that `plan --layouts` tries: all there are, each as a training would accept it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from anabatic.cli.app import main
from anabatic.config.sections.common import Parallel
from anabatic.device.table import find_chip
from anabatic.plan import model_shape
from anabatic.plan.cost_model import get_chip_rates
from anabatic.plan.mesh_shape import DIMENSIONS, iter_layouts, resolve_mesh_shape
from anabatic.plan.step_time import estimate_step_time
from anabatic.plan.strategy_search import find_fastest, list_fitting
from anabatic.plan.training_setup import TrainingSetup

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen3-8B")
LIMITS = {"pipeline": 8, "replicate": 2, "context": 8, "expert": 4, "tensor": 8}
JOB = "sft --model Qwen/Qwen3-30B-A3B --data.train x.jsonl --batch.seq-len 8192 --batch.global-batch-tokens 131072"


def sizes_of(parallel: Parallel) -> tuple[int, ...]:
    return tuple(getattr(parallel, name) for name in LIMITS)


@pytest.mark.parametrize("world", [1, 8, 12])
def test_every_mesh_of_the_devices_is_tried_once(world: int) -> None:
    found = [sizes_of(parallel) for parallel in iter_layouts(Parallel(), world, LIMITS)]
    usual = [size for size in (1, 2, 3, 4, 6, 8, 12) if world % size == 0]
    expected = [
        sizes
        for sizes in itertools.product(*([size for size in usual if size <= most] for most in LIMITS.values()))
        if world % math.prod(sizes) == 0
        and not (sizes[3] > 1 and sizes[4] > 1)  # expert and tensor exclude each other
        and not (sizes[1] > 1 and world // math.prod(sizes) * sizes[2] * sizes[3] == 1)  # nothing to shard in a copy
    ]
    assert sorted(found) == sorted(expected) and len(set(found)) == len(found)


def test_what_is_set_stays() -> None:
    for parallel in iter_layouts(Parallel(context=2, strategy="zero2"), 8, LIMITS):
        assert parallel.context == 2 and resolve_mesh_shape(parallel, 8).context == 2
        assert parallel.strategy == ("zero3" if parallel.replicate > 1 else "zero2")


@pytest.mark.parametrize("layout", [{}, {"context": 2}, {"pipeline": 2}, {"replicate": 2}])
def test_the_fastest_of_a_layout_is_found(layout: dict[str, int]) -> None:
    ranks = 8 // math.prod(size for name, size in layout.items() if name != "replicate")
    setup = TrainingSetup(SHAPE, strategy="zero3", ranks=ranks, tuner="lora", seq_len=2048, **layout)  # type: ignore[arg-type]
    fastest = find_fastest(setup, 8 * 16384, CHIP)
    fitting = [
        one for one in list_fitting(setup, 8 * 16384, CHIP) if one.setup.is_sharded or not layout.get("replicate")
    ]
    best = max(fitting, key=lambda one: one.tokens_per_s)
    assert fastest is not None and fastest.can_fit
    assert best.tokens_per_s >= fastest.tokens_per_s >= 0.98 * best.tokens_per_s


def run_plan(options: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *options.split()])
    assert caught.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.process
def test_the_printed_settings_are_planned_alike(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_plan(f"--npus 8 --nodes 2 --layouts -- {JOB}", capsys)
    rows = [line.split() for line in text.splitlines()[1:] if "micro-batch" in line and line[0] == " "]
    speeds = [float(row[0].replace(",", "")) for row in rows]
    assert len(rows) > 5 and speeds == sorted(speeds, reverse=True) and "expert" in text
    options = text.split("The fastest: ")[1].strip()
    again = json.loads(run_plan(f"--npus 8 --nodes 2 --json -- {JOB} {options}", capsys))
    assert again["fits"] and again["tokens_per_s"] == pytest.approx(speeds[0], abs=0.6)
    told = json.loads(run_plan(f"--npus 8 --nodes 2 --layouts --json -- {JOB}", capsys))
    layouts = [tuple(one["layout"].values()) for one in told["others"]]
    assert len(layouts) >= len(rows) and again["layout"] == told["others"][0]["layout"]
    assert set(again["layout"]) == (set(DIMENSIONS) - {"shard"}) | {"pipeline_chunks"}


def test_chunks_of_a_pipeline_are_tried_unless_they_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    job = f"{JOB.replace('30B-A3B', '32B')} --tuner lora --parallel.pipeline 4 --parallel.strategy zero3"
    tried = json.loads(run_plan(f"--npus 8 --layouts --json -- {job}", capsys))["others"]
    assert 2 in {one["layout"]["pipeline_chunks"] for one in tried} <= {1, 2}
    words = f"--npus 8 --layouts --json -- {job} --parallel.pipeline-chunks 3"
    fixed = json.loads(run_plan(words, capsys))["others"]
    assert fixed and {one["layout"]["pipeline_chunks"] for one in fixed} == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"--layouts --sweep -- {JOB}", "--layouts goes without --sweep"),
        (f"--layouts --scale 64 -- {JOB}", "--scale goes with"),
        ("--layouts -- rl --model Qwen/Qwen3-0.6B --data.train x.jsonl", "--layouts does not list those of rl"),
    ],
)
def test_what_has_no_layouts_is_said(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *options.split()])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and message in told and "hint: leave" in told


def test_offloaded_shards_come_from_the_host_before_each_gather() -> None:
    """Frozen weights in bf16, gathered twice by each micro-batch; adapters are a thousandth of them."""
    setup = TrainingSetup(SHAPE, strategy="zero3", ranks=8, tuner="lora", micro_tokens=2048, micro_steps=4)
    rates = get_chip_rates(CHIP)
    on_device, on_host = (
        estimate_step_time(replace(setup, offload=offload), rates).collectives for offload in (False, True)
    )
    assert on_host - on_device == pytest.approx(4 * 2 * 2 * SHAPE.params / 8 / rates.host_link, rel=0.02)
