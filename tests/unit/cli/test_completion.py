"""Tab in real shells: commands, options, choices and recipes; files where nothing else fits."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.cli import command_tree, completion
from anabatic.cli.parsing.command_line import UsageError
from anabatic.core.errors import ConfigError

BIN = Path(sys.executable).parent
ENVIRONMENT = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": "/nonexistent", "TERM": "dumb", "LC_ALL": "C.UTF-8"}

CASES = [
    (["sf"], {"sft"}),
    (["launch", ""], {"slurm", "k8s", "ray", "--"}),
    (["sft", "--recompute", ""], {"none", "selective", "full"}),
    (["sft", "--recompute=s"], {"--recompute=selective"}),
    (["sft", "--recompute", "=", "s"], {"selective"}),
    (["sft", "-c", "qwen-"], {"qwen-lora", "qwen-full"}),
    (["recipes", "show", "dp"], {"dpo"}),
    (["config", "show", "sf"], {"sft"}),
    (["completion", ""], {"words", "bash", "zsh", "fish"}),
    (["plan", "--npus", "8", "--", "sft", "--tuner", "l"], {"lora"}),
    (["sft", "--data", ""], set()),
    (["sft", "--lora.nonsense"], set()),
    (["--v"], {"--version"}),
    (["nonsense", ""], set()),
    (["sft", "--train-on-inputs", "--no-train"], {"--no-train-on-inputs"}),
]


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_words(words: list[str], offered: set[str]) -> None:
    found = {word for word, _ in completion.complete_words(words)}
    assert found == offered


def test_rare_options_are_offered_once_they_are_begun() -> None:
    common = {word for word, _ in completion.complete_words(["sft", "--"])}
    assert "--optim.lr" in common and "--optim.beta2" not in common
    assert "--optim.beta2" in {word for word, _ in completion.complete_words(["sft", "--optim."])}


@pytest.mark.process
@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.sampled_from([*command_tree.COMMANDS, "--", "=", "--x=", "-", ""]), st.text(max_size=6))))
def test_any_line_is_answered(words: list[str]) -> None:
    assert all(word.startswith(words[-1] if words else "") for word, _ in completion.complete_words(words))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.one_of(st.sampled_from(["sft", "--", "-c", "a.yaml", "--no-x", "--seed=", "--data", "-1"]), st.text()))
)
def test_any_line_is_a_command_or_a_usage_error(words: list[str]) -> None:
    try:
        name, rest = command_tree.find_command(words)
        if command_tree.is_callable(name):
            command_tree.parse_command(name, rest)
    except UsageError as error:
        assert str(error)


def test_shells_are_named() -> None:
    for shell in ("", "tcsh"):
        with pytest.raises(ConfigError) as caught:
            completion.completion(shell)
        assert "source <(anabatic completion bash)" in str(caught.value.hint)


@pytest.mark.process
def test_bash() -> None:
    script = (
        "source <(anabatic completion bash)\n"
        "COMP_WORDS=(anabatic sft --tuner l); COMP_CWORD=3; _anabatic anabatic; printf '<%s>' \"${COMPREPLY[@]}\"\n"
        "COMP_WORDS=(anabatic launc); COMP_CWORD=1; _anabatic anabatic; printf '<%s>' \"${COMPREPLY[@]}\"\n"
        "complete -p anabatic\n"
    )
    done = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "<lora><launch>complete -o default -F _anabatic anabatic\n", done.stderr


@pytest.mark.process
def test_fish() -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = 'anabatic completion fish | source; complete -C "anabatic sft --tuner l"; complete -C "anabatic launc"'
    done = subprocess.run(["fish", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["lora", "launch"], done.stderr


@pytest.mark.process
def test_zsh() -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(shutil.which("zsh") or "", ["zsh", "-f", "-i"], ENVIRONMENT)
    try:
        setup = "autoload -U compinit; compinit -u -D; source <(anabatic completion zsh); echo se't-up'\n"
        os.write(terminal, setup.encode())
        read_until(terminal, "\nset-up\r\n")
        os.write(terminal, b"anabatic launc\t")
        assert "anabatic launch " in read_until(terminal, "anabatic launch ")
        os.write(terminal, b"\x15anabatic sft --tuner l\t")
        assert "--tuner lora " in read_until(terminal, "--tuner lora ")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: str) -> str:
    """Return what the shell prints until `wanted` is there."""
    said, end = "", time.monotonic() + 120
    while wanted not in said:
        assert time.monotonic() < end and select.select([terminal], [], [], 120)[0], repr(said)
        said += os.read(terminal, 4096).decode(errors="replace")
    return said
