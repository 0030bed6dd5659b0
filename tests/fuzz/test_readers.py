"""No reader answers a damaged file with anything but a result or an error of ours.

`ANABATIC_TEST_FUZZ=100` takes a hundred times as many cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import (
    config_readers,
    machine_readers,
    model_readers,
    own_readers,
    plan_readers,
    rows_readers,
    run_readers,
    vessel_readers,
)
from fuzz.reading import Reader, faults

GROUPS = (
    rows_readers,
    vessel_readers,
    config_readers,
    run_readers,
    machine_readers,
    model_readers,
    plan_readers,
    own_readers,
)
READERS = [reader for group in GROUPS for reader in group.READERS]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damage(reader: Reader, tmp_path: Path) -> None:
    if reader.needs:
        pytest.importorskip(reader.needs)
    found = faults(reader, tmp_path)
    assert not found, "not a result nor an error of ours:\n  " + "\n  ".join(found)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_good_files_are_read(reader: Reader, tmp_path: Path) -> None:
    """What is damaged must have been right: a reader that refuses everything would pass."""
    if reader.needs:
        pytest.importorskip(reader.needs)
    for one in reader.good():
        (tmp_path / one.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one.name).write_bytes(one.data)
    assert reader.good()
    for one in reader.good():
        reader.read(tmp_path / one.name)  # an error is the failure
