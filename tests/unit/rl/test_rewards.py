"""Rewards: what counts as right, and what a user's file may do wrong."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from anabatic.config.sections.common import DeviceSettings
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.data.scoring.questions import Question
from anabatic.device.device import select_device
from anabatic.rl import rollout_batches
from anabatic.rl.reward_worker import RewardCallError, RewardWorker
from anabatic.rl.rewards import ModelReward, RewardSet, is_same_answer, require_tests, score_tests
from anabatic.rl.rollout import Rollout
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.sandbox_runner import Sandbox
from anabatic_testing.random_models import build_byte_tokenizer

FILE = """
import math, os, sys, time
print("loading")
def length(text, row):
    print("judging")
    return len(text) + row["bonus"]
def raises(text, row):
    return {}["missing"]
def nan(text, row):
    return math.nan
def none(text, row):
    return None
def slow(text, row):
    time.sleep(60 if text == "slow" else 0)
    return 1.0
def dies(text, row):
    os._exit(3)
def leaves(text, row):
    sys.exit(4)
def reads(text, row):
    return float(len(sys.stdin.read()))
def forks(text, row):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 1.0 if child else 9.0
def children(text, row):
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    open("child.pid", "w").write(str(child.pid))
    time.sleep(60)
def prints(text, row):
    for _ in range(200):
        print("x" * 9999)
    return 1.0
def never_quiet(text, row):
    while True:
        print("x" * 9999)
def says(text, row):
    return "1.0"
def much(text, row):
    return "x" * 10 ** 7
def shouts(text, row):
    raise ValueError("x" * 10 ** 7)
def turn(messages, row):
    return row["answer"] if len(messages) < 3 else None
