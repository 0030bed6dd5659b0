"""Names of data sets: revision and weight are told apart, and every name is read back as it was written."""

from __future__ import annotations

import pytest

from anabatic.core.errors import ConfigError
from anabatic.data.readers.sources import parse_source


@pytest.mark.parametrize(
    "spec, path, rows, weight",
    [
        ("hf:a/b", "hf:a/b", None, None),
        ("hf:a/b@0.5", "hf:a/b", None, 0.5),
        ("hf:a/b@v1.0", "hf:a/b@v1.0", None, None),
        ("hf:a/b@1.0:train", "hf:a/b@1.0:train", None, None),
        ("hf:a/b@main/sub:test#10@0.5", "hf:a/b@main/sub:test", 10, 0.5),
        ("hf:a/b@refs/convert/parquet/sub:train", "hf:a/b@refs/convert/parquet/sub:train", None, None),
        ("ms:a/b:test#7", "ms:a/b:test", 7, None),
    ],
)
def test_parts_of_a_spec(spec: str, path: str, rows: int | None, weight: float | None) -> None:
    source = parse_source(spec)
    assert (source.path, source.rows, source.weight) == (path, rows, weight)
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "spec", ["hf:gsm8k", "hf:", "hf://a/b", "hf:a/../b", "hf:a/b/c/d", "hf:a/b#x", "hf:a/b@main@2"]
)
def test_what_is_no_name(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_source(spec)
    assert "OWNER/NAME" in caught.value.hint or "PATH" in caught.value.hint
