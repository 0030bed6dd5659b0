"""llama.cpp's converter, played by a script; and whether a GGUF file is whole."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, Failure
from anabatic.recipes.export import gguf_converter

SCRIPT = """\
import json, os, pathlib, signal, sys
here = pathlib.Path(__file__).parent
mode = (here / "mode").read_text()
if "--help" in sys.argv:
    print("ModuleNotFoundError: No module named 'gguf'" if mode == "broken" else "usage: ...")
    sys.exit(1 if mode == "broken" else 0)
source = pathlib.Path(sys.argv[1])
files = sorted(path.name for path in source.iterdir())
(here / "asked.json").write_text(json.dumps({"arguments": sys.argv[2:], "files": files}))
if mode == "exit":
    print("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
    sys.exit(3)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
data = (here / "whole.gguf").read_bytes()
if mode != "silent":
    pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_bytes(data[:-1] if mode == "torn" else data)
"""


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(tensors, alignment=32, keys=()):
    """A GGUF file (version 3) of F32 tensors: [(name, shape)]."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys) + 1)
    for name, kind, value in [("general.alignment", 4, struct.pack("<I", alignment)), *keys]:
        head += text(name) + struct.pack("<I", kind) + value
    offset, infos = 0, b""
    for name, shape in tensors:
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset)
        numbers = 1
        for size in shape:
            numbers *= size
        offset += -(-numbers * 4 // alignment) * alignment
    head += infos
    last = offset - (-(-numbers * 4 // alignment) * alignment) + numbers * 4 if tensors else 0
    return head + b"\0" * (-len(head) % alignment) + b"\1" * last


KEYS = [
    ("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("你")),
    ("scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 1, 2)),
    ("name", 8, text("x")),
    ("flag", 7, b"\1"),
]
WHOLE = gguf_bytes([("a", (3, 4)), ("b", (5,))], 64, KEYS)


@pytest.fixture
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama.cpp")
    (folder / "convert_hf_to_gguf.py").write_text(SCRIPT)
    (folder / "whole.gguf").write_bytes(WHOLE)

    def mode(name="good"):
        (folder / "mode").write_text(name)
        return str(folder)

    return mode


@pytest.mark.process
def test_the_converter_reads_the_whole_folder(write, llama):
    folder = Path(llama())
    out = write(gguf="q8_0", llama_cpp=str(folder), name="mine")
    asked = json.loads((folder / "asked.json").read_text())
    assert asked["arguments"][0] == "--outfile" and asked["arguments"][1].endswith("/mine-q8_0.gguf")
    assert asked["arguments"][2:] == ["--outtype", "q8_0"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(asked["files"])
    assert (out / "mine-q8_0.gguf").read_bytes() == WHOLE
    assert "FROM ./mine-q8_0.gguf" in (out / "Modelfile").read_text()


FAILURES = {
    "exit": (Failure, "failed with exit code 3", "pre-tokenizers of published models"),
    "killed": (Failure, "failed with signal 9", "converter's"),
    "torn": (Failure, "is incomplete: it ends at", "again"),
    "silent": (Failure, "is incomplete: it was not written", "again"),
    "broken": (ConfigError, "does not start .*No module named 'gguf'", "requirements"),
}


@pytest.mark.process
@pytest.mark.parametrize("mode", FAILURES)
def test_a_converter_that_fails_leaves_nothing(write, llama, mode, tmp_path):
    kind, words, hint = FAILURES[mode]
    with pytest.raises(kind, match=words) as caught:
        write(gguf="f16", llama_cpp=llama(mode))
    assert hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_converter_that_is_not_there(write, tmp_path, monkeypatch, llama):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no convert_hf_to_gguf.py on PATH") as caught:
        write(gguf="f16")
    assert "git clone https://github.com/ggml-org/llama.cpp" in caught.value.hint
    with pytest.raises(ConfigError, match="there is no"):
        write(gguf="f16", llama_cpp=str(tmp_path))
    script = Path(llama()) / "convert_hf_to_gguf.py"
    script.write_text(f"#!{sys.executable}\n{SCRIPT}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert (write(gguf="f32") / "out-f32.gguf").read_bytes() == WHOLE


def test_every_torn_file_is_found(tmp_path):
    path = tmp_path / "x.gguf"
    for length in range(0, len(WHOLE), 3):
        path.write_bytes(WHOLE[:length])
        assert gguf_converter.find_gguf_fault(path)
    path.write_bytes(WHOLE)
    assert gguf_converter.find_gguf_fault(path) == ""
    assert gguf_converter.read_header(io.BytesIO(WHOLE)) == gguf_converter.GgufHeader(2, 17, len(WHOLE))
    path.write_bytes(gguf_bytes([]))
    assert gguf_converter.find_gguf_fault(path) == "it holds no tensor"


@given(st.binary(max_size=80), st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8))
@settings(max_examples=60)
def test_damaged_headings_are_no_faults_of_ours(tail, place, changed):
    for data in (b"GGUF" + tail, WHOLE[:place] + changed + WHOLE[place + len(changed) :]):
        with contextlib.suppress(ValueError):
            gguf_converter.read_header(io.BytesIO(data))
