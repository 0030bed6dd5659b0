"""An adapter through the commands: trained, killed and continued to the bit, talked to, merged."""

from __future__ import annotations

import signal
from pathlib import Path

from safetensors.torch import load_file

from e2e import command
from e2e.home import SHORT, Home

LORA = {"tuner": "lora", "lora.r": 4, "lora.init": "pissa", "optim.lr": 0.01}


def test_an_adapter_is_killed_continued_and_merged(home: Home, base: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    home.anabatic(*home.sft(whole, base, more=LORA))
    losses = list(command.losses(whole).values())
    assert len(losses) == SHORT and losses[-1] < losses[0]
    command.interrupt(home.start(*home.sft(killed, base, more=LORA)), killed, 7, signal.SIGKILL, -9)
    home.anabatic(*home.sft(killed, base, more=LORA))
    assert command.losses(killed) == command.losses(whole)
    one, two = (load_file(folder / "final_model" / "adapter_model.safetensors") for folder in (whole, killed))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert not (whole / "final_model" / "model.safetensors").exists()

    merged = tmp_path / "merged"
    home.anabatic("merge", "--model", whole, "--out", merged)
    answers = home.together(
        *(("chat", "-m", model, "-p", "Spell the word wind.", "--sampling.temperature", 0) for model in (whole, merged))
    )
    assert answers[0].out == answers[1].out and answers[0].out.strip()
    again = home.anabatic("merge", "--model", whole, "--out", merged, code=2)
    assert f"{merged} exists already" in again.err
