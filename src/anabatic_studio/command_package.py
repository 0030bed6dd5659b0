"""List what this package adds to the program (entry-point group `anabatic.commands`)."""

from __future__ import annotations

from anabatic.config.loading.command_package import USE, Command, CommandEntry, CommandPackage

PACKAGE = CommandPackage(
    commands=(
        Command(
            "studio",
            "anabatic_studio.settings:StudioJob",
            "anabatic_studio.server:run",
            "Train, compare and try models in the browser.",
            positional_setting="runs",
            optional_packages=("fastapi", "uvicorn", "httptools"),
        ),
    ),
    entries=(CommandEntry("studio", group=USE, example="runs"),),
)
