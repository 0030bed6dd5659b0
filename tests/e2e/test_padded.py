"""Padded batches through the command: said, shown, killed and continued."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from anabatic.core import json_reader
from e2e import command
from e2e.home import SHORT, Home


def test_padded_training_is_killed_and_continued(home: Home, base: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {n}", "input": "", "output": f"{n} " * (1 + n % 9)} for n in range(300)]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    more = {"data.train": data, "batch.packing=false": [], "tuner": "lora", "lora.r": 4, "lora.dropout": 0.2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said = home.anabatic(*home.sft(whole, base, more=more)).err
    assert re.search(r"^data .*rows\.json \(train\): 29\d rows as alpaca \(instruction, input, output\); ", said, re.M)
    shown = said[said.index("a conversation of") :]
    assert re.search(r"^\[\[\d+ .*<\|im_end\|>\]\]", shown, re.M)
    command.interrupt(home.start(*home.sft(killed, base, more=more)), killed, 7, signal.SIGKILL, -9)
    again = home.anabatic(*home.sft(killed, base, more=more)).err
    assert "rows as alpaca (instruction, input, output); " in again and "(from the cache)" in again
    assert len(command.losses(whole)) == SHORT and command.losses(killed) == command.losses(whole)
    padding = [
        [row["padding"] for row in json_reader.read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]
        for run in (whole, killed)
    ]
    assert padding[0] == padding[1] and max(padding[0]) < 0.2
    assert ("| pad " in shown) == (max(padding[0]) >= 0.01)
