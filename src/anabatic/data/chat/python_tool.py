"""Format of a python-tool call in an answer: the code, then its output.

The names are those of nanochat (nanochat/tokenizer.py).
"""

from __future__ import annotations

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
OUTPUT_START, OUTPUT_END = "<|output_start|>", "<|output_end|>"


def format_python_call(code: str, output: str) -> str:
    """Return a call with its output."""
    return f"{PYTHON_START}{code}{PYTHON_END}{OUTPUT_START}{output}{OUTPUT_END}"
