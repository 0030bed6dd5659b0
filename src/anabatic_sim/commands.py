"""`anabatic sim`: run any command on simulated NPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from anabatic.cli.parsing.function_command import OptionNames
from anabatic.config.loading import validation
from anabatic.core.errors import ConfigError


def run(
    *command: str,
    npus: Annotated[str, OptionNames(("--npus", "-n"))] = "1",
    chip: str = "910B3",
    hbm: str | None = None,
    fault: tuple[str, ...] = (),
    report: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Run COMMAND on simulated NPUs: the real torch_npu, devices in host memory.

    Parameters
    ----------
    command
        Command and options, after `--`.
    npus
        Number of devices.
    chip
        Chip: 910B1 to 910B4, 910C (a device is one of its two dies), 950PR, 950DT, 910A, 310P, or a SoC name.
    hbm
        Memory per device, for example 512MiB; default: the chip's.
    fault
        Inject a fault, KIND[@DEVICE][#N][=VALUE]; can be repeated. Kinds: oom, aicore, ecc, hccl-timeout, link-down,
        lost, slow, slow-link, flip, health. It strikes at the N-th allocation, operator or collective; slow@1=3 makes
        device 1 three times slower, health@0=warning shows in npu-smi.
    report
        File for counters and predicted times (sim.json); a table is printed at the end.
    trace
        File for a Chrome trace of the predicted times.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic sim --npus 8 -- python train.py")
    from anabatic_sim import session

    count = validation.convert_value(validation.UntypedText(npus), int, validation.OptionNamer(), ("npus",))
    return session.run_simulation(
        list(command), npus=count, chip=chip, hbm=hbm, fault=fault, report=report, trace=trace
    )


def status() -> None:
    """List the simulated machines that live, their devices and processes."""
    from anabatic_sim import session

    sys.stdout.write(session.describe_machines())


def clean(*, builds: bool = False) -> None:
    """Remove leftover files of simulations.

    Parameters
    ----------
    builds
        Also remove the wheels and the compiled simulator, which the next use downloads and compiles again.
    """
    from anabatic_sim import session

    sys.stdout.write(session.clean_simulations(builds))
