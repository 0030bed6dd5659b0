"""`anabatic config show --resolved`: the settings that will run, and where each value comes from. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anabatic.config.loading import settings
from anabatic.config.loading.command_package import find_command_name
from anabatic.config.loading.command_table import COMMANDS
from anabatic.config.sections.train_jobs import is_auto
from anabatic.device import table
from anabatic.plan import training_setup
from anabatic.recipes.resolve import Machine, ResolvedJob, resolve

_OPEN = (None, "auto")
"""Values of settings that are left to the program."""


def render_resolved(job: Any, machine: Machine, given: Mapping[str, str]) -> str:
    """Return a job as a recipe with every value that is known before the data are read.

    Args:
        machine: that it runs on; its chip is known.
        given: dotted key -> where its value is given.

    Raises:
        ConfigError: the job cannot run.
    """
    resolved = resolve(job, machine)
    tree, origins = settings.job_to_dict(resolved.job), {**given, **resolved.origins}
    for key, value, origin in _iter_filled_in(resolved, machine):
        section, _, name = key.rpartition(".")
        values = tree[section] if section else tree
        if values[name] in _OPEN:
            values[name], origins[key] = value, origin
    lines = [
        f"# {find_command_name(job, COMMANDS.values())}, as it runs on {machine.devices} x {machine.known_chip.name}",
        "# Remarks say where a value comes from; the others are defaults. null: decided from the data, or not used.",
        *(f"# {note}" for note in (*resolved.notes, *resolved.warnings)),
        *settings.render_settings(tree, origins),
    ]
    return "\n".join(lines) + "\n"


def _iter_filled_in(resolved: ResolvedJob[Any], machine: Machine) -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted key, value, origin) of what a job leaves to its model and its machine."""
    job, chip = resolved.job, machine.known_chip
    row = table.get_device_row(chip)
    yield "device.type", row.type, f"machine: {chip.name}"
    yield "device.dtype", row.dtype, f"machine: {row.type}"
    if hasattr(job, "tuner"):
        tuner, _ = training_setup.resolve_tuner(job)
        yield "tuner", tuner, "model: an adapter" if tuner == "lora" else "model: no adapter"
    if not is_auto(job):
        strategy = "single" if resolved.mesh.gradient_size == 1 else "ddp"
        yield "parallel.strategy", strategy, f"machine: {resolved.mesh.gradient_size} x the same weights"
