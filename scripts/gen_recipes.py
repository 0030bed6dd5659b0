"""Write the tables of docs/*/guides/recipes.md: which options each Qwen needs on which devices, by `anabatic plan`.

usage: python scripts/gen_recipes.py [--check]     --check only says whether the pages are current
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings
from anabatic.device import table
from anabatic.plan import model_shape, strategy_search, training_setup

ROOT = Path(__file__).resolve().parent.parent
SIZES = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
SIZES += ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
CHIPS = ("Ascend910B4", "Ascend910B3")
DEVICES = (1, 4, 8, 16)
STEP = 65_536
"""Tokens of a step: 32 rows of 2,048."""
NEAR = 0.03
"""Share of the speed that is not worth another strategy."""
RECOMPUTE = ("none", "selective", "full")
TABLE = re.compile(r"(<!-- (\w+): scripts/gen_recipes.py -->\n).*?(<!-- end -->)", re.DOTALL)


def cell(tuner: str, model: str, chip: table.Chip, devices: int) -> str:
    """What to set: the fastest setting that fits, or the simplest near it; weights in fp32, else bf16 (Kahan)."""
    for weights in ("fp32", "bf16_kahan") if tuner == "full" else ("fp32",):
        job = settings.load_job(
            "sft",
            [f"qwen-{tuner}"],
            {
                "model": f"Qwen/{model}",
                "optim": {"weights": weights},
            },
        )
        shape, _ = model_shape.get_job_shape(job)
        base = training_setup.build_setup(job, shape, devices, table.get_device_row(chip), True, job.batch.seq_len, 1)
        if found := strategy_search.pick_fastest(strategy_search.list_fitting(base, STEP, chip)):
            near = [one for one in found if one.tokens_per_s > (1 - NEAR) * found[0].tokens_per_s]
            return _said(min(near, key=lambda one: _effort(one.setup)).setup, weights)
    return "-"


def _effort(one: training_setup.TrainingSetup) -> tuple[bool, int, int]:
    """The less a setting asks for, the better, where speeds are near each other."""
    return one.offload, ("single", "ddp", "zero2", "zero3").index(one.strategy), RECOMPUTE.index(one.recompute)


def _said(best: training_setup.TrainingSetup, weights: str) -> str:
    words = [best.strategy] if best.strategy != "single" else []
    words += [best.recompute] if best.recompute != "none" else []
    words += ["offload"] if best.offload else []
    words += ["kahan"] if weights != "fp32" else []
    return " ".join([*words, f"{best.micro_tokens // 1024}K"])


def tabled(tuner: str) -> str:
    """One table in Markdown: a row for each size and chip."""
    chips = {chip.name: chip for chip in table.CHIPS}
    lines = ["| | GB | 1 | 4 | 8 | 2 x 8 |", "|---|---|---|---|---|---|"]
    for model in SIZES:
        for name in CHIPS:
            chip: Any = chips[name]
            cells = [cell(tuner, model, chip, devices) for devices in DEVICES]
            lines.append(f"| {model} | {chip.memory_gib:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    tables = {tuner: tabled(tuner) for tuner in ("lora", "full")}
    stale = []
    for code in ("en", "zh"):
        page = ROOT / "docs" / code / "guides" / "recipes.md"
        old = page.read_text(encoding="utf-8")
        new = TABLE.sub(lambda found: found[1] + "\n" + tables[found[2]] + "\n" + found[3], old)
        if new != old:
            stale.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv[1:]:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv[1:] else 'written'}: {', '.join(stale)}" if stale else "all current")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
