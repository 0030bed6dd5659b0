"""The benchmark of faults itself, with two of them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from e2e.home import Home

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_killed_rank_and_a_flipped_bit(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    faults = importlib.import_module("faults")
    plan = faults.Plan(tmp_path, 60.0, 120.0, home.text, home.tokenizer, machines=1)
    found, equal = faults.compare(plan, {"machines": ["rank", "flip"]}, seed=0, workers=1)
    assert equal == {"machines": True} and [one.kind for one in found] == ["rank", "flip"]
    assert all(one.recovered and one.said for one in found), found
    assert found[0].again <= faults.INTERVAL and found[1].again <= 2 * faults.INTERVAL
    killed, flipped = faults.table(found, equal).splitlines()[2:]
    assert killed.startswith("| kill -9 of a rank | 1 | 1 | 1 |") and killed.endswith("| yes |")
    assert flipped.endswith("| yes |")
