"""The command of the distribution `anabatic-sim`: the options of `anabatic sim`, with the standard library alone.

`packaging/anabatic-sim` installs it as `anabatic-sim`; here it is `python -m anabatic_sim`.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from anabatic.core import log
from anabatic.core.errors import AnabaticError, ConfigError
from anabatic_sim import fault_injection, session
from anabatic_sim.program_name import IS_STANDALONE, PROGRAM

_INTERRUPTED = 130
"""Exit code 128 + SIGINT, as of a shell."""
_EPILOG = f"""\
{PROGRAM} --npus 8 --chip 910B3 -- torchrun --nproc_per_node 8 train.py
{PROGRAM} -- pytest tests/
{PROGRAM} -- npu-smi info
{PROGRAM} status            list the simulations that run
{PROGRAM} clean [--builds]  remove what a power failure left; with --builds also the wheels and the compiled simulator
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option as all other errors are reported."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(message, f"{PROGRAM} --help lists the options")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options in front of COMMAND."""
    parser = _Parser(
        prog=PROGRAM,
        description="Run COMMAND on simulated Ascend NPUs: the real torch_npu, devices in host memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--npus", "-n", type=int, default=1, metavar="N", help="devices, 1 to 64 (default 1)")
    parser.add_argument("--chip", default="910B3", metavar="C", help="910B1 to 910B4, 910C, 910A, 310P or a SoC name")
    parser.add_argument("--hbm", metavar="SIZE", help="memory of each device, for example 512MiB (default: the chip's)")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar=fault_injection.FAULT_SYNTAX,
        help=f"inject a fault, several times: {', '.join(fault_injection.FAULT_KINDS)}",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write counters and predicted times as JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the predicted times as a Chrome trace")
    parser.add_argument("--debug", action="store_true", help="show the compiler's output and tracebacks")
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a program and its options")
    return parser


def _read_version() -> str:
    name = "anabatic-sim" if IS_STANDALONE else "anabatic"  # the distribution that this module is part of
    return f"{name} {metadata.version(name)}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    debug = "--debug" in (words[: words.index("--")] if "--" in words else words)
    log.setup_logging(debug)
    try:
        return _run_words(words)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return _INTERRUPTED
    except AnabaticError as error:
        if debug:
            sys.stderr.write(traceback.format_exc())
        sys.stderr.write(error.render() + "\n")
        return error.exit_code


def _run_words(words: list[str]) -> int:
    if words[:1] and words[0] in _SUBCOMMANDS:
        return _SUBCOMMANDS[words[0]](words[1:])
    found = build_parser().parse_args(words)
    if found.version:
        sys.stdout.write(_read_version() + "\n")
        return 0
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not command:
        raise ConfigError("which command?", f"for example: {PROGRAM} --npus 8 -- python train.py")
    return session.run_simulation(
        command,
        npus=found.npus,
        chip=found.chip,
        hbm=found.hbm,
        fault=found.fault,
        report=found.report,
        trace=found.trace,
    )


def _show_status(words: list[str]) -> int:
    _Parser(prog=f"{PROGRAM} status").parse_args(words)
    sys.stdout.write(session.describe_machines())
    return 0


def _clean(words: list[str]) -> int:
    parser = _Parser(prog=f"{PROGRAM} clean", description="Remove what simulations left behind.")
    parser.add_argument("--builds", action="store_true", help="also the wheels and the compiled simulator")
    sys.stdout.write(session.clean_simulations(parser.parse_args(words).builds))
    return 0


_SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"status": _show_status, "clean": _clean}
