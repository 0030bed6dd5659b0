"""`anabatic monitor`: show the devices of this machine and a running job."""

from __future__ import annotations

from pathlib import Path

from anabatic.core.errors import ConfigError


def monitor(
    run: Path | None = None,
    *,
    once: bool = False,
    json: bool = False,
    csv: bool = False,
    interval: str | None = None,
    log: Path | None = None,
    replay: Path | None = None,
    prom: str | None = None,
    device: tuple[str, ...] = (),
    user: str = "",
    name: str = "",
) -> int:
    """Monitor NPUs, GPUs or the CPU, and a training run.

    Parameters
    ----------
    run
        Run or pipeline folder; its step, loss, tokens per second and remaining time are shown above the devices.
    once
        Print one reading and exit; the default if the output is not a terminal.
    json
        Print one JSON object per reading; a single reading unless --interval is given.
    csv
        Print one CSV line per device and reading; a single reading unless --interval is given.
    interval
        Seconds between two readings; default 1.
    log
        Append every reading to this file, one JSON object per line.
    replay
        Replay the readings of such a file.
    prom
        Serve Prometheus metrics at [HOST:]PORT, with the names of Ascend's npu-exporter.
    device
        Show only these devices: 0,1 or 3.1 for the second die of card 3.
    user
        Show only this user's processes and the devices they use.
    name
        Show only processes whose name or command contains this text, and the devices they use.
    """
    from anabatic.monitor import command, device_filter

    if json and csv:
        raise ConfigError("--json and --csv are two forms", "leave one out")
    return command.run(
        command.MonitorOptions(
            output_format="json" if json else "csv" if csv else "screen",
            once=once,
            interval=None if interval is None else _parse_interval(interval),
            log=log,
            replay=replay,
            prom=None if prom is None else device_filter.parse_address(prom),
            run=run,
            filter=device_filter.DeviceFilter(device_filter.parse_device_numbers(device), user, name),
        )
    )


def _parse_interval(text: str) -> float:
    from anabatic.config.loading import validation  # loads YAML, which the monitor does not need otherwise

    seconds: float = validation.convert_value(
        validation.UntypedText(text), float, validation.OptionNamer(), ("interval",)
    )
    return seconds
