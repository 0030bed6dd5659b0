"""Name the program as it is typed."""

from __future__ import annotations

import importlib.util

IS_STANDALONE = importlib.util.find_spec("anabatic.cli") is None
"""This is the distribution `anabatic-sim`: the simulator and what it needs of `anabatic` (packaging/anabatic-sim)."""
PROGRAM = "anabatic-sim" if IS_STANDALONE else "anabatic sim"
