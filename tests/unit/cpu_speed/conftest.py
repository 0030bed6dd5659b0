"""A tiny tokenizer and a tiny random model, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from anabatic_testing.random_models import build_byte_tokenizer, build_random_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer):
    return build_random_model(len(tokenizer))