"""


def rollout(text: str, tokens: int = 1, truncated: bool = False) -> Rollout:
    return Rollout(0, 0, [1] + [2] * tokens, 1, [1] * tokens, [0.0] * tokens, text, truncated=truncated)


def rewards(*specs: str, pattern: str = "a+", timeout: float = 5.0, room: int = 8) -> RewardSet:
    return RewardSet(specs, pattern=pattern, timeout=timeout, room=room)


def question(answer: str | None = "4", task: str = "", **row: object) -> Question:
    return Question("file.jsonl:1", [{"role": "user", "content": "2 + 2?"}], answer, task, row)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    try:
        made = Sandbox(ResourceLimits(seconds=1, memory_mib=256))
    except Failure as error:
        pytest.skip(f"programs cannot be isolated here: {error}")
    with made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("It is 2+2.\n#### 4", "so #### 4", True),
        ("#### 1,234", "that makes 1234.", True),
        ("4", "The answer is 4.0", True),
        ("4", "first 4, then 5", False),
        ("4", "", False),
        (r"\boxed{x^2}", r"so \boxed{X^2}", True),
        (r"\boxed{\frac{1}{2}}", r"so \boxed{\frac{1}{2}}.", True),
        ("#### 72", "#### 72\nThat was easier than 9.", True),
        ("0.5", "it is .5", True),
        ("-5", "-$5", True),
        ("5", "-$5", False),
        ("Paris", " paris ", True),
        ("Paris", "it is Paris", False),
        ("#### -3", "-3", True),
    ],
)
def test_answers(expected: str, said: str, right: bool) -> None:
    assert is_same_answer(expected, said) is right


def test_weights_add_up() -> None:
    with rewards("answer=2", "format", "length=0.5", pattern=r".*####.*") as judges:
        one, other = rollout("#### 4", tokens=7), rollout("5", tokens=2)
        judges.score_rollouts([one, other], [question()])
    assert one.scores == {"answer": 1.0, "format": 1.0, "length": -0.5} and one.reward == 2.75
    assert other.scores == {"answer": 0.0, "format": 0.0, "length": 0.0} and other.reward == 0.0


def test_a_generated_task_has_its_own_rule() -> None:
    with rewards("answer") as judges:
        one = rollout("l u d o")
        judges.score_rollouts([one], [question("l u d o", "spelling")])
    assert one.reward == 1.0


def test_rows_without_an_answer_are_named() -> None:
    with rewards("answer") as judges, pytest.raises(DataError, match="file.jsonl:1: the row has no answer"):
        judges.require_answers([question("4"), question(None)])
    with rewards("answer") as judges, pytest.raises(DataError, match="file.jsonl:1: the row has no answer"):
        judges.require_answers([question(" ")])


@pytest.mark.process
def test_faults_are_counted_and_shown(file: Path) -> None:
    specs = [f"{file}:{name}" for name in ("length", "raises", "nan", "none", "slow", "dies", "leaves")]
    with rewards(*specs, timeout=0.5) as judges:
        bad, good = rollout("slow"), rollout("good")
        judges.score_rollouts([bad, good], [question(bonus=1)])
        with pytest.raises(Failure, match="raises failed for all 2 answers: KeyError: 'missing' .line 8 of mine.py"):
            judges.require_working_rewards([bad, good])
    assert bad.scores["length"] == 5.0 and good.scores["slow"] == 1.0
    assert bad.faults["slow"] == "no answer within 0.5 s" and "slow" not in good.faults
    assert "not a finite number" in bad.faults["nan"] and "not a finite number" in bad.faults["none"]
    assert bad.faults["dies"] == "its process ended with code 3" and bad.reward == 5.0
    assert bad.faults["leaves"].startswith("SystemExit: 4")


@pytest.mark.process
def test_turns_come_from_the_file(file: Path) -> None:
    with rewards(f"{file}:length") as judges:
        turn = judges.get_turn_function()
        assert turn(question(), question().messages) == "4" and turn(question(), [{}, {}, {}]) is None
    with rewards("answer") as judges, pytest.raises(ConfigError, match="nothing defines"):
        judges.get_turn_function()


@pytest.mark.process
def test_a_function_that_reads_forks_or_prints_is_answered_once(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RewardWorker(str(file), 10) as mine:
        mine.require_function("reads")
        assert [mine.call_function(name, "", {}) for name in ("reads", "forks", "prints", "reads")] == [
            0.0,
            1.0,
            1.0,
            0.0,
        ]
    assert 0 < capfd.readouterr().err.count("x") <= 1 << 16


@pytest.mark.process
def test_what_is_long_is_told_short(file: Path) -> None:
    with rewards(*(f"{file}:{name}" for name in ("says", "much", "shouts"))) as judges:
        one = rollout("a")
        judges.score_rollouts([one], [question()])
    assert one.faults["says"] == "says returned '1.0', not a finite number"
    assert "10,000,000 letters" in one.faults["much"] and one.faults["shouts"].startswith("ValueError: xxx")
    assert max(map(len, one.faults.values())) < 700


@pytest.mark.process
def test_a_call_that_is_given_up_leaves_nobody(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with RewardWorker(str(file), 0.5) as mine:
        for name in ("children", "never_quiet"):
            with pytest.raises(RewardCallError, match="no answer within"):
                mine.call_function(name, "", {})
    status = Path(f"/proc/{(tmp_path / 'child.pid').read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.process
def test_a_process_does_not_outlive_its_call(file: Path) -> None:
    with RewardWorker(str(file), 0.3) as mine:
        began = time.monotonic()
        with pytest.raises(RewardCallError):
            mine.call_function("slow", "slow", {})
        assert mine.call_function("slow", "fast", {}) == 1.0 and time.monotonic() - began < 30


@pytest.mark.process
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("anwser", 'there is no reward "anwser"'),
        ("answer=x", "is not a weight"),
        ("answer=nan", "is not a weight"),
        ("no.py:f", "no such file"),
        ("{folder}/mine.py:lenght", "has no function lenght"),
        ("{folder}/broken.py:f", "cannot be loaded: SyntaxError"),
    ],
)
def test_what_cannot_be_used(file: Path, spec: str, message: str) -> None:
    (file.parent / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=message):
        rewards(spec.format(folder=file.parent))
    with pytest.raises(ConfigError, match="is given twice"):
        rewards("answer", "answer=2")
    with pytest.raises(ConfigError, match="reward_pattern"):
        rewards("format", pattern="(")


HUMAN_EVAL = {
    "prompt": "def double(x):\n    \"\"\"Twice x.\"\"\"\n", "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    ("row", "text", "passes"),
    [
        (HUMAN_EVAL, "    return 2 * x\n", True),
        (HUMAN_EVAL, "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nDone.", True),
        (HUMAN_EVAL, "    return 3 * x\n", False),
        (HUMAN_EVAL, "    while True: pass\n", False),
        (HUMAN_EVAL, "    import os\n    os._exit(0)\n", False),
        (HUMAN_EVAL, "", False),
        ({"test_list": ["assert one() == 1", "assert one() < 2"]}, "def one():\n    return 1", True),
        ({"tests": "assert one() == 2"}, "def one():\n    return 1", False),
    ],
)
def test_programs_are_run_against_their_tests(box: Sandbox, row: dict[str, Any], text: str, passes: bool) -> None:
    assert score_tests(rollout(text), question(None, **row), box) == passes


@pytest.mark.process
def test_a_program_that_writes_outside_has_not_written(box: Sandbox, tmp_path: Path) -> None:
    text = f"def double(x):\n    open({str(tmp_path / 'out')!r}, 'w').write('x')\n    return 2 * x\n"
    assert score_tests(rollout(text), question(None, **HUMAN_EVAL), box) == 0.0 and not (tmp_path / "out").exists()


@pytest.mark.process
def test_a_program_that_nobody_can_judge_is_left_out(box: Sandbox) -> None:
    row = {"tests": "assert P('1') == 1"}
    text = "class P:\n def __init__(self, x): self.x = eval(x)\n def __eq__(self, o): return self.x == o"
    every = [rollout(text), rollout("def P(x): return int(x)"), rollout("def P(x): return 2")]
    scores = {"tests": functools.partial(score_tests, sandbox=box)}
    with RewardSet(["tests"], pattern="", timeout=60.0, room=10, other=scores) as made:
        assert made.score_rollouts(every, [question(None, **row)])
        made.require_working_rewards(every[:1])
    assert [one.unjudged for one in every] == ["eval (line 2)", "", ""] and [one.reward for one in every] == [0, 1, 0]
    assert [one.faults for one in every] == [{}, {}, {}]
    told = rollout_batches.summarize_rollouts(every)
    assert told["reward"] == told["reward/tests"] == 0.5 and told["unjudged"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", rollout_batches.ADVANTAGES)
def test_advantages_are_among_the_judged(name: str) -> None:
    rewards = np.array([[1.0, np.nan, 0.0, 0.5], [np.nan] * 4, [0.0, 1.0, 1.0, 1.0]])
    found = rollout_batches.compute_advantages(name, rewards)
    expected = np.zeros((3, 4))
    if name == "batch":
        judged = np.array([[1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0]])
        expected[~np.isnan(rewards)] = rollout_batches.ADVANTAGES[name](judged)[0]
    else:
        expected[0, [0, 2, 3]] = rollout_batches.ADVANTAGES[name](np.array([[1.0, 0.0, 0.5]]))[0]
        expected[2] = rollout_batches.ADVANTAGES[name](rewards[2:])[0]
    assert (found == expected).all()
    assert (
        rollout_batches.compute_advantages(name, rewards[2:]) == rollout_batches.ADVANTAGES[name](rewards[2:])
    ).all()


def test_rows_without_tests_are_named() -> None:
    with pytest.raises(DataError, match="file.jsonl:1: the row has no tests"):
        require_tests([question(None, **HUMAN_EVAL), question(None, test="assert True")])


def test_a_reward_model(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer(tmp_path)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        num_labels=1,
        pad_token_id=0,
    )
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    device = select_device(DeviceSettings(type="cpu", dtype="fp32", threads=1))
    one = rollout("4")
    one.turns = [{"role": "assistant", "content": "4"}]
    ids = tokenizer.apply_chat_template([*question().messages, *one.turns], tokenize=True, return_dict=False)
    expected = model(torch.tensor([ids])).logits[0, 0].item()
    assert ModelReward(tmp_path, device).score_rollout(one, question()) == pytest.approx(expected, rel=1e-5)
    run = tmp_path / "run"
    shutil.copytree(tmp_path, run / "best_model", ignore=lambda *_: ["run"])
    assert ModelReward(run, device).score_rollout(one, question()) == pytest.approx(expected, rel=1e-5)
    torch.nn.init.constant_(model.score.weight, torch.inf)
    model.save_pretrained(tmp_path)
    with pytest.raises(RewardCallError, match="number is"):
        ModelReward(tmp_path, device).score_rollout(one, question())
    config.num_labels = 2
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 2 labels"):
        ModelReward(tmp_path, device)
    settings = json.loads((run / "best_model" / "config.json").read_text())
    (run / "best_model" / "config.json").write_text(json.dumps({**settings, "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(DataError, match="is no reward model"):
        ModelReward(run, device)
