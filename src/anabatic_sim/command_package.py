"""List what this package adds to the program (entry-point group `anabatic.commands`)."""

from __future__ import annotations

from anabatic.config.loading.command_package import MACHINE, CommandEntry, CommandPackage

PACKAGE = CommandPackage(
    entries=(
        CommandEntry(
            "sim",
            "Run any command on simulated NPUs.",
            MACHINE,
            "--npus 8 --chip 910B3 -- torchrun --nproc_per_node 8 train.py",
            "anabatic_sim.commands:run",
            needs_separator=True,
        ),
        CommandEntry(
            "sim status",
            "List the simulated machines that live, their devices and processes.",
            target="anabatic_sim.commands:status",
        ),
        CommandEntry("sim clean", "Remove what simulations left behind.", target="anabatic_sim.commands:clean"),
    )
)
