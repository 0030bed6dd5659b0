"""`anabatic monitor`: the devices of this machine, and a run beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from anabatic.core.errors import ConfigError

_Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
_Word = Annotated[str | None, Parameter(negative=(), show_default=False)]
_Words = Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, show_default=False)]
_Text = Annotated[str, Parameter(show_default=False)]
_File = Annotated[Path | None, Parameter(negative=(), show_default=False)]


def monitor(
    run: Path | None = None,
    *,
    once: _Switch = False,
    json: _Switch = False,
    csv: _Switch = False,
    interval: _Word = None,
    log: _File = None,
    replay: _File = None,
    prom: _Word = None,
    device: _Words = (),
    user: _Text = "",
    name: _Text = "",
) -> int:
    """Look at NPUs, GPUs or the processor, and at a training run beside them.

    Parameters
    ----------
    run
        Folder of a run, or of a pipeline: its step, loss, tokens per second and time to go stand above the devices.
    once
        One reading, then end; also what happens where the output is no terminal.
    json
        Print a JSON object per reading; one, unless --interval is given.
    csv
        Print a line per device and reading; one reading, unless --interval is given.
    interval
        Seconds between two readings; default 1.
    log
        Append every reading to this file, a JSON object a line.
    replay
        Show the readings of such a file.
    prom
        Serve the figures to Prometheus at [HOST:]PORT, under the names of Ascend's npu-exporter.
    device
        Only these devices: 0,1 or 3.1 for the second die of card 3.
    user
        Only this user's processes, and the devices they use.
    name
        Only processes with this in their name or command, and the devices they use.
    """
    from anabatic.monitor import command, pick

    if json and csv:
        raise ConfigError("--json and --csv are two forms", "leave one out")
    return command.run(
        command.Options(
            form="json" if json else "csv" if csv else "screen",
            once=once,
            interval=None if interval is None else _seconds(interval),
            log=log,
            replay=replay,
            prom=None if prom is None else pick.address(prom),
            run=run,
            filter=pick.Filter(pick.words(device), user, name),
        )
    )


def _seconds(text: str) -> float:
    from anabatic.config import check  # it loads YAML, which a look at the devices does not need

    seconds: float = check.convert(check.Text(text), float, check.Flags(), ("interval",))
    return seconds
