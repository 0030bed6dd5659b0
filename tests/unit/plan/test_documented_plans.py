"""The figures of a model of a trillion parameters in the guide are those that its command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from anabatic.cli.app import main

GUIDES = Path(__file__).parents[3] / "docs"
FULL = "--nodes 64 --tuner full --parallel.expert 64 --batch.global-batch-tokens 16777216"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("training", ["LoRA", "full"])
def test_a_trillion_parameters(language: str, training: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (GUIDES / language / "guides" / "moe.md").read_text(encoding="utf-8")
    part = text.partition("{#trillion}")[2].partition("\n## ")[0]
    (command,) = re.findall(r"```bash\nanabatic (plan .*?)```", part, re.S)
    rows = [line.split("|") for line in part.splitlines() if "`zero3`" in line]
    words = command.replace("\\\n", " ").split()
    if training == "full":
        for name, value in zip(FULL.split()[::2], FULL.split()[1::2], strict=True):
            if name in words:
                words[words.index(name) + 1] = value
            else:
                words += [name, value]
        assert FULL in rows[1][1]
    with pytest.raises(SystemExit) as caught:
        main([words[0], "--json", *words[1:]])
    assert caught.value.code in (0, None)
    plan = json.loads(capsys.readouterr().out)
    row = rows[training == "full"]
    numbers = [float(re.findall(r"[\d.]+", cell.replace(",", ""))[0]) for cell in (row[2], row[4], row[6])]
    assert numbers[0] == plan["npus"] * plan["nodes"]
    assert numbers[1] == round(plan["needs_bytes"] / 2**30, 1) and plan["fits"]
    assert numbers[2] == round(100 * plan["mfu"])
    tokens, seconds = (float(number) for number in re.findall(r"[\d.]+", row[5]))
    assert seconds == round(plan["step_seconds"], 1)
    assert tokens == round(plan["tokens_per_s"] * plan["step_seconds"] / 1e6, 1)
