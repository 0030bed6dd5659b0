"""Run a script of Megatron-LM with the one line that MindSpeed asks for: python mindspeed_gpt.py SCRIPT ARGUMENTS."""

from __future__ import annotations

import runpy
import sys

import mindspeed.megatron_adaptor  # noqa: F401 - it replaces parts of Megatron, before that is imported


def main() -> None:
    """Run the script as its own command."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
