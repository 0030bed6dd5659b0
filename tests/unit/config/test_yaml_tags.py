"""Tags of YAML that would make or run something are refused where they stand."""

from __future__ import annotations

import pytest

from anabatic.config.loading import yaml_reader
from anabatic.core.errors import ConfigError


@pytest.mark.parametrize("value", ["!!python/object/apply:os.system ['x']", "!Foo {b: 1}", "!!omap [a: 1]", "!!set {b}",
                                   "!!python/name:os.system", "!Foo x", "!Foo [1]"])  # fmt: skip
def test_unknown_tags_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml:2: tag .* is not known here"):
        yaml_reader.parse_yaml(f"a: 1\nb: {value}\n", "r.yaml")


@pytest.mark.parametrize("value", ["!!map {c: 1}", "!!seq [1]", "!!str 3", "{c: 1}", "[1]"])
def test_tags_of_what_is_there_anyway_are_read(value: str) -> None:
    assert yaml_reader.parse_yaml(f"b: {value}\n", "r.yaml").tree["b"] in ({"c": 1}, [1], "3")
