"""Every command where only the base dependencies are: `python bare.py FOLDER [blocked name ...]`, JSON on stdout.

The names are top-level modules that are hidden from this Python, as if they were not installed. Needs nothing of the
tests, so that it also runs in an environment that holds the wheel alone.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import io
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHORT = "--batch.seq-len 64 --batch.micro-batch-tokens 256 --batch.global-batch-tokens 256 --schedule.max-steps 2 "
SHORT += "--device.type cpu"
SMALL = "--data text.jsonl --model.depth 1 --model.width 64"
ANSWERS = "--sampling.max-new-tokens 2 --device.type cpu"
VESSEL = "--data rows.jsonl --depth 1"
TRACKS = "ais.csv -o words --tracks.min-points 2 --tracks.points 4"

HELP = """
run | report | pretrain | sft | dpo | rl | reward | merge | export | push | eval | infer | chat | serve | studio
tokenizer train | tokenizer eval | classify words | classify pretrain | classify train | classify predict
classify eval | classify map
checkpoint list | checkpoint verify | checkpoint export | bench train | bench scaling | bench compare | bench infer
bench tokenize | bench collective | bench io | doctor | env | explain | launch | launch k8s | launch slurm | launch ray
plan | sim | monitor | data preview | data stats | data check | data tokenize | config show | config check
config from-swift | config from-llamafactory | config from-deepspeed | config from-nanochat | config schema
recipes list | recipes show | recipes copy | completion | completion words | help
vision draw | vision build | vision score
"""
"""Asked for their help, one each."""

WORKS = (
    "--version",
    "doctor",
    "env --explain",
    "explain EI0006",
    "monitor --once",
    "config show sft",
    "config schema run",
    "completion zsh",
    "completion words -- sft --tun",
    "help packing",
    "help --search packing",
    "recipes list",
    "recipes show overlays/tiny",
    "recipes copy qwen-lora mine.yaml",
    "config check mine.yaml",
    "run demo --dry-run",
    "config from-swift -- swift sft --model MODEL --dataset rows.jsonl",
    "plan --npus 8 -- sft --model Qwen/Qwen2.5-7B --data rows.jsonl --tuner lora",
    "tokenizer train --data text.jsonl --vocab-size 300 --out words",
    "data preview text.jsonl -m MODEL",
    "data stats text.jsonl -m MODEL --seq-len 64",
    "data check text.jsonl --data.valid-fraction 0",
    "data tokenize text.jsonl --tokenizer TOKENIZER",
    "tokenizer eval --data text.jsonl --tokenizers TOKENIZER",
    f"pretrain --tokenizer TOKENIZER {SMALL} --out base {SHORT}",
    f"sft --model MODEL --data task:spelling#40 --tuner lora --out sft {SHORT}",
    f"dpo --model MODEL --data pairs.jsonl --out dpo {SHORT}",
    f"reward --model MODEL --data pairs.jsonl --out reward {SHORT}",
    "rl --model MODEL --data task:spelling#40 --rewards answer --out rl --examples-per-step 2 --num-samples 2 "
    f"--device-batch-size 2 --batch.seq-len 64 --schedule.max-steps 1 {ANSWERS}",
    "report base sft --out compared.html",
    "checkpoint list base",
    "checkpoint verify base",
    "merge -m sft --out merged",
    "export MODEL -o exported",
    "push exported --to acme/tiny --dry-run",
    "eval MODEL --data text.jsonl --tasks task:spelling#4 --device.type cpu --out eval",
    f"infer prompts.jsonl -m MODEL -o answers.jsonl {ANSWERS}",
    f"chat -m MODEL -p hi {ANSWERS}",
    "bench tokenize --data text.jsonl --tokenizer TOKENIZER -o bench",
    f"classify words {TRACKS} --tracks.format motion",
    f"classify pretrain {VESSEL} --out vessels {SHORT}",
    f"classify train {VESSEL} --out vessel --head.trees 0 {SHORT}",
    "classify predict rows.jsonl -m vessel -o predictions.jsonl --device.type cpu",
    "classify eval -m vessel --data rows.jsonl --out scored --seen mark --no-figures --device.type cpu",
    "classify map ais.csv -o map.html",
    "checkpoint export base/checkpoint-2 -o again",
    "vision build --tokenizer TOKENIZER --out seeing",
    "vision score --rows asked.jsonl --answers told.jsonl --without told.jsonl --show 0 --out scores",
)
"""Commands that need nothing more."""

HINTS = {
    "vision draw --out drawn": "vision",
    "serve MODEL": "serve",
    "studio runs": "serve",
    f"pretrain --tokenizer TOKENIZER {SMALL} --out tracked --log.sinks wandb {SHORT}": "track",
    f"classify words {TRACKS} --tracks.format cell": "vessels",
    "classify words ais.nmea -o words": "nmea",
    "classify map ais.csv -o map.html --tiles osm": "vessels",
    "launch ray --nproc 1 -- sft --model MODEL --data task:spelling#40": "ray",
    f"infer prompts.jsonl -m MODEL -o formed.jsonl --sampling.regex [a-z]+ {ANSWERS}": "constrain",
}
"""Commands that do, and the extra that their hint must name."""

SERVER = ("anabatic.infer.server", "anabatic.recipes.serve", "anabatic_studio")
"""What may be imported only where the extra `serve` is installed."""
PYTEST_PLUGIN = ("anabatic_sim.pytest_plugin", "anabatic_sim.pytest_own_simulation")
"""What pytest imports: it is there wherever these are used."""


class _Hidden(importlib.machinery.PathFinder):
    """Finds what the usual finder finds, less what is hidden."""

    names: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in cls.names:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context: Any = importlib.metadata.DistributionFinder.Context()) -> Iterator[Any]:  # noqa: B008
        """Return what is installed, less what is hidden, for those who ask for a version."""
        for found in super().find_distributions(context):
            if not cls.names & {
                found.name.lower().replace("-", "_"),
                *(found.read_text("top_level.txt") or "").split(),
            }:
                yield found


def hide(names: Sequence[str]) -> None:
    """Let these modules be missing."""
    _Hidden.names = frozenset(names)
    sys.meta_path[:] = [_Hidden if one is importlib.machinery.PathFinder else one for one in sys.meta_path]


def write_inputs() -> None:
    """Write what the commands read into the working folder."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))  # behind the wheel's own packages
    from anabatic_testing.tiny_models import build_tiny_model, train_tiny_tokenizer, write_tiny_text

    here = Path()
    tokenizer = train_tiny_tokenizer(here, write_tiny_text(here))
    build_tiny_model(seq_len=128).save_pretrained("MODEL")
    for file in tokenizer.iterdir():
        if file.is_file():
            Path("MODEL", file.name).write_bytes(file.read_bytes())
    tokenizer.rename("TOKENIZER")
    ask = [{"role": "user", "content": "hi"}]
    pairs = [{"prompt": f"the {n}?", "chosen": "the bird", "rejected": "hill"} for n in range(24)]
    text = "DT_60 SPD_{} TURN_0 MOVE_NONE DT_60 SPD_{} TURN_0 MOVE_NONE"
    kinds = (("Ferry", 100), ("Trawler", 20))
    rows = [
        {"text": text.format(speed, speed), "class": name, "vessel": f"{name}{n % 12}", "words": "motion-v1-r10"}
        for n in range(48)
        for name, speed in kinds
    ]
    told = [{"row": 0, "response": "yes", "label": "yes"}]
    asked = [{"messages": [*ask, {"role": "assistant", "content": "yes"}], "category": "colour", "images": ["a.png"]}]
    files = {"pairs.jsonl": pairs, "prompts.jsonl": [{"messages": ask}], "rows.jsonl": rows}
    files |= {"asked.jsonl": asked, "told.jsonl": told}
    for name, content in files.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    lines = [f"{m},2024-01-01T00:{t:02d}:00,{40 + t / 100},{-70 + t / 100},10,90" for m in (1, 2) for t in range(20)]
    Path("ais.csv").write_text("\n".join(["MMSI,BaseDateTime,LAT,LON,SOG,COG", *lines, ""]), encoding="utf-8")
    Path("ais.nmea").write_text("!AIVDM,1,1,,A,15M67FC000G?ufbE`FepT@3n00Sa,0*5C\n", encoding="utf-8")


def modules() -> dict[str, str]:
    """Import every module of the package; return what could not be."""
    import anabatic

    failed = {}
    for found in pkgutil.walk_packages(anabatic.__path__, "anabatic."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            failed[found.name] = str(error)
    return failed


def call(line: str) -> dict[str, Any]:
    """Run one command here; return its exit code and what it said."""
    from anabatic.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line.split())
        except SystemExit as end:
            code = end.code
        except BaseException:
            err.write(traceback.format_exc())
    return {"code": code, "out": out.getvalue()[-4000:], "err": err.getvalue()[-4000:]}


def main(folder: str, *names: str) -> None:
    """Try everything, and print what came of it."""
    hide(names)
    os.chdir(folder)
    write_inputs()
    found: dict[str, Any] = {"modules": modules()}
    asked = [f"{one.strip()} --help" for part in HELP.strip().splitlines() for one in part.split("|")]
    found["commands"] = {line: call(line) for line in ("--help", *asked, *WORKS, *HINTS)}
    sys.__stdout__.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
