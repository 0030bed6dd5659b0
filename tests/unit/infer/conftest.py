"""A tiny tokenizer and a tiny random model, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from anabatic.testing.untrained import byte_tokenizer, random_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer):
    return random_model(len(tokenizer))
