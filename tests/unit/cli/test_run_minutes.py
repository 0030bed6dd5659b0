"""`anabatic run RECIPE --minutes M` with a recipe that times nothing: the hint is followed to the word."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from anabatic.cli import app


def run(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it wrote to stderr."""
    with pytest.raises(SystemExit) as caught:
        app.main(command)
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def test_the_hint_for_a_recipe_of_the_package_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = run(["run", "rl_demo", "--out", "a folder", "--minutes", "3"], capsys)
    assert code == 2 and err.startswith("error: --minutes: no stage of this recipe has schedule.minutes\nhint: ")
    copy, setting, command = re.findall("`(.*?)`", err)
    assert "in the job of base or sft or rl there, in place of its max_steps or epochs" in err
    assert run(shlex.split(copy)[1:], capsys)[0] == 0
    words = shlex.split(command)[1:]
    assert words == ["run", "my-rl_demo.yaml", "--out", "a folder", "--minutes", "3"]
    tree = yaml.safe_load(Path(words[1]).read_text(encoding="utf-8"))
    tree["stages"]["base"]["job"].update(yaml.safe_load(setting))
    Path(words[1]).write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    assert run([*words, "--dry-run"], capsys)[0] == 0


def test_the_hint_keeps_overlays_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(["run", "speedrun", "-c", "overlays/tiny", "--set", "text=a b", "--minutes", "0.50"], capsys)
    assert "`anabatic run my-speedrun.yaml -c overlays/tiny --set 'text=a b' --minutes 0.5`" in err


def test_the_hint_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("stages: {base: {command: pretrain}, tok: {command: tokenizer train}}\n", encoding="utf-8")
    err = run(["run", str(file), "--minutes", "3"], capsys)[1]
    hint = "write `schedule: {minutes: 3}` in the job of base, in place of its max_steps or epochs"
    assert err.splitlines()[1] == f"hint: {hint}"
    file.write_text("stages: {tok: {command: tokenizer train}}\n", encoding="utf-8")
    assert (
        run(["run", str(file), "--minutes", "3"], capsys)[1].splitlines()[1]
        == "hint: no stage trains: leave --minutes out"
    )
