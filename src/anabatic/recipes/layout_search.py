"""The meshes of a job's devices that its command can train: what `plan --layouts` lists and `--auto` chooses from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anabatic.device.table import DeviceRow
from anabatic.plan import job_rules, training_setup
from anabatic.plan.mesh_shape import iter_layouts, resolve_mesh_shape
from anabatic.plan.model_facts import ModelFacts
from anabatic.plan.training_setup import TrainingSetup

MAX_STAGES, MAX_EXPERT_RANKS = 64, 64
"""Stages and expert ranks of the layouts that are tried."""


def iter_layout_setups(
    job: Any, model: ModelFacts, base: TrainingSetup, row: DeviceRow, npus_per_node: int, nodes: int
) -> Iterator[list[TrainingSetup]]:
    """Yield the setups of every mesh: one, or of a pipeline one for each number of chunks.

    Dimensions that the job sets stay as they are. Those whose traffic lies in every block stay within a machine. Stages
    have one chunk or two, where the job sets no number.

    Args:
        base: setup of the job as it is; row: of its devices.
    """
    shape, _ = model.require_shape()
    world = npus_per_node * nodes
    experts = max((kind.experts for kind, _ in shape.count_kinds()), default=1) or 1
    limits = {
        "pipeline": min(shape.layers, MAX_STAGES),
        "replicate": nodes,
        "context": npus_per_node,
        "expert": min(world, experts, MAX_EXPERT_RANKS),
        "tensor": npus_per_node,
    }
    for parallel in iter_layouts(job.parallel, world, limits):
        mesh = resolve_mesh_shape(parallel, world)
        if any(job_rules.find_batch_problems(job.batch, mesh.data_size)):
            continue
        setups = []
        for chunks in (1, 2) if parallel.pipeline > 1 == parallel.pipeline_chunks else (parallel.pipeline_chunks,):
            candidate = replace(job, parallel=replace(parallel, pipeline_chunks=chunks))
            problems = job_rules.find_layout_problems(candidate, mesh, model)
            if not any(problems):
                setup = training_setup.build_setup(
                    candidate, shape, mesh.data_size, row, base.half, base.seq_len, 1, base.pictures
                )
                setups.append(setup)
        if setups:
            yield setups
