"""A tiny tokenizer and a tiny random model, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from anabatic.testing.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer):
    return tiny_model(len(tokenizer))
