"""The requests of the guide, in both languages, typed as they stand there; only the address is another."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_random_model
from unit.infer.server.running import catalogue_of, serving

DOCS = Path(__file__).resolve().parents[4] / "docs"
ADDRESS = "http://127.0.0.1:8000"
TEXTS = [(DOCS / code / "guides" / "serving.md").read_text(encoding="utf-8") for code in ("en", "zh")]


def blocks(text: str, kind: str) -> list[str]:
    """Blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


CURL = list(dict.fromkeys(block for text in TEXTS for block in blocks(text, "bash") if "curl " in block))
PYTHON = list(dict.fromkeys("\n".join(blocks(text, "python")) for text in TEXTS))
"""A page's program: later blocks use what earlier ones have made."""


@pytest.fixture(scope="module")
def guided(tokenizer):
    model = build_random_model(len(tokenizer), max_len=1024)  # a byte is a token: tools need room
    engine = Engine(model, tokenizer, max_batch=2, max_len=1024)
    with serving(catalogue_of({"sft": (engine, model)})) as running:
        yield running


def test_there_are_examples():
    assert CURL
    assert PYTHON
    assert all(ADDRESS in block for block in CURL + PYTHON)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("number", range(len(CURL)))
def test_curl(guided, number):
    lines = CURL[number].replace(ADDRESS, guided.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-ec", lines], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"error"' not in done.stdout
    assert done.stdout


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(guided, number):
    pytest.importorskip("openai")
    said, made = io.StringIO(), {}
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(PYTHON[number].replace(ADDRESS, guided.url), "serving.md", "exec"), made)
    finally:
        made["client"].close()
    assert said.getvalue()
