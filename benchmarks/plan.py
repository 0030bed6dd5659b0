"""Memory on paper beside memory measured: the peak of the real NPU allocator on simulated NPUs, or of torch's allocator
on a CPU, setting by setting.

    python benchmarks/plan.py [--device npu|cpu] [--only full,lora] [--json FILE] [--docs] [--read FILE]

Every row trains a small Qwen2, Qwen3-MoE if its name begins with "experts" or Qwen3-VL if it begins with "pictures",
for a few steps with `anabatic sft` on one to eight simulated NPUs (bf16), or in one process on the CPU (fp32), and
asks `anabatic plan` for the same command. On NPUs the peak is the mean over the ranks, as routers do not divide tokens
evenly, and of a pipeline over those of the stage that needs most. On a CPU torch's profiler tells of every allocation;
their running sum has a peak within the steps (a checkpoint's copies come after them). What Python and libraries hold
beside it is not in there. Sizes are chosen so that each part decides in some row: activations, logits, optimizer,
gathered weights. The tokens of a micro-batch are full but for what no row fits into.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plan_tables
import sim_ranks

MIB = 2**20
STEPS = 4
"""The third neither logs nor follows one that does: `layouts.py` counts it."""
NARROW = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
LORA = ["--tuner", "lora"]
CHUNKS = ["--parallel.pipeline-chunks", "2"]
ADAPTED_EXPERTS = [*LORA, "--lora.target-modules", "all-linear", "all-experts"]
SEEING = dict(hidden_size=256, intermediate_size=704, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
ALL_PARTS = ["--vision.train", "language,projector,tower"]
EXPERTS = {**NARROW, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


class Row(NamedTuple):
    """One measurement."""

    name: str
    shape: dict[str, Any]
    tokens: int
    options: list[str] = []
    npus: int = 1
    steps: int = 1


def _of(base: dict[str, int], layers: int, vocab: int = 320, **more: Any) -> dict[str, Any]:
    return {**base, "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": False, **more}


def _seeing(layers: int, depth: int, width: int) -> dict[str, Any]:
    tower = {"depth": depth, "hidden_size": width, "intermediate_size": 4 * width, "num_heads": width // 32}
    return _of(SEEING, layers, tower=tower | {"out_hidden_size": 256})


def _context(ranks: int, method: str = "ulysses") -> list[str]:
    return ["--parallel.context", str(ranks), "--parallel.context-method", method]


def _zero(stage: int) -> list[str]:
    return ["--parallel.strategy", f"zero{stage}"]


def _copies(number: int) -> list[str]:
    return [*_zero(3), "--parallel.replicate", str(number)]


def _stages(number: int) -> list[str]:
    return ["--parallel.pipeline", str(number)]


def _expert(ranks: int) -> list[str]:
    return ["--parallel.expert", str(ranks)]


ROWS = (
    Row("full, 2,048 tokens", _of(NARROW, 4), 2048),
    Row("full, 8,192 tokens", _of(NARROW, 8), 8192),
    Row("full, few tokens", _of(WIDE, 8), 256),
    Row("full, 32,768 words", _of(NARROW, 4, 32768), 2048),
    Row("full, tied 16,384 words", _of(NARROW, 4, 16384, tie_word_embeddings=True), 512),
    Row("full, two micro-batches", _of(WIDE, 8), 1024, steps=2),
    Row("full, recompute full", _of(NARROW, 8), 8192, ["--recompute", "full"]),
    Row("full, recompute selective", _of(NARROW, 8), 8192, ["--recompute", "selective"]),
    Row("full, bf16 with Kahan", _of(WIDE, 8), 512, ["--optim.weights", "bf16_kahan"]),
    Row("full, Muon", _of(WIDE, 8), 512, ["--optim.name", "muon"]),
    Row("freeze, two blocks", _of(WIDE, 8), 2048, ["--tuner", "freeze", "--freeze.last-layers", "2"]),
    Row("lora, 8,192 tokens", _of(NARROW, 8), 8192, LORA),
    Row("lora, 32,768 words", _of(NARROW, 4, 32768), 2048, LORA),
    Row("lora r 64, few tokens", _of(WIDE, 8), 512, [*LORA, "--lora.r", "64"]),
    Row("lora, recompute full", _of(NARROW, 8), 8192, [*LORA, "--recompute", "full"]),
    Row("full, ddp", _of(WIDE, 8), 256, npus=2),
    Row("full, zero2", _of(WIDE, 8), 256, _zero(2), npus=2),
    Row("full, zero3", _of(WIDE, 8), 256, _zero(3), npus=2),
    Row("full, zero3, 4,096 tokens", _of(WIDE, 8), 4096, _zero(3), npus=2),
    Row("lora, zero3", _of(WIDE, 8), 2048, [*_zero(3), *LORA], npus=2),
    Row("full, zero3, offload", _of(WIDE, 8), 1024, [*_zero(3), "--parallel.offload", "cpu"], npus=2),
    Row("full, tensor 2", _of(WIDE, 8), 1024, ["--parallel.tensor", "2"], npus=2),
    Row("full, zero3, context 2", _of(WIDE, 8), 4096, [*_zero(3), *_context(2)], npus=2),
    Row("full, zero3, ring 2", _of(WIDE, 4), 1024, [*_zero(3), *_context(2, "ring")], npus=2),
    Row("lora, zero3, context 2", _of(WIDE, 4), 1024, [*_zero(3), *_context(2), *LORA], npus=2),
    Row("full, ddp, context 2", _of(WIDE, 4), 1024, _context(2), npus=2),
    Row("full, zero3, replicate 2", _of(WIDE, 4), 512, _copies(2), npus=4),
    Row("full, context 2 x tensor 2", _of(WIDE, 4), 1024, [*_context(2), "--parallel.tensor", "2"], npus=4),
    Row("full, zero3 x tensor 2", _of(WIDE, 4), 512, [*_zero(3), "--parallel.tensor", "2"], npus=4),
    Row("full, pipeline 2", _of(WIDE, 8), 1024, _stages(2), npus=2, steps=4),
    Row("lora, pipeline 2", _of(WIDE, 8), 1024, [*_stages(2), *LORA], npus=2, steps=4),
    Row("full, pipeline 2 of 2 chunks", _of(WIDE, 8), 1024, [*_stages(2), *CHUNKS], npus=2, steps=4),
    Row("lora, pipeline 2 of 2 chunks", _of(WIDE, 8), 1024, [*_stages(2), *CHUNKS, *LORA], npus=2, steps=4),
    Row("full, zero3 x pipeline 2", _of(WIDE, 8), 512, [*_zero(3), *_stages(2)], npus=4, steps=2),
    Row("full, pipeline 2 x tensor 2", _of(WIDE, 8), 512, [*_stages(2), "--parallel.tensor", "2"], npus=4, steps=4),
    Row("experts, ddp", _of(EXPERTS, 4), 1024, npus=2),
    Row("experts, ddp, expert 2", _of(EXPERTS, 4), 1024, _expert(2), npus=2),
    Row("experts, zero2, expert 2", _of(EXPERTS, 4), 1024, [*_zero(2), *_expert(2)], npus=2),
    Row("experts, zero3, expert 2", _of(EXPERTS, 4), 1024, [*_zero(3), *_expert(2)], npus=2),
    Row("experts, lora, expert 2", _of(EXPERTS, 4), 1024, [*ADAPTED_EXPERTS, *_expert(2)], npus=2),
    Row("experts, zero3, expert 4", _of(EXPERTS, 4), 1024, [*_zero(3), *_expert(4)], npus=4),
    Row("experts, zero3, context 2 x expert 2", _of(EXPERTS, 4), 1024, [*_zero(3), *_context(2), *_expert(2)], npus=4),
    Row("pictures, lora", _seeing(4, 4, 256), 1024, LORA),
    Row("pictures, lora, wide tower", _seeing(2, 4, 768), 1024, LORA),
    Row("pictures, full", _seeing(4, 4, 256), 1024),
    Row("pictures, full, tower", _seeing(4, 4, 256), 1024, ALL_PARTS),
    Row("pictures, lora, tower", _seeing(4, 4, 256), 1024, [*LORA, *ALL_PARTS]),
    Row("pictures, full, tower, recompute full", _seeing(4, 4, 256), 1024, [*ALL_PARTS, "--recompute", "full"]),
    Row("pictures, zero3, tower", _seeing(4, 4, 256), 1024, [*_zero(3), *ALL_PARTS], npus=2),
    Row("full, zero3, 8 ranks", _of(WIDE, 8), 1024, _zero(3), npus=8),
    Row("full, zero3, replicate 2 x context 2", _of(WIDE, 4), 1024, [*_copies(2), *_context(2)], npus=8),
    Row("full, zero3, ring 4", _of(WIDE, 4), 2048, [*_zero(3), *_context(4, "ring")], npus=8),
    Row("experts, zero3, replicate 2 x expert 2", _of(EXPERTS, 4), 1024, [*_copies(2), *_expert(2)], npus=8),
)


def prepare_pictures(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model that sees, and rows of a picture of 64 tokens and about as many letters."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from suite import tiny_vision

    sizes = {"max_position_embeddings": 4096, **shape}
    tower = sizes.pop("tower")
    config = tiny_vision.make_config()
    for part, values in ((config.text_config, sizes), (config.vision_config, tower)):
        for name, value in values.items():
            setattr(part, name, value)
    config.text_config.rope_parameters["mrope_section"] = [6, 5, 5]
    torch.manual_seed(0)
    processor = tiny_vision.save_processor(folder / "model") / "preprocessor_config.json"
    sizes_of_pictures = {"size": {"shortest_edge": 1024, "longest_edge": 64 * 1024}}
    processor.write_text(json.dumps(json.loads(processor.read_text()) | sizes_of_pictures))
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    draw, noise = random.Random(0), np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(noise.integers(0, 255, (256, 256, 3)).astype(np.uint8)).save(folder / f"{number}.png")
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>go"}, {"role": "assistant", "content": answer}],
            "images": [f"{number % 8}.png"],
        }
        for number in range(200)
        for answer in ["".join(draw.choices(string.ascii_letters, k=draw.randrange(48, 80)))]
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def prepare(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model, a tokenizer and rows."""
    if "tower" in shape:
        return prepare_pictures(folder, shape)
    import torch
    import transformers

    from anabatic.data.tokenizer import hf_folder as tokenizers
    from anabatic.models.pretrained import save_model
    from anabatic_testing.tiny_models import build_tiny_qwen2, train_tiny_tokenizer, write_tiny_text

    torch.manual_seed(0)
    tokens = train_tiny_tokenizer(folder, write_tiny_text(folder))
    sizes = {"max_position_embeddings": 4096, **shape}
    if "num_experts" in shape:
        made = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None, **sizes}
        model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**made))
    else:
        model = build_tiny_qwen2(**sizes)
    save_model(model, folder / "model", tokenizers.load_tokenizer(tokens))
    draw = random.Random(0)  # letters of all kinds, so that routers send about as many tokens to each expert
    answers = ["".join(draw.choices(string.ascii_letters + " ", k=1500)) for _ in range(400)]
    rows = [
        {"messages": [{"role": "user", "content": f"go {n}"}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def command(row: Row, folder: Path, device: str) -> list[str]:
    """The training, as typed."""
    sharing = ("--parallel.tensor", "--parallel.context")
    data_ranks = row.npus
    for option, value in itertools.pairwise(row.options):
        data_ranks //= int(value) if option in sharing else 1
    given = {
        "model": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.valid-fraction": 0,
        "data.cache": folder / "cache",
        "out": folder / "run",
        "device.dtype": {"npu": "bf16", "cpu": "fp32"}[device],
        "batch.seq-len": 256,
        "batch.micro-batch-tokens": row.tokens,
        "batch.global-batch-tokens": row.tokens * data_ranks * row.steps,
        "schedule.max-steps": STEPS,
        "log.every": STEPS,
        "log.samples": 0,
        "save.resume": "never",
        "save.background": "off",
    }
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    words += ["--device.type", "cpu"] if device == "cpu" else []
    return ["sft", *words, "--train-on-inputs", *row.options]


def plan(words: list[str], options: list[str]) -> dict[str, Any]:
    """The plan of a command; it answers 1 for what does not fit."""
    given = [sys.executable, "-m", "anabatic", "plan", "--json", *options, "--", *words]
    done = subprocess.run(given, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(row: Row, device: str) -> dict[str, Any]:
    """Bytes measured and planned, and what decides the plan."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, row.shape)
        words = command(row, folder, device)
        step_seconds = 0.0
        planned = plan(words, ["--chip", "here"] if device == "cpu" else ["--npus", str(row.npus)])
        if device == "cpu":
            words = [sys.executable, __file__, "--measure", str(folder / "peak"), *words]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            measured = int((folder / "peak").read_text())
        else:
            (ranks := folder / "ranks").mkdir()
            found = sim_ranks.train(words, row.npus, ranks)
            measured = compute_peak([rank.peak_bytes for rank in found], get_stages(row))
            step_seconds = max(rank.counters.mean_per_step("paper_ns") for rank in found) / 1e9
    return {
        "name": row.name,
        "measured": measured,
        "planned": planned["memory_bytes"],
        "moment": planned["moment"],
        "step_seconds": step_seconds,
        "planned_step_seconds": planned["step_seconds"],
    }


def get_stages(row: Row) -> int:
    """The stages of a row's pipeline; 1 without one."""
    return next((int(value) for option, value in itertools.pairwise(row.options) if option == _stages(1)[0]), 1)


def compute_peak(peaks: Sequence[int], stages: int) -> int:
    """Return the mean over the ranks, of a pipeline over those of the stage that needs most: the first ranks are those
    of the first stage."""
    size = len(peaks) // stages
    return round(max(statistics.mean(peaks[start : start + size]) for start in range(0, len(peaks), size)))


def measure(file: Path, words: list[str]) -> None:
    """Run a command here and write the peak of what torch's allocator has given out on the CPU within steps."""
    from torch.profiler import ProfilerActivity, profile

    from anabatic.cli.app import main as anabatic

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        try:
            anabatic(words)
        except SystemExit as end:
            if end.code:
                raise
    found = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    steps = [(event.start_ns(), event.end_ns()) for event in found if event.name() == "anabatic.step"]
    held = zip((at for at, _ in changes), itertools.accumulate(change for _, change in changes), strict=True)
    file.write_text(str(max(size for at, size in held if any(begun <= at <= ended for begun, ended in steps))))


def write_docs(device: str, found: list[dict[str, Any]]) -> None:
    """Put rows into the table of the guides, in MiB; the others stay."""
    titles = {row.name: row.name if row.npus == 1 else f"{row.name}, {row.npus} NPUs" for row in ROWS}
    rows: list[Sequence[str]] = []
    for one in found:
        measured, planned = one["measured"] / MIB, one["planned"] / MIB
        cells = [f"{measured:.0f}", f"{planned:.0f}", f"{planned / measured - 1:+.1%}", one["moment"]]
        rows.append([titles[one["name"]], *cells])
    rows = plan_tables.merge(device, list(titles.values()), rows)
    plan_tables.write(device, ["setting", "measured", "planned", "", "highest at"], rows)


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = plan_tables.parser(__doc__, "npu", [row.name for row in ROWS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="take the measurements of an earlier --json")
    options = parser.parse_args()
    chosen = [row for row in ROWS if row.name in options.only]
    if options.device == "cpu":  # one process, and weights that a CPU trains
        chosen = [row for row in chosen if row.npus == 1 and "bf16" not in row.name]
    if options.read:
        write_docs(options.device, json.loads(options.read.read_text()))
        return
    found = []
    print(f"  {'':28} {'measured':>9} {'planned':>9} {'MiB':>11}   highest at")
    for row in chosen:
        one = compare(row, options.device)
        found.append(one)
        measured, planned = one["measured"], one["planned"]
        sizes = f"{measured / MIB:9.1f} {planned / MIB:9.1f} {planned / measured - 1:+11.1%}"
        times = (
            f"{1000 * one['step_seconds']:8.1f} {1000 * one['planned_step_seconds']:8.1f}"
            if one["step_seconds"]
            else ""
        )
        print(f"  {row.name:40} {sizes} {times}   {one['moment']}", flush=True)
    worst = max(abs(one["planned"] / one["measured"] - 1) for one in found)
    print(f"{len(found)} settings, the largest difference {worst:.1%}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.docs:
        write_docs(options.device, found)


if __name__ == "__main__":
    main()
