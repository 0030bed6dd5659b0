"""How a call of the python tool stands in what the assistant says: the code that was run, then what came of it.

The names are those of nanochat (nanochat/tokenizer.py).
"""

from __future__ import annotations

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"


def format_python_call(code: str, output: str) -> str:
    """Return a call with its output."""
    return f"{PYTHON_START}{code}{PYTHON_END}{OUTPUT_START}{output}{OUTPUT_END}"
