"""Lines that no log should hold and some do: padded, nested, megabytes long. All are read in time like their length."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


_FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\n'
_ODD = {
    "blanks behind error": "x error" + " " * 20_000 + "y",
    "blanks behind many": ("ret" + " " * 200) * 300,
    "one prefix often": "[a]: " * 40 + "!Error: ",
    "two prefixes often": "[a] (b) 3: " * 300 + "!Error: ",
    "prefixes below a frame": _FRAMES + "[a] (b)] " * 60 + "!",
    "brackets below a frame": _FRAMES + "]" * 5_000 + "!",
    "HCCL often": "error hccl function " + "function error: hccl " * 20_000,
    "HCCL in one word": "error fail " + "hccl" * 50_000,
    "digits": "status s/it " + "9" * 100_000 + " error",
}
_READ = """
import json, sys
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import diagnosis
for text in json.load(sys.stdin):
    diagnosis.explain_text(text, knowledge_base.load_knowledge())
"""
_PATIENCE = 300
"""Seconds that none of them comes near: before they were bounded, most took longer than a day."""


def test_no_line_is_tried_in_more_ways_than_it_has_bytes() -> None:
    # A search cannot be interrupted from within its process.
    told = json.dumps(list(_ODD.values()))
    subprocess.run([sys.executable, "-c", _READ], input=told, text=True, check=True, timeout=_PATIENCE)
