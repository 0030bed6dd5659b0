"""A run folder with a tiny random model, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from anabatic.models.pretrained import save_model
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = build_byte_tokenizer(folder / "tokenizer")
    save_model(build_random_model(len(tokenizer), max_len=256), folder / "final_model", tokenizer)
    (folder / "config.yaml").write_text("out: run\n")
    return folder
