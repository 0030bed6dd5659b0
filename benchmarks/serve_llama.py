"""How fast is generation beside llama.cpp, called from Python, on the same CPU and the same weights?

    python3 -m venv LLAMA && LLAMA/bin/pip install llama-cpp-python gguf   # compiles for about ten minutes
    python benchmarks/serve_llama.py --llama LLAMA/bin/python

Both run the model of `serve.py`, greedily, one thread, in turns: a turn answers all requests. llama-cpp-python answers
one request after the other, which is all that its Python class offers; ours also answers sixteen at a time. What counts
is CPU time. The weights go over as a GGUF file, whose layout is that of the `gguf` package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from option_types import positive_int, program

DTYPES = ("fp32", "bf16")
Wanted = list[tuple[list[int], int]]


def write_gguf(weights: Path, target: Path, dtype: str) -> None:
    """Write the model's weights as llama.cpp reads them; runs beside `gguf`."""
    import gguf
    import numpy as np

    config = json.loads((weights / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, values in np.load(weights / "weights.npz").items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if dtype == "bf16" and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(new, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_llama(weights: Path, dtype: str) -> None:
    """The other side: answer lines of requests with CPU seconds and tokens."""
    from llama_cpp import Llama

    target = weights / f"{dtype}.gguf"
    write_gguf(weights, target, dtype)
    model = Llama(str(target), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    for line in sys.stdin:
        began, answers = time.process_time(), []
        for prompt, size in json.loads(line):
            model.reset()
            answer: list[int] = []
            for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
                answer.append(token)
                if len(answer) == size:
                    break
            answers.append(answer)
        print(json.dumps({"cpu": time.process_time() - began, "answers": answers}), flush=True)


class Llama:
    """The other side's process."""

    def __init__(self, python: str, weights: Path, dtype: str) -> None:
        self.process = subprocess.Popen(
            [python, __file__, "--side", str(weights), "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, wanted: Wanted) -> tuple[float, list[list[int]]]:
        """Return CPU seconds and the answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the side of llama.cpp ended with exit code {self.process.wait()}")
        found = json.loads(line)
        return found["cpu"], found["answers"]

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def save_weights(folder: Path) -> None:
    """Write the model of `serve.py` as arrays, and its settings."""
    import numpy as np

    import serve

    model = serve.model_of(1)
    arrays = {name: values.numpy() for name, values in model.state_dict().items() if name != "lm_head.weight"}
    np.savez(folder / "weights.npz", **arrays)
    config = model.config.to_dict()
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": theta}, default=str))


def make_engine(dtype: str, at_once: int) -> Any:
    """Return our engine."""
    import torch

    import serve
    from anabatic.infer.engine import Engine
    from anabatic.models.pretrained import prepare_model

    model = prepare_model(
        serve.model_of(1).to(torch.bfloat16 if dtype == "bf16" else torch.float32), torch.device("cpu")
    )
    return Engine(model, serve.Letters(), max_batch=at_once, max_len=serve.LONGEST)


def answer(engine: Any, wanted: Wanted) -> tuple[float, list[list[int]]]:
    """Return CPU seconds and answers of ours; nothing of earlier prompts is kept."""
    from anabatic.config.chat import Sampling

    began = time.process_time()
    samplings = [Sampling(temperature=0.0, max_new_tokens=size) for _, size in wanted]
    answers = [one.ids for one in engine.generate([prompt for prompt, _ in wanted], samplings, [])]
    engine.clear_prefix_cache()
    return time.process_time() - began, answers


def compare(python: str, weights: Path, dtype: str, wanted: Wanted, rounds: int) -> None:
    """Print how ours and llama.cpp fare."""
    import serve

    engines = {"one at a time": make_engine(dtype, 1), f"{serve.AT_ONCE} at a time": make_engine(dtype, serve.AT_ONCE)}
    llama = Llama(python, weights, dtype)
    _, expected = llama.answer(wanted)
    tokens = sum(size for _, size in wanted)
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    rates: list[float] = []
    same = {name: sum(map(list.__eq__, answer(engine, wanted)[1], expected)) for name, engine in engines.items()}
    for _ in range(rounds):
        theirs, _ = llama.answer(wanted)
        rates.append(tokens / theirs)
        for name, engine in engines.items():
            ratios[name].append(theirs / answer(engine, wanted)[0])
    llama.close()
    print(f"{dtype}: llama.cpp {statistics.median(rates):.0f} tokens/CPU s", flush=True)
    for name, found in ratios.items():
        spread = f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
        print(f"  engine, {name}: {spread} of its rate, {same[name]} of {len(wanted)} answers are its own", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=program, help="Python with llama-cpp-python and gguf")
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--requests", type=positive_int, default=32, help="different requests")
    parser.add_argument("--dtype", choices=DTYPES, help="of these alone")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.side:
        serve_llama(options.side, options.dtype)
        return
    if not options.llama:
        parser.error("--llama is missing: a Python that has llama-cpp-python and gguf")
    import serve

    wanted = serve.requests_of(options.requests)
    with tempfile.TemporaryDirectory() as folder:
        save_weights(Path(folder))
        for dtype in (options.dtype,) if options.dtype else DTYPES:
            compare(options.llama, Path(folder), dtype, wanted, options.rounds)


if __name__ == "__main__":
    main()
